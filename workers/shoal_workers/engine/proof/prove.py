"""Two steps whole against split, and once more from a restored state. All ranks of a group call it together. Hides how
the sides are made equal, run, and compared.

    whole       rank 0: the task's own model, loss and optimizer in a plain loop (plain_loop.py); all ranks get what it
                gives: loss, gradient norm, metrics, gradients, and all parameters and buffers after each update
    split       all ranks: their part of a second copy, by the trainer's own steps. Before each update the gradients are
                compared, and replaced by those of the whole side: else the rounding of a gradient that is zero decides
                the direction of an update of Adam
    restored    all ranks: a third copy gets what a checkpoint would hold after the first step, and goes on. It must
                have the results of the split side: what differs was carried outside of what is saved. Attributes of the
                task and of its modules are set back before. If the results are the same with them, these carry it

The models are copies: equal on every rank, small, and with no weight that hides a fault. A new model hides faults: a
bias of zero has no effect, and a last layer of zeros stops all gradients before it. So each parameter gets a little
noise, the same in every copy. On planned axes dropout is switched off.

If the first step differs, both sides run it once more with every module's output, to name the first one that differs. A
split output is compared with the part of the whole one that this rank should have: equal shapes as they are, a DTensor
by its place, and a dim that is shorter by the degree of tp or cp as that axis cuts it. What is cut in another way
(inside an operation that the plan does not know) is left out.

Every rank comes to the same answer. The trained model, the task's attributes, random numbers, the position and the
job's log are not touched. Called by `proof_of` and by `shoal_workers.proofs`, on the training thread.
"""

from __future__ import annotations

import io
import json
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal_workers.checkpoint.save_plan import local_tensor
from shoal_workers.contract.batch_partition import randomness_seed
from shoal_workers.contract.exception_causes import ErrorClass
from shoal_workers.contract.fault_tolerance import HealthSpec, NonFinitePolicy
from shoal_workers.contract.layout import Layout, num_stages
from shoal_workers.contract.model import ParallelPlan
from shoal_workers.contract.proofs import LayoutProof, ProofOutcome
from shoal_workers.contract.schedules import ScheduleSpec
from shoal_workers.contract.spec import JobSpec, Precision, StopSpec
from shoal_workers.engine.generation_ends import Fenced, LayoutRefused, TaskFailed
from shoal_workers.engine.group.collectives import CollectiveLog, is_collective_error
from shoal_workers.engine.group.mesh import Meshes
from shoal_workers.engine.model.build import runtime_of, shape_of, split_model
from shoal_workers.engine.model.fast_build import build_for_restore
from shoal_workers.engine.model.initial_weights import box_of
from shoal_workers.engine.parallel.assemble import make_plain
from shoal_workers.engine.parallel.assembly import Assembly
from shoal_workers.engine.parallel.head_tail import own_part
from shoal_workers.engine.parallel.names import fits
from shoal_workers.engine.parallel.split_output import SplitOutput
from shoal_workers.engine.parallel.stages import Elsewhere
from shoal_workers.engine.parallel.tensor import cuts_sequence
from shoal_workers.engine.process.outbox import Outbox
from shoal_workers.engine.process.position import Position
from shoal_workers.engine.profiling.profiling import Profiling
from shoal_workers.engine.proof.attributes import (
    Attributes,
    Content,
    Place,
    carry,
    far_number,
    owners_in_model,
    owners_in_task,
)
from shoal_workers.engine.proof.plain_loop import FLOOR, PlainLoop, PlainStep, norm, rounding
from shoal_workers.engine.state.saving import Saver
from shoal_workers.engine.state.training_state import apply_extra
from shoal_workers.engine.step.batches import Batches
from shoal_workers.engine.step.first_look import describe_changed, is_same
from shoal_workers.engine.step.generation import Generation
from shoal_workers.engine.step.gradients import GradientPass
from shoal_workers.engine.task.model_calls import ModelCalls
from shoal_workers.engine.task.randomness import generator_states, set_generator_states
from shoal_workers.engine.task.user_code import Remarks
from shoal_workers.engine.trainer import Trainer
from shoal_workers.torch_internals import Dropout

T = TypeVar("T")

TOLERANCE = 1e-3
"""Relative difference that is not rounding: right layouts of small models differ by 1e-7 to 1e-5, wrong ones by 1e-2
and more."""
_ROUNDINGS = 8
"""Roundings of a parameter's type, if it has fewer bits than fp32, that are no difference: gradients are added up in
it."""
_SAME = 1e-6
"""Relative difference between a restored run and the one that went on: the same operations on the same numbers differ
on a GPU only."""
_NUM_STEPS = 2
_MAX_NAMES = 5
_FINITE = ("the loss", "the gradient norm")
_SIZES = "must match the size of tensor"
_PARTS_OF_THE_SEQUENCE = (
    ". With gather and sequence in plan.tensor, what is between blocks is a rank's part of the sequence: add what has "
    "the whole sequence (positions) in a module with the style whole, or leave gather and sequence out."
)
_WAYS_OUT = (
    "Two ways out: a buffer of a module (self.register_buffer(name, tensor)), or state_dict() and load_state_dict() of "
    "the task, whose content is saved, restored and equal on all workers."
)
_UNKNOWN = (
    "the loss or a gradient of a step is another one when it is computed a second time, and it is not known why: a "
    "variable of a closure or of an object, a file or the time. No checkpoint holds it."
)


