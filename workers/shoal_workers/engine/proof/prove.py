"""One micro-batch whole against split, and what is said of the layout. All ranks of a group call it together.

    the first ranks    the whole model, a micro-batch each: loss, metrics, gradients; all ranks get their sum
    all ranks          their part of the split model, by the same passes as in training; one all-reduce of differences
    if needed          both once more, on all ranks, with every module's output

Every rank comes to the same answer. The trained model, its random numbers and its position are not touched. Called by
the engine and by `shoal_workers.proofs`, on the training thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal_workers.contract.errors.classes import ErrorClass
from shoal_workers.contract.layout import Layout
from shoal_workers.contract.proofs import LayoutProof, ProofOutcome
from shoal_workers.engine.errors import Fenced, LayoutRefused, TaskFailed
from shoal_workers.engine.group.collectives import is_collective_error
from shoal_workers.engine.parallel.assemble import assemble
from shoal_workers.engine.parallel.assembly import Assembly
from shoal_workers.engine.parallel.names import fits
from shoal_workers.engine.parallel.tensor_rules import cuts_sequence
from shoal_workers.engine.process.outbox import Outbox
from shoal_workers.engine.process.position import Position
from shoal_workers.engine.proof.copies import Shrunk, TooLarge, copy_of, shrunk, spec_of_proof
from shoal_workers.engine.proof.gradients import gradient_differences
from shoal_workers.engine.proof.outputs import Differing, Outputs, first_differing
from shoal_workers.engine.proof.whole import Whole, run_whole
from shoal_workers.engine.step.batches import Batches
from shoal_workers.engine.step.generation import Generation
from shoal_workers.engine.step.gradients import GradientPass
from shoal_workers.engine.task.model_calls import ModelCalls

T = TypeVar("T")

TOLERANCE = 1e-3
"""Relative difference that is not rounding: right layouts of small models differ by 1e-7 to 1e-5, wrong ones by 1e-2
and more."""
_SIZES = "must match the size of tensor"
_PARTS_OF_THE_SEQUENCE = (
    ". With gather and sequence in plan.tensor, what is between blocks is a rank's part of the sequence: add what has "
    "the whole sequence (positions) in a module with the style whole, or leave gather and sequence out."
)


def prove(generation: Generation) -> LayoutProof:
    """All ranks, after the group has formed: PROVEN, or UNPROVEN.

    Raises:
        LayoutRefused: with the proof. On every rank if the results differ; on at least one if the split model cannot
            be computed, and the others may then find a broken collective.
        TaskFailed: the task's own code raised, also with the whole model.
    """
    start = time.perf_counter()
    try:
        smaller = shrunk(generation.task.build_model, generation.plan, generation.layout)
    except TooLarge as error:
        words = f"the model is too large: {error}"
        return LayoutProof(layout=generation.layout, outcome=ProofOutcome.UNPROVEN, words=words)
    try:
        proof = _Proof(_apart(generation, smaller), generation.layout, smaller).run()
    except LayoutRefused as refused:
        raise LayoutRefused(refused.proof.model_copy(update={"seconds": time.perf_counter() - start})) from None
    return proof.model_copy(update={"seconds": time.perf_counter() - start})


def _apart(generation: Generation, smaller: Shrunk | None) -> Generation:
    """With a small batch in fp32, and with a position, log and outbox of its own."""
    layout = generation.layout
    num = 2 if layout.pp > 1 or layout.num_data_ranks > 1 else 1
    spec = spec_of_proof(generation.spec, num)
    note, name = generation.position.note, f"proving the layout {layout.describe()}"
    position = Position(lambda phase, _: note(f"{name}: {phase}"))  # progress: a proof may take longer than a hang
    generation = replace(generation, spec=spec, position=position, outbox=Outbox("proof"))
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


@dataclass(frozen=True, slots=True)
class _Split:
    """This rank's part of the split copy."""

    assembly: Assembly
    passes: GradientPass


