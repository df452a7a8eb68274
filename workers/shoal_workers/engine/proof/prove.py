"""One micro-batch whole against split, and what is said of the layout. All ranks of a group call it together. Hides how
the two are made equal, run, and compared.

    the first ranks    the whole model, a micro-batch each, in a plain loop without any of the engine's passes: loss,
                       metrics, gradients; all ranks get their sum
    all ranks          their part of the split model, by the same passes as in training; one all-reduce of differences
    if needed          both once more, on all ranks, with every module's output, to name the first one that differs

The models are copies: equal on every rank, small, without dropout, and with no weight that hides a fault. A new model
hides faults: a bias of zero has no effect, and a last layer of zeros stops all gradients before it. So each parameter
gets a little noise, the same in every copy.

A split output is compared with the part of the whole one that this rank should have: equal shapes as they are, a
DTensor by its place, and a dim that is shorter by the degree of tp or cp as that axis cuts it. What is cut in another
way (inside an operation that the plan does not know) is left out.

Every rank comes to the same answer. The trained model, its random numbers and its position are not touched. Called by
`proof_of` and by `shoal_workers.proofs`, on the training thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal_workers.checkpoint.save_plan import local_tensor
from shoal_workers.contract.batch_partition import randomness_seed
from shoal_workers.contract.exception_causes import ErrorClass
from shoal_workers.contract.layout import Layout, num_stages
from shoal_workers.contract.model import ParallelPlan
from shoal_workers.contract.proofs import LayoutProof, ProofOutcome
from shoal_workers.contract.spec import JobSpec, Precision
from shoal_workers.engine.generation_ends import Fenced, LayoutRefused, TaskFailed
from shoal_workers.engine.group.collectives import is_collective_error
from shoal_workers.engine.group.mesh import Meshes
from shoal_workers.engine.model.fast_build import build_for_restore
from shoal_workers.engine.model.initial_weights import box_of
from shoal_workers.engine.parallel.assemble import assemble
from shoal_workers.engine.parallel.assembly import Assembly
from shoal_workers.engine.parallel.head_tail import own_part
from shoal_workers.engine.parallel.names import fits
from shoal_workers.engine.parallel.split_output import SplitOutput
from shoal_workers.engine.parallel.stages import Elsewhere
from shoal_workers.engine.parallel.tensor import cuts_sequence
from shoal_workers.engine.process.outbox import Outbox
from shoal_workers.engine.process.position import Position
from shoal_workers.engine.step.batches import Batches
from shoal_workers.engine.step.first_look import describe_changed, is_same
from shoal_workers.engine.step.generation import Generation
from shoal_workers.engine.step.gradients import GradientPass
from shoal_workers.engine.task.model_calls import ModelCalls
from shoal_workers.engine.task.randomness import seed_everything
from shoal_workers.engine.task.task import LoadedTask
from shoal_workers.tasks.feed_forward import forget_load, share_of_step
from shoal_workers.torch_internals import Dropout

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
        proof = _Proof(proof_context(generation, smaller), generation.layout, smaller).run()
    except LayoutRefused as refused:
        raise LayoutRefused(refused.proof.model_copy(update={"seconds": time.perf_counter() - start})) from None
    return proof.model_copy(update={"seconds": time.perf_counter() - start})


def proof_context(generation: Generation, smaller: Shrunk | None) -> Generation:
    """Returns the generation for a proof: with a small batch in fp32, and with a position, log and outbox of its
    own."""
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
        self._is_repeatable = True
        """False if samples differ when they are read again: the two models read others then."""
        data = generation.task.train_data
        self._batches = Batches(generation.task, data, generation.device, first_look=self._compare)

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
        repeatable = [True] * generation.layout.world_size
        dist.all_gather_object(repeatable, self._is_repeatable)
        if not all(repeatable):
            return self._answer(ProofOutcome.UNPROVEN, describe_changed(generation.task.line_of("build_dataset")))
        first = self._first_differing(split)
        words, module = self._words(first, found, scalars, values)
        raise LayoutRefused(self._answer(ProofOutcome.REFUSED, words, module=module, difference=worst))

    def _compare(self, batch: Any, again: Any) -> None:
        self._is_repeatable = is_same(batch, again)

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
        """Loss and metrics of all ranks. The gradients stay at the parameters."""
        share = split.passes.run(0)
        sums = torch.cat([share.double().reshape(1), split.passes.metric_sums()])
        dist.all_reduce(sums)
        loss, *others = sums.tolist()
        return loss / split.passes.weight(others), split.passes.metrics(others)

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
        wholes: list[tuple[float, float, dict[str, float]] | None] = [None] * self._generation.layout.world_size
        dist.all_gather_object(wholes, None if whole is None else (whole.loss, whole.weight, whole.metrics))
        loss, weight, metrics = 0.0, 0.0, dict[str, float]()
        for own_loss, own_weight, own_metrics in filter(None, wholes):
            loss += own_loss
            weight += own_weight
            for name, value in own_metrics.items():
                metrics[name] = metrics.get(name, 0.0) + value
        loss = loss / weight if weight else math.nan
        metrics = {name: value / weight for name, value in metrics.items()} if weight else {}
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
        return Whole(loss, 1.0, metrics, gradients)

    def _first_differing(self, split: _Split) -> Differing | None:
        """The first module that differs on any rank. Each rank computes its own micro-batch whole."""
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
        """Returns one sentence that says what differs, and the module."""
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


def _relative(expected: float, found: float) -> float:
    if expected == found or (math.isnan(expected) and math.isnan(found)):
        return 0.0
    difference = abs(found - expected) / (abs(expected) + 1e-6)
    return difference if math.isfinite(difference) else math.inf


def _real(value: Tensor) -> Tensor:
    return torch.view_as_real(value) if value.is_complex() else value


@dataclass(frozen=True, slots=True)
class Whole:
    """What a step over the global batch gives, before the update."""

    loss: float
    weight: float
    """What loss and metrics are still to be divided by; gradients never are."""
    metrics: dict[str, float]
    gradients: dict[str, Tensor | None]
    """The gradients by name, without tied names; None: the step does not reach the parameter."""


def run_whole(model: nn.Module, task: LoadedTask, spec: JobSpec, batches: Batches, own: Sequence[int]) -> Whole:
    """Forward and backward passes of some micro-batches, one after the other: their shares of the step's mean.

    Each begins with the buffers of the step's begin, as in training."""
    num = spec.batch.num_micro_batches
    buffers = [
        (module, key, buffer.clone())
        for module in model.modules()
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]
    loss, weight, metrics = 0.0, 0.0, dict[str, float]()
    forget_load(model)
    for index in own:
        for module, key, value in buffers:  # a forward pass may also have put another tensor there
            module._buffers[key] = value.clone()
        share_of_step(model, 1 / num)
        seed_everything(randomness_seed(spec.seed, 0, index))
        returned = task.evaluate(model, batches.training(spec, 0, index))
        torch.autograd.backward(returned.loss / num)
        counts = (1.0 if returned.weight is None else float(returned.weight)) / num
        loss += float(returned.loss.detach()) / num
        weight += counts
        for name, value in returned.metrics.items():
            metrics[name] = metrics.get(name, 0.0) + (float(value) * counts if counts else 0.0)
    return Whole(loss, weight, metrics, {name: one.grad for name, one in model.named_parameters() if one.requires_grad})