def prove(generation: Generation, from_rank_0: Callable[[str], str]) -> LayoutProof:
    """All ranks, after the group has formed: the same answer on each of them.

    Args:
        from_rank_0: gives every rank the text of rank 0, however long it waits.

    Raises:
        LayoutRefused: with the proof, on at least one rank: the split model cannot be computed, and the others may then
            find a broken collective.
        TaskFailed: the task's own code raised. On the data axes only where the whole side did not.
    """
    start, layout = time.perf_counter(), generation.layout
    try:
        with generation.user_code:
            try:
                smaller = shrunk(generation.task.build_model, generation.plan, layout)
            except TooLarge as error:
                message = f"the model is too large: {error}"
                return LayoutProof(layout=layout, outcome=ProofOutcome.UNPROVEN, words=message)
    except TaskFailed:
        if layout.planned_axes:
            raise
        return LayoutProof(layout=layout, outcome=ProofOutcome.UNPROVEN)  # the training says why
    states, proof = generator_states(), _Proof(generation, smaller, from_rank_0)
    try:
        with _unheard():
            answer = proof.run()
    except LayoutRefused as refused:
        raise LayoutRefused(refused.proof.model_copy(update={"seconds": time.perf_counter() - start})) from None
    finally:
        proof.attributes.set_back()
        set_generator_states(states)
    return answer.model_copy(update={"seconds": time.perf_counter() - start})


