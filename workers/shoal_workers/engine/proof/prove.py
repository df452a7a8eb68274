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

If the first step differs, both sides run it once more with every module's output, to name the first one that differs.

Every rank comes to the same answer. The trained model, the task's attributes, random numbers, the position and the
job's log are not touched. Called by `proof_of` and by `shoal_workers.proofs`, on the training thread.
"""

from __future__ import annotations

import io
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shoal_workers.contract.exception_causes import ErrorClass
from shoal_workers.contract.proofs import LayoutProof, ProofOutcome
from shoal_workers.contract.spec import Precision
from shoal_workers.engine.generation_ends import Fenced, LayoutRefused, TaskFailed
from shoal_workers.engine.group.all_ranks import all_ranks
from shoal_workers.engine.group.collectives import is_collective_error
from shoal_workers.engine.model.build import choose_kernels
from shoal_workers.engine.parallel.names import fits
from shoal_workers.engine.parallel.sharding import compute_dtype
from shoal_workers.engine.parallel.tensor import cuts_sequence
from shoal_workers.engine.proof.attributes import (
    Attributes,
    Content,
    Place,
    carry,
    far,
    owners_in_task,
)
from shoal_workers.engine.proof.copies import (
    NUM_STEPS,
    Shrunk,
    TooLarge,
    computes_in,
    copy_of,
    proof_context,
    shrunk,
)
from shoal_workers.engine.proof.differences import Differing, Outputs, first_differing, real, relative
from shoal_workers.engine.proof.plain_loop import PlainLoop, PlainStep, rounding
from shoal_workers.engine.proof.split_side import FINITE, Saved, SplitSide, SplitStep
from shoal_workers.engine.randomness import generator_states, set_generator_states
from shoal_workers.engine.step.batches import Batches
from shoal_workers.engine.step.first_look import describe_changed, is_same
from shoal_workers.engine.step.generation import Generation
from shoal_workers.engine.task.code_owner import line_of_attribute

T = TypeVar("T")

TOLERANCE = 1e-3
"""Relative difference that is not rounding: right layouts of small models differ by 1e-7 to 1e-5, wrong ones by 1e-2
and more."""
_ROUNDINGS = 8
"""Roundings of a parameter's type, if it has fewer bits than fp32, that are no difference: gradients are added up in
it."""
_AMPLIFIED = 4
"""Times the difference that fewer bits make of a plain loop: two with other roundings differ by about as much. A
normalisation over few samples makes a third of everything out of a rounding of its input."""
_MAX_NAMES = 5
_SIZES = "must match the size of tensor"
_PARTS_OF_THE_SEQUENCE = (
    ". With gather and sequence in plan.tensor, what is between blocks is a rank's part of the sequence: add what has "
    "the whole sequence (positions) in a module with the style whole, or leave gather and sequence out."
)
_ANOTHER_UPDATE = (
    ". The gradients are equal, so the optimizer's step is another one for parameters that are split. Set parallelism: "
    "{shard: none}, with which each worker has whole parameters, or name muon or adafactor in the spec "
    "(optimizer.name), which gather them"
)
_WAYS_OUT = (
    "Two ways out: a buffer of a module (self.register_buffer(name, tensor)), or state_dict() and load_state_dict() of "
    "the task, whose content is saved, restored and equal on all workers."
)
_MAY_CHANGE = (
    "a loss or a gradient is another one when it is computed a second time, and {} may be why: an iterator, or a cache "
    "of a limited size, whose content is not known. No checkpoint holds it, and each worker would have its own."
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
    start = time.perf_counter()
    choose_kernels(deterministic=generation.spec.deterministic)
    states, proof = generator_states(), _Proof(generation, from_rank_0)
    try:
        answer = proof.answer()
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


class _Proof:
    """One rank's part of a proof."""

    def __init__(self, generation: Generation, from_rank_0: Callable[[str], str]) -> None:
        self.generation = generation
        self.device = generation.device
        self.is_repeatable = True
        """False if samples differ when they are read again: the sides read others then."""
        self._from_rank_0 = from_rank_0
        self._layout = generation.layout
        self._smaller: Shrunk | None = None
        self.tolerance = TOLERANCE
        """More for a model with parameters of fewer bits, or that computes in fewer."""
        self._is_mixed = False
        """True while the sides compute in the types of the job; else in fp32."""
        self._whole_steps: list[PlainStep] = []
        self._in_fp32: list[PlainStep] = []
        """The whole side in fp32, while the sides compute in the types of the job."""
        self._rounded: list[PlainStep] = []
        """The whole side with other roundings of its gradients, once something differs."""
        self._owners = owners_in_task(generation.task.instance, generation.task.train_data)
        self.attributes = Attributes(self._owners)

    def answer(self) -> LayoutProof:
        generation = self.generation
        try:
            with generation.user_code:
                try:
                    self._smaller = shrunk(generation.task.build_model, generation.plan, self._layout)
                except TooLarge as error:
                    return self._answer(ProofOutcome.UNPROVEN, f"the model is too large: {error}")
        except TaskFailed:
            if self._layout.planned_axes:
                raise
            return self._answer(ProofOutcome.UNPROVEN)  # the training says why
        self.attributes = Attributes(self._owners)  # what build_model sets is no state of a step
        with _unheard():
            proof = self._run()
            if proof.outcome is not ProofOutcome.PROVEN or computes_in(generation.spec) == {Precision.FP32}:
                return proof
            self.attributes.set_back()
            self._is_mixed, self._in_fp32 = True, self._whole_steps
            mixed = self._run()
            if mixed.outcome is ProofOutcome.UNPROVEN and mixed.words:
                return proof.model_copy(update={"words": f"{self._name} was not proven: {mixed.words}"})
            return mixed if mixed.outcome is ProofOutcome.REFUSED else proof

    def _run(self) -> LayoutProof:
        whole, reason = self._whole()
        if not whole:
            return self._answer(ProofOutcome.UNPROVEN, reason)
        self._whole_steps, self._rounded = whole, []
        dtypes = {one.dtype for one in whole[0].tensors.values()} | set(
            map(compute_dtype, computes_in(self.context().spec))
        )
        self.tolerance = max(TOLERANCE, _ROUNDINGS * rounding(dtypes))
        side = self._tried(self._side)
        own = Attributes(side.owners)
        self._named = {**self._owners, **side.owners}
        steps = [self._tried(lambda: side.step(whole[0]))]
        parts = side.runtime.assembly.parts
        saved, carried = side.saved(steps[0]), {**self.attributes.changed(parts), **own.changed(parts)}
        steps.append(self._tried(lambda: side.step(whole[1])))
        others = far(carried, {**self.attributes.changed(parts), **own.changed(parts)})
        unknown = [*self.attributes.unknown(), *own.unknown()]
        is_restored = self._all(self._restored(saved, {}, whole).is_same(steps[1]))
        is_repeatable = self._all(self.is_repeatable)
        if not is_restored and is_repeatable:
            return self._carried(saved, carried, unknown, whole, steps[1])
        if is_repeatable and (causes := self._depending(saved, others, whole, steps[1])):
            return self._names(causes)
        pairs = [*zip(whole, steps, strict=True)]
        number, difference_found = self._first_difference(pairs)
        if difference_found is not None and is_repeatable:
            # An update may enlarge rounding: Muon orthogonalises in bf16, so a last bit changes some percent of it.
            self._rounded = self._whole_rounded_otherwise()
            number, difference_found = self._first_difference(pairs)
        if not is_repeatable and (difference_found is not None or not is_restored):
            place = self.generation.task.line_of("build_dataset")
            return self._answer(ProofOutcome.UNPROVEN, describe_changed(place))
        if difference_found is None:
            return self._answer(ProofOutcome.PROVEN, self._remark(pairs), difference=max(map(_worst, steps)))
        first = self._first_differing() if number == 0 else None
        message, module, difference = difference_found
        if first is not None:
            message = f"the output of {first.name!r}{self._role(first.name)} differs by {_percent(first.difference)}"
            module = first.name
        message = f"{self._name} trains another model than one process: {message}."
        return self._answer(ProofOutcome.REFUSED, message, module=module, difference=difference)

    def compare(self, batch: Any, again: Any) -> None:
        """The first micro-batch, read twice."""
        self.is_repeatable = is_same(batch, again)

    def context(self) -> Generation:
        return proof_context(self.generation, self._smaller, is_mixed=self._is_mixed)

    def copy(self) -> nn.Module:
        """Within the task's code."""
        generation = self.generation
        keeps_dropout = not generation.layout.planned_axes
        return copy_of(
            generation.task.build_model, generation.spec.seed, self.device, self._smaller, keeps_dropout=keeps_dropout
        )

    def _side(self) -> SplitSide:
        """Within the task's code."""
        return SplitSide(self.context(), self.copy(), self.tolerance, self.compare)

    def _whole(self) -> tuple[list[PlainStep], str]:
        """The steps of the whole side, on every rank; none, and why."""
        steps: list[PlainStep] = []
        failure: TaskFailed | None = None
        if self.generation.rank == 0:
            try:
                steps = self._run_whole()
            except TaskFailed as error:
                failure = error
        odd = [name for step in steps for name in FINITE if not math.isfinite(step.numbers[name])]
        text = self._from_rank_0("failed" if failure is not None else " ".join(odd[:1]))
        self.attributes.set_back()
        # In fewer bits the plain loop casts as FSDP2 does, or nearly so: what it cannot compute may still train.
        if text == "failed" and self._layout.planned_axes and not self._is_mixed:
            if failure is not None:
                raise failure
            self._run_whole()  # it raises here, too
        if text:
            return [], "" if text == "failed" else f"{text} of its first steps is not finite"
        return self._shared(steps), ""

    def _whole_rounded_otherwise(self) -> list[PlainStep]:
        """On every rank; none if the task's code fails this time."""
        steps: list[PlainStep] = []
        self.attributes.set_back()
        if self.generation.rank == 0:
            with suppress(TaskFailed):
                steps = self._run_whole(rounds_otherwise=True)
        self.attributes.set_back()
        return self._shared(steps)

    def _run_whole(self, *, rounds_otherwise: bool = False) -> list[PlainStep]:
        generation = self.context()
        with generation.user_code:
            batches = Batches(generation.task, generation.task.train_data, self.device, first_look=self.compare)
            loop = PlainLoop(generation, self.copy(), batches, rounds_otherwise=rounds_otherwise)
            return [loop.step(number) for number in range(NUM_STEPS)]

    def _shared(self, steps: list[PlainStep]) -> list[PlainStep]:
        """What rank 0 has, on every rank."""
        if self._layout.world_size == 1:
            return steps
        box: list[Any] = [[(step.numbers, step.norms, step.scales, *map(_shapes, step.whole)) for step in steps]]
        all_ranks().broadcast_objects(box, self.device)
        if not steps:
            for numbers, norms, scales, gradients, tensors in box[0]:
                steps.append(PlainStep(numbers, self._empty(gradients), self._empty(tensors), norms, scales))
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for step in steps:
            for tensor in (value for named in step.whole for value in named.values()):
                by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for tensors in by_dtype.values():
            flat = torch.cat([real(tensor).reshape(-1) for tensor in tensors])
            all_ranks().broadcast(flat)
            if self.generation.rank:
                sizes = [real(tensor).numel() for tensor in tensors]
                for tensor, part in zip(tensors, torch.split(flat, sizes), strict=True):
                    real(tensor).copy_(part.view(real(tensor).shape))
        return steps

    def _empty(self, shapes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> dict[str, Tensor]:
        return {name: torch.empty(shape, dtype=dtype, device=self.device) for name, (shape, dtype) in shapes.items()}

    def _restored(self, saved: Saved, carried: Mapping[Place, Content], whole: Sequence[PlainStep]) -> SplitStep:
        """The second step of a copy that goes on from what is saved of the first one. `carried`: what its attributes
        have beside it."""
        self.attributes.set_back()
        side = self._tried(self._side)
        carry(carried, {**self._owners, **side.owners})
        side.load(saved)
        return self._tried(lambda: side.step(whole[1]))

    def _carried(
        self,
        saved: Saved,
        carried: Mapping[Place, Content],
        unknown: Sequence[Place],
        whole: Sequence[PlainStep],
        expected: SplitStep,
    ) -> LayoutProof:
        """The restored run differs. Which attributes carry the difference? `unknown`: those that cannot be tried."""

        def goes_on(without: Place | None) -> bool:
            values = {place: value for place, value in carried.items() if place != without}
            return self._all(self._restored(saved, values, whole).is_same(expected))

        places = sorted({place for own in all_ranks().gather_values(list(carried)) for place in own})
        if not places or not goes_on(None):
            unknown = sorted({place for own in all_ranks().gather_values(unknown) for place in own})
            return self._names(unknown, _MAY_CHANGE) if unknown else self._answer(ProofOutcome.UNPROVEN, _UNKNOWN)
        return self._names([place for place in places[: 2 * _MAX_NAMES] if not goes_on(place)] or places)

    def _depending(
        self, saved: Saved, others: Mapping[Place, Content], whole: Sequence[PlainStep], expected: SplitStep
    ) -> list[Place]:
        """Numbers that a condition reads: the restored run has the same results with the values of now, and other ones
        with `others`, which are far away."""
        places = sorted({place for own in all_ranks().gather_values(list(others)) for place in own})[: 2 * _MAX_NAMES]

        def depends(changed: Sequence[Place]) -> bool:
            try:
                values = {place: others[place] for place in changed if place in others}
                return not self._all(self._restored(saved, values, whole).is_same(expected))
            except TaskFailed:  # a number of this size has no place in a table
                return True

        if not places or not depends(places):
            return []
        return [place for place in places if depends([place])] or places

    def _names(self, causes: Sequence[Place], what: str = "") -> LayoutProof:
        lines = {(owner, key): line_of_attribute(self._named.get(owner), key) for owner, key in causes[:_MAX_NAMES]}
        names = ", ".join(f"{key!r} of {owner}" + (line and f" ({line})") for (owner, key), line in lines.items())
        names += " ..." if len(causes) > _MAX_NAMES else ""
        sentence = what.format(names) or (
            f"loss() or forward() changes {names}, and a later loss or gradient depends on it: no checkpoint holds it, "
            "and each worker would have its own."
        )
        return self._answer(ProofOutcome.REFUSED, f"{sentence} {_WAYS_OUT}")

    def _first_difference(
        self, pairs: Sequence[tuple[PlainStep, SplitStep]]
    ) -> tuple[int, tuple[str, str, float] | None]:
        """The step, and what `_differing` says of it."""
        differing = ((number, named) for number, pair in enumerate(pairs) if (named := self._differing(number, *pair)))
        return next(differing, (0, None))

    def _differing(self, number: int, expected: PlainStep, found: SplitStep) -> tuple[str, str, float] | None:
        """What differs in a step, the module and by how much; None means nothing."""
        others = [steps[number] for steps in (self._in_fp32, self._rounded) if steps]
        rounded = [expected.differences_from(other) for other in others]
        enlarged = expected.update_differs_from(self._rounded[number]) if self._rounded else 0.0

        def allowed(name: str, least: float = 0.0) -> float:
            return max(self.tolerance, _AMPLIFIED * max([least, *(by_name.get(name, 0.0) for by_name in rounded)]))

        name = max(found.gradients, key=lambda one: found.gradients[one] / allowed(one), default="")
        difference = found.gradients.get(name, 0.0)
        module = name.rpartition(".")[0]
        if math.isinf(difference):
            return f"the parameter {name!r}{self._role(module)} is on no rank", module, difference
        if difference > allowed(name):
            return f"the gradient of {name!r}{self._role(module)} differs by {_percent(difference)}", module, difference
        for what, differences, least in (("parameter", found.parameters, enlarged), ("buffer", found.buffers, 0.0)):
            name = max(differences, key=lambda one: differences[one] / allowed(one, least), default="")
            if differences.get(name, 0.0) > allowed(name, least):
                message = (
                    f"the {what} {name!r} differs after an update by {_percent(differences[name])} of what it changed"
                )
                message += _ANOTHER_UPDATE if what == "parameter" else ""
                return message, name.rpartition(".")[0], differences[name]
        for name, value in expected.numbers.items():
            now = found.numbers.get(name, math.nan)
            is_told = not self._layout.planned_axes and name not in FINITE
            if (difference := relative(value, now)) > allowed(name) and not is_told:
                return f"{name} is {now:.6g} instead of {value:.6g}", "", difference
        return None

    def _remark(self, pairs: Sequence[tuple[PlainStep, SplitStep]]) -> str:
        """On the data axes, a metric may have a counter of its own."""
        for expected, found in pairs:
            for name, value in expected.numbers.items():
                now = found.numbers.get(name, math.nan)
                if relative(value, now) > self.tolerance:
                    return (
                        f"{name} of a step is {now:.6g} with these workers, and {value:.6g} in one process: it is "
                        "computed from what each worker counts for itself, and counted again after a restore. Loss and "
                        "parameters do not depend on it."
                    )
        return ""

    def _first_differing(self) -> Differing | None:
        """The first module that differs on any rank in the first step. Each rank computes its own micro-batch whole."""
        generation, expected, actual = self.context(), Outputs(), Outputs()
        self.attributes.set_back()
        with generation.user_code:
            model = self.copy()
            loop = PlainLoop(generation, model, Batches(generation.task, generation.task.train_data, self.device))
            with expected.recorded(model):
                loop.run_forward(0, generation.own_micro_batches()[0].index)
        self.attributes.set_back()
        side = self._side()
        with actual.recorded(*side.runtime.assembly.parts):
            side.gradients.run(0)
        everyone = all_ranks().gather_values(first_differing(expected, actual, generation.meshes, self.tolerance))
        return min(
            (difference for difference in everyone if difference is not None),
            key=lambda difference: difference.number,
            default=None,
        )

    def _all(self, flag: bool) -> bool:
        return all(all_ranks().gather_values(flag))

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
        types = sorted(computes_in(self.context().spec) - {Precision.FP32})
        return f"the layout {self._layout.describe()}" + (f" in {types[0]}" if types else "")

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


def _worst(step: SplitStep) -> float:
    return max([*step.gradients.values(), *step.parameters.values()], default=0.0)


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
