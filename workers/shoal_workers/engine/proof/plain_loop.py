"""The whole side of a proof: a plain loop over a task's model, loss and optimizer, in one process, as its author means
it. It uses none of the passes, axes and updates that train.

    for each micro-batch      random numbers by its number; buffers as the step found them; forward and backward pass
    after the last            the gradients are divided by what counts, clipped, and the optimizer steps

A buffer gets what the rule of `step/buffer_rule.py` makes of the changes of all micro-batches; the statistics of
BatchNorm, which do not reach a training output, run through. Called by `prove`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal_workers.contract.batch_partition import randomness_seed
from shoal_workers.contract.layout import fully_sharded
from shoal_workers.contract.spec import BatchSync, Precision
from shoal_workers.engine.model.build import trained_and_groups
from shoal_workers.engine.parallel.assembly import Assembly
from shoal_workers.engine.parallel.cutting import take_attributes
from shoal_workers.engine.parallel.precision import apply_precisions
from shoal_workers.engine.parallel.sharding import compute_dtype
from shoal_workers.engine.randomness import seed_everything
from shoal_workers.engine.step.batches import Batches
from shoal_workers.engine.step.buffer_rule import Buffer, find_buffers, folds_statistics
from shoal_workers.engine.step.generation import Generation
from shoal_workers.engine.step.task_state import TaskState, attach_task_state
from shoal_workers.engine.step.update import build_update
from shoal_workers.engine.task.returned import Returned
from shoal_workers.tasks.feed_forward import Router, forget_load, move_biases, set_share_of_step
from shoal_workers.torch_internals import gradient_hooks, tree_map


@dataclass(frozen=True, slots=True)
class PlainStep:
    """What a step gives."""

    numbers: dict[str, float]
    """Loss, gradient norm and metrics, by what people call them."""
    gradients: dict[str, Tensor]
    """Gradients of the sum that is differentiated: not divided by the weight of the step. Those that it does not reach
    are missing."""
    tensors: dict[str, Tensor]
    """All parameters and buffers after the update."""
    norms: dict[str, float]
    """Norms of the gradients."""
    scales: dict[str, float]
    """Norm of what the step changed in each parameter, and a share of the parameter's, which has rounding."""

    def differences_from(self, other: PlainStep) -> dict[str, float]:
        """Relative differences of the same step in other types, by name: numbers, gradients, and buffers."""
        differences = {
            name: abs(value - other.numbers[name]) / (abs(value) + FLOOR) for name, value in self.numbers.items()
        }
        # A parameter stands for its gradient.
        for name, value in (self.tensors | self.gradients).items():
            counterpart = (other.gradients if name in self.gradients else other.tensors).get(name)
            if counterpart is not None and value.is_floating_point():
                differences[name] = norm(value - counterpart) / (norm(value) or 1.0)
        return differences

    def update_differs_from(self, other: PlainStep) -> float:
        """The largest difference of a parameter after the same step with other roundings, relative to `scales`."""
        differences = (
            norm(self.tensors[name] - other.tensors[name]) / (scale or 1.0) for name, scale in self.scales.items()
        )
        return max(differences, default=0.0)

    @property
    def whole(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """All tensors."""
        return self.gradients, self.tensors


FLOOR = 1e-3
"""Smallest share of the whole gradient's norm that counts: a small gradient is a sum of large terms, and has their
rounding. Likewise for what changes in a parameter. In types of fewer bits than fp32 it is their rounding."""


ROUNDING = 1e-5
"""Relative difference of the gradients of right layouts, at most: each sums in an order of its own."""


class PlainLoop:
    def __init__(
        self, generation: Generation, model: nn.Module, batches: Batches, *, rounds_otherwise: bool = False
    ) -> None:
        """`generation`: of a proof, see `proof_context`. Consumes the model. `rounds_otherwise`: the gradients that an
        update gets differ by ROUNDING."""
        self._generation = generation
        self._rounds_otherwise = rounds_otherwise
        self._model = model
        self._batches = batches
        task, layout = generation.task, fully_sharded(1)
        trained, groups = trained_and_groups(generation, model)
        attach_task_state(task.instance, model, layout)
        self._cast = _Cast(generation, model)
        self._members = None if task.alternation is None else task.alternation.members(trained)
        self._optimizer = build_update(task, Assembly(layout, (model,)), generation.spec, groups).optimizer
        self._state = next((module for module in model.modules() if isinstance(module, TaskState)), None)

    def step(self, step: int) -> PlainStep:
        model, settings = self._model, self._generation.spec.optimizer
        parameters = dict(model.named_parameters())
        for parameter in parameters.values():
            parameter.grad = None
        forget_load(model)
        buffers = _Buffers(model)
        before = {name: one.detach().clone() for name, one in parameters.items()}
        loss, weight, metrics = 0.0, 0.0, dict[str, float]()
        with self._cast.in_use():
            for returned, share in self._losses(step, buffers):
                torch.autograd.backward(returned.loss * share)
                self._cast.collect()
                counts = share * (1.0 if returned.weight is None else float(returned.weight))
                loss += float(returned.loss.detach()) * share
                weight += counts
                for name, value in returned.metrics.items():
                    metrics[name] = metrics.get(name, 0.0) + (float(value) * counts if counts else 0.0)
        self._drop_others(parameters, step)
        present = {name: one.grad for name, one in parameters.items() if one.grad is not None}
        gradients = {name: gradient.detach().clone() for name, gradient in present.items()}
        for gradient in present.values():
            gradient.div_(weight or 1.0)
        total = float(torch.nn.utils.clip_grad_norm_(parameters.values(), settings.clip_norm or torch.inf))
        if self._rounds_otherwise:
            for gradient in present.values():
                gradient.mul_(1 + ROUNDING * torch.randn_like(gradient))
        move_biases(model)
        buffers.apply()
        seed_everything(
            randomness_seed(self._generation.spec.seed, step, self._generation.spec.batch.num_micro_batches)
        )
        self._optimizer.step()
        named = [*model.named_parameters(), *model.named_buffers()]
        numbers = {"the loss": loss / weight if weight else torch.nan, "the gradient norm": total}
        numbers |= {f"the metric {name!r}": value / weight for name, value in metrics.items() if weight}
        tensors = {name: value.detach().clone() for name, value in named}
        norms = {name: norm(gradient) for name, gradient in gradients.items()}
        scales = {
            name: norm(tensors[name] - one) + max(FLOOR, _eps(one.dtype)) * norm(one) for name, one in before.items()
        }
        return PlainStep(numbers, gradients, tensors, norms, scales)

    def run_forward(self, step: int, index: int) -> None:
        with self._cast.in_use():
            self._forward(step, index)

    def _forward(self, step: int, index: int) -> Any:
        """The forward pass of a micro-batch: what its loss is, or its embeddings."""
        generation = self._generation
        task, spec = generation.task, generation.spec
        seed_everything(randomness_seed(spec.seed, step, index))
        batch = self._batches.training(spec, step, index)
        return task.embed(self._model, batch) if task.has_batch_loss else task.evaluate_step(self._model, batch, step)

    def _losses(self, step: int, buffers: _Buffers) -> Iterator[tuple[Returned, float]]:
        """The loss of each pass, and its share of the step's."""
        generation, model = self._generation, self._model
        spec, task = generation.spec, generation.task
        num = spec.batch.num_micro_batches
        if spec.batch.sync is BatchSync.GLOBAL:  # all of them are one pass
            batch = self._batches.training_pass(spec, step, range(num))
            set_share_of_step(model, 1.0)
            with buffers.forward(1.0, self._state):
                returned = task.evaluate_step(model, batch, step)
            yield returned, 1.0 if returned.weight is None else 1 / num
            return
        embeddings: list[tuple[Tensor, ...]] = []
        for index in range(num):
            set_share_of_step(model, 1 / num)
            with buffers.forward(1 / num, self._state):
                output = self._forward(step, index)
            if not task.has_batch_loss:
                yield output, 1 / num
            embeddings.append(output)
        if task.has_batch_loss:
            seed_everything(randomness_seed(spec.seed, step, num))
            yield task.batch_loss([torch.cat(parts) for parts in zip(*embeddings, strict=True)]), 1.0

    def _drop_others(self, parameters: dict[str, nn.Parameter], step: int) -> None:
        """Each of several optimizers in turn has a loss of its own."""
        alternation = self._generation.task.alternation
        if alternation is None or self._members is None:
            return
        for name, parameter in parameters.items():
            if name not in self._members[alternation.name(step)]:
                parameter.grad = None


class _Cast:
    """Has a whole model compute in other types, as FSDP2 does it with a sharded one: with cast copies of its
    parameters, whose gradients are added up in the parameters' own type. What its units get is cast, too."""

    def __init__(self, generation: Generation, model: nn.Module) -> None:
        spec, precisions = generation.spec, apply_precisions(model, generation.spec, generation.plan)
        units = {model, *generation.task.shard_units(model)}
        self._places: list[tuple[nn.Module, str, nn.Parameter, torch.dtype]] = []
        self._copies: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        for name, module in model.named_modules():
            dtype = compute_dtype(precisions.get(name, spec.precision))
            if dtype is compute_dtype(Precision.FP32):
                continue
            for key, parameter in module._parameters.items():
                if parameter is not None and parameter.is_floating_point():
                    self._places.append((module, key, parameter, dtype))
            if module in units:
                module.register_forward_pre_hook(partial(_cast_inputs, dtype), prepend=True, with_kwargs=True)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        self._copies = {id(parameter): (parameter, _copy(parameter, dtype)) for _, _, parameter, dtype in self._places}
        try:
            for module, key, parameter, _ in self._places:
                setattr(module, key, self._copies[id(parameter)][1])
            yield
        finally:
            for module, key, parameter, _ in self._places:
                setattr(module, key, parameter)

    def collect(self) -> None:
        """Called after each backward pass."""
        for parameter, copy in self._copies.values():
            if copy.grad is not None:
                gradient, copy.grad = copy.grad.to(parameter.dtype), None
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def _copy(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    copy = nn.Parameter(parameter.detach().to(dtype, copy=True), parameter.requires_grad)
    for hook in gradient_hooks(parameter):
        copy.register_hook(hook)  # type: ignore[no-untyped-call]
    return take_attributes(copy, parameter)


def _cast_inputs(dtype: torch.dtype, module: nn.Module, arguments: Any, named: Any) -> Any:
    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return tree_map(cast, arguments), tree_map(cast, named)


def rounding(dtypes: Iterable[torch.dtype]) -> float:
    """Return the relative rounding of the coarsest of the types."""
    return max(map(_eps, dtypes), default=0.0)


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


@torch.no_grad()
def norm(tensor: Tensor | None) -> float:
    if tensor is None or not tensor.numel():
        return 0.0
    is_wide = tensor.dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128)
    return float(torch.linalg.vector_norm(tensor if is_wide else tensor.float()))


class _Buffers:
    """The buffers of a model in one step. Those of norms are left to run through."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers, _ = find_buffers(
            [("", model)],
            lambda _, name, tensor: Buffer(name, tensor),
            lambda module, *_: not isinstance(module, Router) and not folds_statistics(module),
            lambda _: False,
        )

    @contextmanager
    def forward(self, weight: float, state: TaskState | None) -> Iterator[None]:
        """Surrounds a forward pass, which begins with the buffers of the step."""
        self._install_copies()
        if state is not None:
            state.load()
        yield
        if state is not None:
            state.store()
        self._collect_changes(weight)
        self._install_copies()  # a backward pass that computes activations again finds them as the forward pass did

    def _install_copies(self) -> None:
        for buffer in self._buffers:
            buffer.install(buffer.original.clone())

    @torch.no_grad()
    def _collect_changes(self, weight: float) -> None:
        for buffer in self._buffers:
            now = buffer.current
            if now is not None and now.shape == buffer.original.shape:
                buffer.add(now.detach(), weight, None)

    @torch.no_grad()
    def apply(self) -> None:
        for buffer in self._buffers:
            buffer.install(buffer.original)
            if buffer.total is not None:
                buffer.original.copy_(buffer.compute_value(buffer.total))