@contextmanager
def _unheard() -> Iterator[None]:
    """What the task prints, logs and warns of is said when it trains."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def proof_context(generation: Generation, smaller: Shrunk | None) -> Generation:
    """Returns the generation for one side of a proof: with a small batch in fp32, and with a position, a log and
    remarks of its own."""
    layout = generation.layout
    note, name = generation.position.note, f"proving the layout {layout.describe()}"
    generation = replace(
        generation,
        spec=spec_of_proof(generation.spec, layout, is_cut=not generation.task.has_batch_loss),
        position=Position(lambda phase, _: note(f"{name}: {phase}")),  # progress: it may take longer than a hang
        outbox=Outbox("proof"),
        collectives=CollectiveLog(),
        remarks=Remarks(),
        readers=None,
    )
    if smaller is None:
        return generation
    num_blocks = len(smaller.kept)
    small = layout.model_copy(update={"stages": (1,) * num_blocks if layout.pp > 1 else ()})
    return replace(
        generation,
        assignment=generation.assignment.model_copy(update={"layout": small}),
        meshes=replace(generation.meshes, layout=small),
        plan=generation.plan.model_copy(update={"num_blocks": num_blocks}),
    )


class _Proof:
    """One rank's part of a proof."""

    def __init__(self, generation: Generation, smaller: Shrunk | None, from_rank_0: Callable[[str], str]) -> None:
        self.generation = generation
        self.device = generation.device
        self.is_repeatable = True
        """False if samples differ when they are read again: the sides read others then."""
        self._from_rank_0 = from_rank_0
        self._layout = generation.layout
        self._smaller = smaller
        self.tolerance = TOLERANCE
        """More for a model with parameters of fewer bits."""
        self._owners = owners_in_task(generation.task.instance)
        self.attributes = Attributes(self._owners)

    def run(self) -> LayoutProof:
        whole, reason = self._whole()
        if not whole:
            return self._answer(ProofOutcome.UNPROVEN, reason)
        self.tolerance = max(TOLERANCE, _ROUNDINGS * rounding(whole[0].tensors.values()))
        side = self._tried(lambda: _Side(self))
        own = Attributes(side.owners)
        steps = [self._tried(lambda: side.step(whole[0]))]
        parts = side.runtime.assembly.parts
        saved, carried = side.saved(steps[0]), {**self.attributes.changed(parts), **own.changed(parts)}
        steps.append(self._tried(lambda: side.step(whole[1])))
        is_restored = self._all(self._restored(saved, {}, whole).is_same(steps[1]))
        is_repeatable = self._all(self.is_repeatable)
        if not is_restored and is_repeatable:
            return self._carried(saved, carried, whole, steps[1])
        if is_repeatable and (causes := self._depending(saved, carried, whole, steps[1])):
            return self._names(causes)
        pairs = [*zip(whole, steps, strict=True)]
        number, found = next(((n, one) for n, pair in enumerate(pairs) if (one := self._differing(*pair))), (0, None))
        if not is_repeatable and (found is not None or not is_restored):
            place = self.generation.task.line_of("build_dataset")
            return self._answer(ProofOutcome.UNPROVEN, describe_changed(place))
        if found is None:
            return self._answer(ProofOutcome.PROVEN, self._remark(pairs), difference=max(map(_worst, steps)))
        first = self._first_differing() if number == 0 else None
        words, module, difference = found
        if first is not None:
            words = f"the output of {first.name!r}{self._role(first.name)} differs by {_percent(first.difference)}"
            module = first.name
        words = f"{self._name} trains another model than one process: {words}."
        return self._answer(ProofOutcome.REFUSED, words, module=module, difference=difference)

    def compare(self, batch: Any, again: Any) -> None:
        """The first micro-batch, read twice."""
        self.is_repeatable = is_same(batch, again)

    def context(self) -> Generation:
        return proof_context(self.generation, self._smaller)

    def copy(self) -> nn.Module:
        """Within the task's code."""
        generation = self.generation
        keeps_dropout = not generation.layout.planned_axes
        return copy_of(
            generation.task.build_model, generation.spec.seed, self.device, self._smaller, keeps_dropout=keeps_dropout
        )

    def _whole(self) -> tuple[list[PlainStep], str]:
        """The steps of the whole side, on every rank; none, and why."""
        steps: list[PlainStep] = []
        failure: TaskFailed | None = None
        if self.generation.rank == 0:
            try:
                steps = self._run_whole()
            except TaskFailed as error:
                failure = error
        odd = [name for step in steps for name in _FINITE if not math.isfinite(step.numbers[name])]
        text = self._from_rank_0("failed" if failure is not None else " ".join(odd[:1]))
        self.attributes.set_back()
        if text == "failed" and self._layout.planned_axes:
            if failure is not None:
                raise failure
            self._run_whole()  # it raises here, too
        if text:
            return [], "" if text == "failed" else f"{text} of its first steps is not finite"
        return self._shared(steps), ""

    def _run_whole(self) -> list[PlainStep]:
        generation = self.context()
        with generation.user_code:
            batches = Batches(generation.task, generation.task.train_data, self.device, first_look=self.compare)
            loop = PlainLoop(generation, self.copy(), batches)
            return [loop.step(number) for number in range(_NUM_STEPS)]

    def _shared(self, steps: list[PlainStep]) -> list[PlainStep]:
        """What rank 0 has, on every rank."""
        if self._layout.world_size == 1:
            return steps
        box: list[Any] = [[(one.numbers, one.norms, one.scales, *map(_shapes, one.whole)) for one in steps]]
        dist.broadcast_object_list(box, src=0, device=self.device)
        if not steps:
            for numbers, norms, scales, gradients, tensors in box[0]:
                steps.append(PlainStep(numbers, self._empty(gradients), self._empty(tensors), norms, scales))
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for step in steps:
            for tensor in (value for named in step.whole for value in named.values()):
                by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for tensors in by_dtype.values():
            flat = torch.cat([_real(tensor).reshape(-1) for tensor in tensors])
            dist.broadcast(flat, src=0)
            if self.generation.rank:
                sizes = [_real(tensor).numel() for tensor in tensors]
                for tensor, part in zip(tensors, torch.split(flat, sizes), strict=True):
                    _real(tensor).copy_(part.view(_real(tensor).shape))
        return steps

    def _empty(self, shapes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> dict[str, Tensor]:
        return {name: torch.empty(shape, dtype=dtype, device=self.device) for name, (shape, dtype) in shapes.items()}

    def _restored(self, saved: _Saved, carried: Mapping[Place, Content], whole: Sequence[PlainStep]) -> _Step:
        """The second step of a copy that goes on from what is saved of the first one. `carried`: what its attributes
        have beside it."""
        self.attributes.set_back()
        side = self._tried(lambda: _Side(self))
        carry(carried, {**self._owners, **side.owners})
        side.load(saved)
        return self._tried(lambda: side.step(whole[1]))

    def _carried(
        self, saved: _Saved, carried: Mapping[Place, Content], whole: Sequence[PlainStep], expected: _Step
    ) -> LayoutProof:
        """The restored run differs. Which attributes carry the difference?"""

        def goes_on(without: Place | None) -> bool:
            values = {place: value for place, value in carried.items() if place != without}
            return self._all(self._restored(saved, values, whole).is_same(expected))

        places = sorted({place for own in self._gathered(list(carried)) for place in own})
        if not places or not goes_on(None):
            return self._answer(ProofOutcome.UNPROVEN, _UNKNOWN)
        return self._names([place for place in places[: 2 * _MAX_NAMES] if not goes_on(place)] or places)

    def _depending(
        self, saved: _Saved, carried: Mapping[Place, Content], whole: Sequence[PlainStep], expected: _Step
    ) -> list[Place]:
        """Numbers that a condition reads: the restored run has the same results with the values of now, and other ones
        with values far away."""
        far = {place: other for place, one in carried.items() if (other := far_number(one)) is not None}
        places = sorted({place for own in self._gathered(list(far)) for place in own})[: 2 * _MAX_NAMES]

        def depends(changed: Sequence[Place]) -> bool:
            try:
                values = {place: far[place] for place in changed if place in far}
                return not self._all(self._restored(saved, values, whole).is_same(expected))
            except TaskFailed:  # a number of this size has no place in a table
                return True

        if not places or not depends(places):
            return []
        return [place for place in places if depends([place])] or places

    def _names(self, causes: Sequence[Place]) -> LayoutProof:
        names = ", ".join(f"{key!r} of {owner}" for owner, key in causes[:_MAX_NAMES])
        names += " ..." if len(causes) > _MAX_NAMES else ""
        words = (
            f"loss() or forward() changes {names}, and a later loss or gradient depends on it: no checkpoint holds it, "
            f"and each worker would have its own. {_WAYS_OUT}"
        )
        return self._answer(ProofOutcome.REFUSED, words)

    def _differing(self, expected: PlainStep, found: _Step) -> tuple[str, str, float] | None:
        """What differs in a step, the module and by how much; None means nothing."""
        name = max(found.gradients, key=lambda one: found.gradients[one], default="")
        difference = found.gradients.get(name, 0.0)
        module = name.rpartition(".")[0]
        if math.isinf(difference):
            return f"the parameter {name!r}{self._role(module)} is on no rank", module, difference
        if difference > self.tolerance:
            words = f"the gradient of {name!r}{self._role(module)} differs by {_percent(difference)}"
            return words, module, difference
        for what, differences in (("parameter", found.parameters), ("buffer", found.buffers)):
            name = max(differences, key=lambda one: differences[one], default="")
            if differences.get(name, 0.0) > self.tolerance:
                words = (
                    f"the {what} {name!r} differs after an update by {_percent(differences[name])} of what it changed"
                )
                return words, name.rpartition(".")[0], differences[name]
        for name, value in expected.numbers.items():
            now = found.numbers.get(name, math.nan)
            is_told = not self._layout.planned_axes and name not in _FINITE
            if (difference := _relative(value, now)) > self.tolerance and not is_told:
                return f"{name} is {now:.6g} instead of {value:.6g}", "", difference
        return None

    def _remark(self, pairs: Sequence[tuple[PlainStep, _Step]]) -> str:
        """On the data axes, a metric may have a counter of its own."""
        for expected, found in pairs:
            for name, value in expected.numbers.items():
                now = found.numbers.get(name, math.nan)
                if _relative(value, now) > self.tolerance:
                    return (
                        f"{name} of a step is {now:.6g} with these workers, and {value:.6g} in one process: it is "
                        "computed from what each worker counts for itself, and counted again after a restore. Loss and "
                        "parameters do not depend on it."
                    )
        return ""

    def _first_differing(self) -> Differing | None:
        """The first module that differs on any rank in the first step. Each rank computes its own micro-batch whole."""
        generation, expected, found = self.context(), Outputs(), Outputs()
        self.attributes.set_back()
        with generation.user_code:
            model = self.copy()
            loop = PlainLoop(generation, model, Batches(generation.task, generation.task.train_data, self.device))
            with expected.recorded(model):
                loop.forward(0, generation.own_micro_batches()[0].index)
        self.attributes.set_back()
        side = _Side(self)
        with found.recorded(*side.runtime.assembly.parts):
            side.gradients.run(0)
        everyone = self._gathered(first_differing(expected, found, generation.meshes, self.tolerance))
        return min(
            (difference for difference in everyone if difference is not None),
            key=lambda difference: difference.number,
            default=None,
        )

    def _gathered(self, value: T) -> list[T]:
        everyone: list[T] = [value] * self._layout.world_size
        dist.all_gather_object(everyone, value)
        return everyone

    def _all(self, flag: bool) -> bool:
        return all(self._gathered(flag))

    def _tried(self, call: Callable[[], T]) -> T:
        """What a model that is split by a plan cannot compute is the layout's fault: the whole one can."""
        try:
            with self.generation.user_code:
                return call()
        except (Fenced, LayoutRefused):
            raise
        except Exception as error:
            if not self._layout.planned_axes or is_collective_error(error) or not isinstance(error, TaskFailed):
                raise
            if error.report.error_class is not ErrorClass.PLAIN:
                raise
            message = f"{self._name} cannot be computed: {_cause(error)}"
            if self._layout.tp > 1 and cuts_sequence(self.generation.plan) and _SIZES in message:
                message += _PARTS_OF_THE_SEQUENCE
            raise LayoutRefused(self._answer(ProofOutcome.REFUSED, message)) from error

    def _role(self, module: str) -> str:
        """What the plan says of a module."""
        plan = self.generation.plan
        styles = [style for pattern, style in plan.tensor.items() if fits(module, pattern)]
        return f" (plan.tensor: {styles[0]})" if styles and self._layout.tp > 1 else ""

    @property
    def _name(self) -> str:
        return f"the layout {self._layout.describe()}"

    def _answer(
        self, outcome: ProofOutcome, message: str = "", *, module: str = "", difference: float = 0.0
    ) -> LayoutProof:
        finite = difference if math.isfinite(difference) else 1.0
        small = "" if self._smaller is None else f"a copy with {len(self._smaller.kept)} blocks"
        return LayoutProof(
            layout=self._layout, outcome=outcome, words=message, module=module, difference=finite, shrunk=small
        )


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


@dataclass(frozen=True, slots=True)
class _Saved:
    """What a checkpoint has of one rank."""

    tensors: dict[str, Tensor]
    extra: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Step:
    """What one step of a split copy gives."""

    numbers: dict[str, float]
    """As in `PlainStep`; equal on all ranks."""
    gradients: dict[str, float]
    """Difference of each parameter's gradient, relative; equal on all ranks."""
    parameters: dict[str, float]
    """Difference of each parameter after the update; equal on all ranks."""
    buffers: dict[str, float]
    """Differences of buffers that are not rounding, on any rank."""
    local_gradients: list[Tensor]
    tensors: dict[str, Tensor]
    """This rank's part of the state."""

    def is_same(self, other: _Step) -> bool:
        """Return whether the results are those of another run on this rank, up to rounding."""
        if self.tensors.keys() != other.tensors.keys() or len(self.local_gradients) != len(other.local_gradients):
            return False
        pairs = [*zip(self.local_gradients, other.local_gradients, strict=True)]
        pairs += [(value, other.tensors[name]) for name, value in self.tensors.items()]
        numbers = [(self.numbers[name], other.numbers[name]) for name in _FINITE]
        return all(_relative(*pair) <= _SAME for pair in numbers) and all(_are_near(*pair) for pair in pairs)


class _Side:
    """A copy of the model as it trains."""

    def __init__(self, proof: _Proof) -> None:
        self._generation = generation = proof.context()
        self._tolerance = proof.tolerance
        task = generation.task
        model = proof.copy()
        make_plain(model, task.line_of("build_model"))
        shape, num_parameters = shape_of(model), _num_parameters(model)
        aliases = _aliases(model)
        split = split_model(generation, model)
        self.runtime = runtime_of(generation, split, shape, num_parameters)
        batches = Batches(task, task.train_data, proof.device, first_look=proof.compare)
        self.gradients = _ComparedGradients(
            generation, split.assembly, batches, split.calls, split.trained, aliases=aliases
        )
        saver = Saver("", generation.outbox, stall_s=1.0, note=generation.position.note)
        profiling = Profiling("", generation.outbox, generation.position, has_gpu=False)
        self._trainer = Trainer(generation, self.runtime, saver, None, profiling, self.gradients)
        for part in split.assembly.parts:
            part.train()

    @property
    def owners(self) -> dict[str, object]:
        return owners_in_model(self.runtime.assembly.parts)

    def step(self, expected: PlainStep) -> _Step:
        self.gradients.expected = expected
        try:
            verdict = self._trainer.step()
        finally:
            self._trainer.close()
        metrics = self.gradients.metrics(verdict.metrics)
        numbers = {"the loss": verdict.loss, "the gradient norm": verdict.grad_norm}
        numbers |= {f"the metric {name!r}": value for name, value in metrics.items()}
        assembly = self.runtime.assembly
        parameters = differences(
            assembly,
            self.gradients.aliases,
            expected.tensors,
            expected.scales,
            lambda one: one.detach(),
            self._generation.device,
        )
        tensors = {name: local_tensor(tensor).clone() for name, tensor in self.runtime.state.view.tensors().items()}
        return _Step(
            numbers=numbers,
            gradients=self.gradients.found,
            parameters=parameters,
            buffers=self._differing_buffers(expected),
            local_gradients=self.gradients.local,
            tensors=tensors,
        )

    def saved(self, newest: _Step) -> _Saved:
        return _Saved(newest.tensors, json.loads(self._trainer.plain_values()))

    @torch.no_grad()
    def load(self, saved: _Saved) -> None:
        """As `restore` does it from a checkpoint."""
        update, view = self.runtime.update, self.runtime.state.view
        with self._generation.user_code:
            update.materialise_state()
        for name in saved.tensors.keys() - view.tensors().keys():
            parameter, _, key = name.removeprefix("optim.").rpartition(".")
            update.make_state(parameter, key, tuple(saved.tensors[name].shape), saved.tensors[name].dtype)
        tensors = view.tensors()
        for name, value in saved.tensors.items():
            if name in tensors:
                local_tensor(tensors[name]).copy_(value)
        update.drop_state(tensors.keys() - saved.tensors.keys())
        step, _ = apply_extra(saved.extra, update)
        update.fill_tied_copies()
        self._generation.position.reach(step)

    def _differing_buffers(self, expected: PlainStep) -> dict[str, float]:
        own = {}
        for part in self.runtime.assembly.parts:
            for name, buffer in part.named_buffers():
                value = expected.tensors.get(name)
                if value is not None and value.shape == buffer.shape and not isinstance(buffer, DTensor):
                    difference = _relative_norm(value, buffer)
                    if not difference <= self._tolerance:
                        own[name] = difference
        everyone: list[dict[str, float]] = [own] * self._generation.layout.world_size
        dist.all_gather_object(everyone, own)
        return {name: value for one in everyone for name, value in one.items()}


class _ComparedGradients(GradientPass):
    """Gradients that are compared with those of the whole side, and then replaced by them."""

    def __init__(
        self,
        generation: Generation,
        assembly: Assembly,
        batches: Batches,
        calls: ModelCalls,
        trained: Sequence[str] = (),
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(generation, assembly, batches, calls, trained)
        self.aliases = aliases or {}
        self._names = trained
        self.expected: PlainStep | None = None
        self.found: dict[str, float] = {}
        self.local: list[Tensor] = []

    @torch.no_grad()
    def run(self, step: int, scale: float = 1.0) -> Tensor:
        with torch.enable_grad():
            share = super().run(step, scale)
        assembly, expected = self._assembly, self.expected
        if expected is None:
            return share
        self.local = [local_tensor(one.grad).clone() for one in assembly.parameters() if one.grad is not None]
        floor = FLOOR * math.hypot(*expected.norms.values())
        scales = {name: expected.norms.get(name, 0.0) + floor for name in self._names}
        self.found = differences(
            assembly, self.aliases, expected.gradients, scales, lambda one: one.grad, self._generation.device
        )
        for name, parameter in assembly.all_parameters():
            slices, gradient = _slices(parameter), expected.gradients.get(self.aliases.get(name, name))
            if parameter.grad is not None and slices is not None and gradient is not None:
                part = local_tensor(parameter.grad)
                part.copy_(_whole_dims(gradient)[slices].view_as(part))
        return share


@torch.no_grad()
def differences(
    assembly: Assembly,
    aliases: Mapping[str, str],
    expected: Mapping[str, Tensor],
    scales: Mapping[str, float],
    value_of: Callable[[Tensor], Tensor | None],
    device: torch.device,
) -> dict[str, float]:
    """All ranks: of each name in `scales`, the norm of the difference over its scale. Equal on all ranks.

    Infinite: no rank has all of the parameter.

    Args:
        expected: whole tensors by name, the same on every rank; missing: zeros.
        scales: by the names of parameters of the whole model.
        aliases: other names of the same parameters.
        value_of: of a rank's parameter what is compared.
    """
    names = [*scales, *(alias for alias, owner in aliases.items() if owner in scales)]
    numbers = {name: number for number, name in enumerate(names)}
    copies = assembly.copies()
    sums = torch.zeros(len(names), 2, dtype=torch.float64, device=device)
    for name, parameter in assembly.all_parameters():
        slices = _slices(parameter)
        if slices is None or name not in numbers:
            continue
        value, whole = value_of(parameter), expected.get(aliases.get(name, name))
        own = None if value is None else local_tensor(value)
        part = None if whole is None else _whole_dims(whole)[slices]
        share, delta = assembly.share(parameter), _distance(own, part)
        sums[numbers[name], 0] += share * delta * delta
        if whole is not None and part is not None and id(parameter) not in copies:
            sums[numbers[name], 1] += share * part.numel() / max(whole.numel(), 1)
    dist.all_reduce(sums)
    deltas, parts = sums.sqrt()[:, 0].tolist(), sums[:, 1].tolist()
    found = {}
    for name, delta in zip(names, deltas, strict=True):
        scale = scales[aliases.get(name, name)]
        found[name] = delta / scale if scale else delta
    for name in scales:
        held = parts[numbers[name]] + sum(parts[numbers[a]] for a, owner in aliases.items() if owner == name)
        if name in expected and expected[name].numel() and held < 0.999:
            found[name] = math.inf
    return found


def _slices(parameter: Tensor) -> tuple[slice, ...] | None:
    """The part of the whole parameter that this rank has; None if it is not known."""
    box = box_of(parameter)
    if box is None:
        return None
    return tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))