LARGEST = 50_000_000
"""Parameters of a model that is proven whole."""
_LARGEST_SHRUNK = 500_000_000
"""Parameters of a model that is proven without most of its blocks: each copy takes 8 bytes for each parameter."""
_NOISE = 0.02
_STREAM = 0x50524F4F
"""Separates these random numbers from all others."""
_SAMPLES = 2
"""Samples of a micro-batch: one alone would hide what mixes samples."""
_DROPOUTS = ("dropout", "drop_prob", "dropout_p", "attention_dropout", "hidden_dropout", "resid_dropout", "p_dropout")


def spec_of_proof(spec: JobSpec, num_micro_batches: int) -> JobSpec:
    """Returns the same task in fp32, so that rounding does not hide or make a difference, with a small global batch."""
    micro_size = min(spec.batch.micro_size, _SAMPLES)
    batch = spec.batch.model_copy(update={"micro_size": micro_size, "global_size": micro_size * num_micro_batches})
    return spec.model_copy(
        update={
            "batch": batch,
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
    """What is left out of a model that is too large to be proven whole; None: nothing. Needs no communication.

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
    build: Callable[[], nn.Module], seed: int, device: torch.device, smaller: Shrunk | None = None
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


_FLOOR = 1e-3
"""Smallest share of the whole gradient's norm that counts: a small gradient is a sum of large terms, and has their
rounding."""


@torch.no_grad()
def gradient_differences(
    whole: Mapping[str, Tensor], aliases: Mapping[str, str], assembly: Assembly, device: torch.device
) -> dict[str, float]:
    """All ranks: of each parameter, the norm of the difference, relative to that of its gradient. Equal on all ranks.

    Infinite: no rank has all of the parameter.

    Args:
        whole: gradients by name, zeros for those that the step does not reach; the same on every rank.
        aliases: other names of the same parameters.
    """
    names = [*whole, *aliases]
    numbers = {name: number for number, name in enumerate(names)}
    copies = assembly.copies()
    sums = torch.zeros(len(names), 2, dtype=torch.float64, device=device)
    for name, parameter in assembly.all_parameters():
        box = box_of(parameter)
        if box is None or name not in numbers:
            continue
        slices = tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))
        expected = whole[aliases.get(name, name)][slices]
        own = torch.zeros_like(expected) if parameter.grad is None else local_tensor(parameter.grad)
        share = assembly.share(parameter)
        delta = torch.linalg.vector_norm((own.to(expected.dtype) - expected).flatten()).double()
        sums[numbers[name], 0] += share * delta * delta
        sums[numbers[name], 1] += 0.0 if id(parameter) in copies else share * expected.numel()
    dist.all_reduce(sums)
    deltas, present = sums.sqrt()[:, 0].tolist(), sums[:, 1].tolist()
    norms = {name: float(torch.linalg.vector_norm(gradient.flatten()).double()) for name, gradient in whole.items()}
    floor = _FLOOR * sum(norm**2 for norm in norms.values()) ** 0.5
    found = {}
    for name, delta in zip(names, deltas, strict=True):
        scale = norms[aliases.get(name, name)] + floor
        found[name] = delta / scale if scale else delta
    for name, gradient in whole.items():
        held = present[numbers[name]] + sum(present[numbers[a]] for a, owner in aliases.items() if owner == name)
        if held < gradient.numel() * 0.999:
            found[name] = float("inf")
    return found


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


def first_differing(whole: Outputs, split: Outputs, meshes: Meshes) -> Differing | None:
    """The first one on this rank; None: no output that can be compared differs."""
    for number, (name, expected) in enumerate(whole.by_name.items()):
        if name not in split.by_name:
            continue
        found = difference_of(expected, split.by_name[name], meshes)
        if found is not None and not found <= TOLERANCE:
            return Differing(number, name, found)
    return None


def difference_of(whole: Tensor, split: Tensor, meshes: Meshes) -> float | None:
    """Relative, of the part that this rank has; None: it is not known which part that is."""
    own = local_tensor(split)
    if isinstance(split, DTensor):
        box = box_of(split)
        if box is None or tuple(split.shape) != tuple(whole.shape):
            return None
        slices = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
        parts = [whole[slices]]
    else:
        parts = list(_parts(whole, tuple(own.shape), meshes))
    found = [_relative_norm(part, own) for part in parts if part.shape == own.shape]
    return min(found, default=None)


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


def _relative_norm(expected: Tensor, found: Tensor) -> float:
    difference = torch.linalg.vector_norm((expected.double() - found.double()).flatten())
    scale = torch.linalg.vector_norm(expected.double().flatten())
    return float(difference / scale) if scale > 0 else float(difference)