class _Proof:
    def __init__(self, generation: Generation, layout: Layout, smaller: Shrunk | None) -> None:
        self._generation = generation
        self._device = generation.device
        self._layout = layout
        self._smaller = smaller
        self._batches = Batches(generation.task, generation.task.train_data, generation.device)

    def run(self) -> LayoutProof:
        generation = self._generation
        num, size = generation.spec.batch.num_micro_batches, generation.layout.world_size
        own = range(generation.rank, num, size)
        with generation.user_code:
            model = self._copy()
            shapes = {name: (one.shape, one.dtype) for name, one in model.named_parameters() if one.requires_grad}
            aliases = _aliases(model)
            whole = run_whole(model, generation.task, generation.spec, self._batches, own) if own else None
        expected = self._shared(whole, shapes)
        if not math.isfinite(expected.loss):
            return self._answer(ProofOutcome.UNPROVEN, f"the loss of the first micro-batches is {expected.loss}")
        split = self._tried(lambda: self._build(model if whole is None else self._copy(), tuple(shapes)))
        loss, metrics = self._tried(lambda: self._step(split))
        gradients = {name: gradient for name, gradient in expected.gradients.items() if gradient is not None}
        found = gradient_differences(gradients, aliases, split.assembly, self._device)
        values = {"the loss": (expected.loss, loss)}
        values |= {
            f"the metric {name!r}": (value, metrics.get(name, math.nan)) for name, value in expected.metrics.items()
        }
        scalars = {name: _relative(*pair) for name, pair in values.items()}
        worst = max([*scalars.values(), *found.values()])
        if worst <= TOLERANCE:
            return self._answer(ProofOutcome.PROVEN, difference=worst)
        first = self._first_differing(split)
        words, module = self._words(first, found, scalars, values)
        raise LayoutRefused(self._answer(ProofOutcome.REFUSED, words, module=module, difference=worst))

    def _copy(self) -> nn.Module:
        generation = self._generation
        return copy_of(generation.task.build_model, generation.spec.seed, self._device, self._smaller)

    def _build(self, model: nn.Module, names: tuple[str, ...]) -> _Split:
        """Consumes the model. `names`: of its parameters that need a gradient."""
        generation = self._generation
        calls = ModelCalls(generation.task.evaluate, model)
        assembly = assemble(model, generation.spec, generation.plan, generation.meshes, generation.task.shard_units)
        for part in assembly.parts:
            part.train()
        return _Split(assembly, GradientPass(generation, assembly, self._batches, calls, names))

    def _step(self, split: _Split) -> tuple[float, dict[str, float]]:
        """Loss and metrics, summed over the ranks. The gradients stay at the parameters."""
        share = split.passes.run(0)
        sums = torch.cat([share.double().reshape(1), split.passes.metric_sums()])
        dist.all_reduce(sums)
        loss, *metrics = sums.tolist()
        return loss, split.passes.metrics(metrics)

    def _tried(self, call: Callable[[], T]) -> T:
        """What the split model cannot compute is the layout's fault: the whole one can."""
        try:
            with self._generation.user_code:
                return call()
        except (Fenced, LayoutRefused):
            raise
        except Exception as error:
            if is_collective_error(error) or not isinstance(error, TaskFailed):
                raise
            if error.report.error_class is not ErrorClass.PLAIN:
                raise
            words = f"{self._name} cannot be computed: {_cause(error)}"
            if self._layout.tp > 1 and cuts_sequence(self._generation.plan) and _SIZES in words:
                words += _PARTS_OF_THE_SEQUENCE
            raise LayoutRefused(self._answer(ProofOutcome.REFUSED, words)) from error

    def _shared(self, whole: Whole | None, shapes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> Whole:
        """The sum of all ranks' micro-batches on every rank, with zeros in place of missing gradients."""
        wholes: list[tuple[float, dict[str, float]] | None] = [None] * self._generation.layout.world_size
        dist.all_gather_object(wholes, None if whole is None else (whole.loss, whole.metrics))
        loss, metrics = 0.0, dict[str, float]()
        for own_loss, own_metrics in filter(None, wholes):
            loss += own_loss
            for name, value in own_metrics.items():
                metrics[name] = metrics.get(name, 0.0) + value
        parts = []
        for name, (shape, dtype) in shapes.items():
            found = whole.gradients[name] if whole is not None else None
            gradient = torch.zeros(shape, dtype=dtype, device=self._device) if found is None else found
            parts.append(_real(gradient).reshape(-1).float())
        flat = torch.cat(parts)
        dist.all_reduce(flat)
        gradients: dict[str, Tensor | None] = {}
        for (name, (shape, dtype)), part in zip(
            shapes.items(), torch.split(flat, [len(p) for p in parts]), strict=True
        ):
            gradients[name] = torch.view_as_complex(part.view(*shape, 2)) if dtype.is_complex else part.view(shape)
        return Whole(loss, metrics, gradients)

    def _first_differing(self, split: _Split) -> Differing | None:
        """Of all ranks. Each computes its own micro-batch whole."""
        generation = self._generation
        first = generation.own_micro_batches()[0].index
        expected, found = Outputs(), Outputs()
        spec = generation.spec
        with generation.user_code:
            model = self._copy()
            with expected.recorded(model):
                run_whole(model, generation.task, spec, self._batches, [first])
            with found.recorded(*split.assembly.parts):
                split.passes.run(0)
        own = first_differing(expected, found, generation.meshes)
        everyone: list[Differing | None] = [None] * self._layout.world_size
        dist.all_gather_object(everyone, own)
        return min((one for one in everyone if one is not None), key=lambda one: one.number, default=None)

    def _words(
        self,
        first: Differing | None,
        gradients: Mapping[str, float],
        scalars: Mapping[str, float],
        values: Mapping[str, tuple[float, float]],
    ) -> tuple[str, str]:
        """One sentence, and the module."""
        begin = f"{self._name} trains another model than one process"
        if first is not None:
            words = f"{begin}: the output of {first.name!r}{self._role(first.name)}"
            return f"{words} differs by {_percent(first.difference)}.", first.name
        name = max(gradients, key=lambda one: gradients[one], default="")
        if name and gradients[name] > TOLERANCE:
            module = name.rpartition(".")[0]
            by = "is on no rank" if math.isinf(gradients[name]) else f"differs by {_percent(gradients[name])}"
            what = "the parameter" if math.isinf(gradients[name]) else "no output differs, and the gradient of"
            return f"{begin}: {what} {name!r}{self._role(module)} {by}.", module
        name = max(scalars, key=lambda one: scalars[one])
        return f"{begin}: {name} is {values[name][1]:.6g} instead of {values[name][0]:.6g}.", ""

    def _role(self, module: str) -> str:
        """What the plan says of a module."""
        plan = self._generation.plan
        styles = [style for pattern, style in plan.tensor.items() if fits(module, pattern)]
        return f" (plan.tensor: {styles[0]})" if styles and self._layout.tp > 1 else ""

    @property
    def _name(self) -> str:
        return f"the layout {self._layout.describe()}"

    def _answer(
        self, outcome: ProofOutcome, words: str = "", *, module: str = "", difference: float = 0.0
    ) -> LayoutProof:
        finite = difference if math.isfinite(difference) else 1.0
        small = "" if self._smaller is None else f"a copy with {len(self._smaller.kept)} blocks"
        return LayoutProof(
            layout=self._layout, outcome=outcome, words=words, module=module, difference=finite, shrunk=small
        )


def _aliases(model: nn.Module) -> dict[str, str]:
    """Every further name of a parameter that needs a gradient -> its first one."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    everywhere = model.named_parameters(remove_duplicate=False)
    return {name: first[id(one)] for name, one in everywhere if first[id(one)] != name and one.requires_grad}


def _cause(error: TaskFailed) -> str:
    """One line: the innermost cause, because torch's pipeline says only which of its stages failed."""
    cause: BaseException = error.__context__ or error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, TaskFailed):
        return cause.report.sentence
    text = next(iter(str(cause).strip().splitlines()), "")
    return f"{type(cause).__name__}: {text}" + (f" ({error.report.line})" if error.report.line else "")


def _percent(difference: float) -> str:
    return f"{100 * difference:.2g} %" if difference < 1 else f"{100 * difference:.0f} %"


def _relative(expected: float, found: float) -> float:
    if expected == found or (math.isnan(expected) and math.isnan(found)):
        return 0.0
    difference = abs(found - expected) / (abs(expected) + 1e-6)
    return difference if math.isfinite(difference) else math.inf


def _real(value: Tensor) -> Tensor:
    return torch.view_as_real(value) if value.is_complex() else value