def _whole_dims(tensor: Tensor) -> Tensor:
    """A scalar has one dimension in a model that trains (`make_plain`)."""
    return tensor if tensor.ndim else tensor.view(1)


def _distance(own: Tensor | None, part: Tensor | None) -> float:
    if own is None or part is None:
        return norm(part if own is None else own)
    return norm(own.to(part.dtype) - part.view_as(own))


def _worst(step: _Step) -> float:
    return max([*step.gradients.values(), *step.parameters.values()], default=0.0)


def _are_near(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other):
        return True
    one, other = _real(one).double(), _real(other).double()
    return torch.allclose(one, other, rtol=0, atol=_SAME * float(one.abs().max()), equal_nan=True)


def _aliases(model: nn.Module) -> dict[str, str]:
    """Every further name of a parameter that needs a gradient -> its first one."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    everywhere = model.named_parameters(remove_duplicate=False)
    return {
        name: first[id(parameter)]
        for name, parameter in everywhere
        if first[id(parameter)] != name and parameter.requires_grad
    }


def _cause(error: TaskFailed) -> str:
    """Returns one line, the innermost cause, because torch's pipeline says only which of its stages failed."""
    cause: BaseException = error.__context__ or error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, TaskFailed):
        return cause.report.sentence
    text = next(iter(str(cause).strip().splitlines()), "")
    return f"{type(cause).__name__}: {text}" + (f" ({error.report.line})" if error.report.line else "")


