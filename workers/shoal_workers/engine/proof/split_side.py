"""The split side of a proof: one rank's part of a copy that trains by the trainer's own steps."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal_workers.checkpoint.load_plan import Shape
from shoal_workers.checkpoint.save_plan import local_tensor
from shoal_workers.contract.checks.legality import may_write_parameters
from shoal_workers.engine.group.all_ranks import all_ranks
from shoal_workers.engine.model.build import runtime_of, shape_of, split_model
from shoal_workers.engine.parallel.assemble import make_plain
from shoal_workers.engine.parallel.assembly import Assembly
from shoal_workers.engine.parallel.sharding import compute_dtype
from shoal_workers.engine.profiling.profiling import Profiling
from shoal_workers.engine.proof.attributes import owners_in_model
from shoal_workers.engine.proof.copies import computes_in, num_parameters_of
from shoal_workers.engine.proof.differences import (
    SAME,
    are_near,
    differences,
    relative,
    relative_norm,
    slices_of,
    whole_dims,
)
from shoal_workers.engine.proof.plain_loop import FLOOR, PlainStep, rounding
from shoal_workers.engine.state.saving import Saver
from shoal_workers.engine.state.training_state import apply_extra, grown_state
from shoal_workers.engine.step.batches import Batches
from shoal_workers.engine.step.generation import Generation
from shoal_workers.engine.step.gradients import GradientPass
from shoal_workers.engine.step.passes import refuse_written
from shoal_workers.engine.task.model_calls import ModelCalls
from shoal_workers.engine.trainer import Trainer

FINITE = ("the loss", "the gradient norm")


@dataclass(frozen=True, slots=True)
class Saved:
    """What a checkpoint has of one rank."""

    tensors: dict[str, Tensor]
    extra: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SplitStep:
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

    def is_same(self, other: SplitStep) -> bool:
        """Return whether the results are those of another run on this rank, up to rounding."""
        if self.tensors.keys() != other.tensors.keys() or len(self.local_gradients) != len(other.local_gradients):
            return False
        pairs = [*zip(self.local_gradients, other.local_gradients, strict=True)]
        pairs += [(value, other.tensors[name]) for name, value in self.tensors.items()]
        numbers = [(self.numbers[name], other.numbers[name]) for name in FINITE]
        return all(relative(*pair) <= SAME for pair in numbers) and all(are_near(*pair) for pair in pairs)


class SplitSide:
    """A copy of the model as it trains."""

    def __init__(
        self, generation: Generation, model: nn.Module, tolerance: float, first_look: Callable[[Any, Any], None]
    ) -> None:
        """`generation`: of a proof, see `proof_context`. `model`: a whole copy, which is consumed. `first_look`: see
        `Batches`."""
        self._generation = generation
        self._tolerance = tolerance
        task = generation.task
        make_plain(model, task.line_of("build_model"))
        shape, num_parameters = shape_of(model), num_parameters_of(model)
        aliases = _aliases(model)
        split = split_model(generation, model)
        self.runtime = runtime_of(generation, split, shape, num_parameters)
        batches = Batches(task, task.train_data, generation.device, first_look=first_look)
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

    def step(self, expected: PlainStep) -> SplitStep:
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
        return SplitStep(
            numbers=numbers,
            gradients=self.gradients.differences,
            parameters=parameters,
            buffers=self._differing_buffers(expected),
            local_gradients=self.gradients.local,
            tensors=tensors,
        )

    def saved(self, newest: SplitStep) -> Saved:
        return Saved(newest.tensors, json.loads(self._trainer.plain_values()))

    @torch.no_grad()
    def load(self, saved: Saved) -> None:
        """As `restore` does it from a checkpoint."""
        update, view = self.runtime.update, self.runtime.state.view
        with self._generation.user_code:
            update.materialise_state()
        known = view.tensors()
        lacking = {name: value for name, value in saved.tensors.items() if name not in known}
        grown_state(update, {name: Shape(tuple(value.shape), value.dtype) for name, value in lacking.items()})
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
                    difference = relative_norm(value, buffer)
                    if not difference <= self._tolerance:
                        own[name] = difference
        return {name: value for differing in all_ranks().gather_values(own) for name, value in differing.items()}


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
        self._floor = max(FLOOR, rounding(map(compute_dtype, computes_in(generation.spec))))
        self.expected: PlainStep | None = None
        self.differences: dict[str, float] = {}
        self.local: list[Tensor] = []

    @torch.no_grad()
    def run(self, step: int, scale: float = 1.0, *, is_voted: bool = False) -> Tensor:
        """What a rank that has deviated leaves could not be compared, so that is not left to a vote."""
        assembly, expected = self._assembly, self.expected
        before = {name: local_tensor(parameter).clone() for name, parameter in assembly.all_parameters()}
        with torch.enable_grad():
            share = super().run(step, scale)
        if expected is None:
            return share
        if not may_write_parameters(self._generation.layout, self._generation.spec):
            # also by a hook of a backward pass
            now = {name: local_tensor(parameter) for name, parameter in assembly.all_parameters()}
            refuse_written(next((name for name in now if not torch.equal(now[name], before[name])), None))
        self.local = [
            local_tensor(parameter.grad).clone() for parameter in assembly.parameters() if parameter.grad is not None
        ]
        floor = self._floor * math.hypot(*expected.norms.values())
        scales = {name: expected.norms.get(name, 0.0) + floor for name in self._names}
        self.differences = differences(
            assembly, self.aliases, expected.gradients, scales, lambda one: one.grad, self._generation.device
        )
        for name, parameter in assembly.all_parameters():
            slices, gradient = slices_of(parameter), expected.gradients.get(self.aliases.get(name, name))
            if parameter.grad is not None and slices is not None and gradient is not None:
                part = local_tensor(parameter.grad)
                part.copy_(whole_dims(gradient)[slices].view_as(part))
        return share


def _aliases(model: nn.Module) -> dict[str, str]:
    """Every further name of a parameter that needs a gradient -> its first one."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    everywhere = model.named_parameters(remove_duplicate=False)
    return {
        name: first[id(parameter)]
        for name, parameter in everywhere
        if first[id(parameter)] != name and parameter.requires_grad
    }