def _percent(difference: float) -> str:
    return f"{100 * difference:.2g} %" if difference < 1 else f"{100 * difference:.0f} %"


def _relative(expected: float, actual: float) -> float:
    if expected == actual or (math.isnan(expected) and math.isnan(actual)):
        return 0.0
    difference = abs(actual - expected) / (abs(expected) + 1e-6)
    return difference if math.isfinite(difference) else math.inf


def _real(value: Tensor) -> Tensor:
    return torch.view_as_real(value) if value.is_complex() else value


LARGEST = 50_000_000
"""Parameters of a model that is proven whole."""
_LARGEST_SHRUNK = 500_000_000
"""Parameters of a model that is proven without most of its blocks: each copy takes 8 bytes for each parameter."""
_NOISE = 0.02
_STREAM = 0x50524F4F
"""Separates these random numbers from all others."""
_SAMPLES = 2
"""Samples of a micro-batch: one alone would hide what mixes samples."""
_MOST_MICRO_BATCHES = 4
"""Micro-batches of a step; beyond it, ranks have padding."""
_DROPOUTS = ("dropout", "drop_prob", "dropout_p", "attention_dropout", "hidden_dropout", "resid_dropout", "p_dropout")


def spec_of_proof(spec: JobSpec, layout: Layout, *, is_cut: bool = True) -> JobSpec:
    """Returns the same task in fp32, so that rounding does not hide or make a difference, with a small global batch and
    nothing beside the steps. `is_cut`: micro-batches have few samples."""
    micro_size = min(spec.batch.micro_size, _SAMPLES) if is_cut else spec.batch.micro_size
    num = min(spec.batch.num_micro_batches, max(2, min(layout.num_data_ranks, _MOST_MICRO_BATCHES)))
    return spec.model_copy(
        update={
            "batch": spec.batch.model_copy(update={"micro_size": micro_size, "global_size": micro_size * num}),
            "stop": StopSpec(steps=_NUM_STEPS),
            "schedule": ScheduleSpec(name="constant", warmup_steps=0),
            "validation": spec.validation.model_copy(update={"samples": min(spec.validation.samples, 1)}),
            "checkpoint": spec.checkpoint.model_copy(update={"every_s": None}),
            "snapshot": spec.snapshot.model_copy(update={"enabled": False}),
            "health": HealthSpec(non_finite=NonFinitePolicy.SKIP, checksum_every_steps=None),
            "precision": Precision.FP32,
            "module_precision": {},
            "reduce_precision": Precision.FP32,
            "deterministic": False,
            "compile": False,
        }
    )


@dataclass(frozen=True, slots=True)
class Shrunk:
    """A large model without most of its blocks."""

    blocks: str
    """The nn.ModuleList."""
    kept: tuple[int, ...]
    """Numbers of the blocks that stay."""


def shrunk(
    build: Callable[[], nn.Module], plan: ParallelPlan, layout: Layout, *, largest: int = LARGEST
) -> Shrunk | None:
    """What is left out of a model that is too large to be proven whole; None means nothing. Needs no communication.

    Raises:
        TooLarge: it cannot be made smaller, or not enough.
    """
    model = build_for_restore(build)
    total = _num_parameters(model)
    if total <= largest:
        return None
    blocks = dict(model.named_modules()).get(plan.blocks)
    if not plan.blocks or not isinstance(blocks, nn.ModuleList):
        raise TooLarge(f"it has {total:,} parameters, and its plan names no blocks that could be left out")
    if any(name.startswith(f"{plan.blocks}.") for pair in plan.tied.items() for name in pair):
        raise TooLarge(f"it has {total:,} parameters, and parameters of its blocks are tied")
    num = max(2, num_stages(layout))
    # the first, and the last ones: a mixture of experts may begin with blocks without experts
    kept = tuple(sorted({0, *range(max(0, len(blocks) - num + 1), len(blocks))}))
    left = total - sum(_num_parameters(block) for number, block in enumerate(blocks) if number not in kept)
    if left > _LARGEST_SHRUNK:
        raise TooLarge(f"it has {total:,} parameters, and {left:,} with {len(kept)} blocks")
    return Shrunk(plan.blocks, kept)


class TooLarge(Exception):
    """The model cannot be proven on this machine; the message continues `the model is too large: `."""


def copy_of(
    build: Callable[[], nn.Module],
    seed: int,
    device: torch.device,
    smaller: Shrunk | None = None,
    *,
    keeps_dropout: bool = False,
) -> nn.Module:
    """A copy of the model that `build` makes, in training mode. The same values on every rank and in every copy."""
    model = build() if smaller is None else build_for_restore(build)
    if smaller is not None:
        blocks = model.get_submodule(smaller.blocks)
        assert isinstance(blocks, nn.ModuleList)
        for number in reversed(range(len(blocks))):
            if number not in smaller.kept:
                del blocks[number]
    model = model.to(device)
    if not keeps_dropout:
        _switch_off_dropout(model)
    generator = torch.Generator().manual_seed(randomness_seed(seed ^ _STREAM, 0, 0))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() or parameter.is_complex():
                noise = torch.empty(parameter.shape, dtype=torch.float32).uniform_(-1, 1, generator=generator)
                noise = noise.to(parameter.device, parameter.dtype)
                if smaller is None:
                    parameter.add_(noise, alpha=_NOISE)
                elif parameter.ndim < 2:  # nothing was drawn: norms begin near one
                    parameter.copy_(1 + _NOISE * noise)
                else:
                    parameter.copy_(noise * (3 / parameter[0].numel()) ** 0.5)
    model.train()
    return model


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _switch_off_dropout(model: nn.Module) -> None:
    """Ranks that hold parts of an activation draw other masks than a process that holds it whole."""
    for module in model.modules():
        if isinstance(module, Dropout):
            module.p = 0.0
        for name in _DROPOUTS:
            if isinstance(vars(module).get(name), float):
                setattr(module, name, 0.0)


@dataclass(slots=True)
class Outputs:
    """The first output of each module, in the order in which they were computed."""

    by_name: dict[str, Tensor] = field(default_factory=dict)

    @contextmanager
    def recorded(self, *models: nn.Module) -> Iterator[None]:
        """Records the outputs of the modules while the models run."""
        handles = [
            module.register_forward_hook(self._hook(name))
            for model in models
            for name, module in model.named_modules()
            if name and not isinstance(module, Elsewhere)  # another stage computes it
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def record(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if name in self.by_name or not isinstance(output, Tensor) or not output.is_floating_point():
                return
            if isinstance(output, SplitOutput):
                output = output.whole()
            if not torch.isnan(output).all():  # else of what a pipeline's stage does not know: see parallel/stages.py
                self.by_name[name] = output.detach().clone()

        return record


@dataclass(frozen=True, slots=True)
class Differing:
    """A module whose output differs, on one rank."""

    number: int
    """Number in the order of the whole model."""
    name: str
    difference: float


def first_differing(whole: Outputs, split: Outputs, meshes: Meshes, tolerance: float = TOLERANCE) -> Differing | None:
    """The first one on this rank; None if no output that can be compared differs."""
    for number, (name, expected) in enumerate(whole.by_name.items()):
        if name not in split.by_name:
            continue
        difference = difference_of(expected, split.by_name[name], meshes)
        if difference is not None and not difference <= tolerance:
            return Differing(number, name, difference)
    return None


def difference_of(whole: Tensor, split: Tensor, meshes: Meshes) -> float | None:
    """Relative, of the part that this rank has; None if it is not known which part that is."""
    local_part = local_tensor(split)
    if isinstance(split, DTensor):
        box = box_of(split)
        if box is None or tuple(split.shape) != tuple(whole.shape):
            return None
        slices = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
        parts = [whole[slices]]
    else:
        parts = list(_parts(whole, tuple(local_part.shape), meshes))
    norms = [_relative_norm(part, local_part) for part in parts if part.shape == local_part.shape]
    return min(norms, default=None)


def _parts(whole: Tensor, shape: tuple[int, ...], meshes: Meshes) -> Iterator[Tensor]:
    """What a rank may have of `whole` if its own part has this shape."""
    if len(shape) != whole.ndim:
        return
    if tuple(whole.shape) == shape:
        yield whole
        return
    tp = meshes.tp.size() if meshes.tp is not None else 1
    cp = meshes.cp.size() if meshes.cp is not None else 1
    for dim in range(whole.ndim):
        if meshes.cp is not None and whole.shape[dim] % (2 * cp) == 0:
            part = own_part(whole, meshes.cp.get_local_rank(), cp, dim)
            yield part
            yield from (cut for cut in _cuts(part, meshes, tp))
    yield from _cuts(whole, meshes, tp)


def _cuts(whole: Tensor, meshes: Meshes, tp: int) -> Iterator[Tensor]:
    if meshes.tp is None:
        return
    for dim in range(whole.ndim):
        if whole.shape[dim] % tp == 0:
            yield whole.chunk(tp, dim)[meshes.tp.get_local_rank()]


def _relative_norm(expected: Tensor, part: Tensor) -> float:
    difference = torch.linalg.vector_norm((expected.double() - part.double()).flatten())
    scale = torch.linalg.vector_norm(expected.double().flatten())
    return float(difference / scale) if scale > 0 else float(difference)
