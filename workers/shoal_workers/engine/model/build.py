"""Builds the model, the optimizer and the state of one rank under a generation's layout. Called by the engine.

Every rank builds the whole model, but writes only its own part of it, unless the task's weights must be drawn by its
own code: see fast_build.py. Never restores: if the generation starts from a snapshot or a checkpoint, the parameters
hold arbitrary values afterwards.

A build of many billions of parameters takes minutes. torch calls a hook for each parameter that a module registers, so
its progress is known without the help of the task. Where each parameter is written at once, the memory that is left is
compared with the next one, so that a model that cannot be built ends in words, not in a kill.

`warm_up` builds a tiny model once, in `prepare`: a standby that has never trained needs 0.8 s more than a survivor to
form its first group and to take its first step, nearly all of it for imports (FSDP, the optimizer's torch._dynamo) and
caches.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # documented, but not exported for mypy
from torch.nn.modules.module import register_module_parameter_registration_hook

from shoal_workers.contract.layout import fully_sharded
from shoal_workers.contract.model import ModelShape
from shoal_workers.contract.optimizers import OptimizerSpec
from shoal_workers.contract.spec import Precision
from shoal_workers.engine.cpu.double_buffered_state import state_of
from shoal_workers.engine.group.mesh import build_mesh
from shoal_workers.engine.group.process_group import backend_of
from shoal_workers.engine.model.draw import Distribution
from shoal_workers.engine.model.fast_build import build_for_restore, build_undrawn
from shoal_workers.engine.model.initial_weights import InitialWeights, Which, draw_weights
from shoal_workers.engine.model.runtime import ModelRuntime
from shoal_workers.engine.parallel.assemble import assemble, make_plain
from shoal_workers.engine.parallel.assembly import Assembly
from shoal_workers.engine.parallel.sharding import mixed_precision, shard_model
from shoal_workers.engine.process.warm_memory import keep_freed_memory
from shoal_workers.engine.schedule import compute_lr_factor
from shoal_workers.engine.state.restore import is_restoring
from shoal_workers.engine.step.generation import Generation
from shoal_workers.engine.step.parameter_groups import ParameterGroup, freeze, groups_of, groups_of_spec
from shoal_workers.engine.step.task_state import attach_task_state
from shoal_workers.engine.step.update import build_update, default_update
from shoal_workers.engine.task.model_calls import ModelCalls
from shoal_workers.machine_limits import available_bytes

_NOTABLE_BYTES = 256 << 20


def build_runtime(
    generation: Generation, check_whole: Callable[[nn.Module], None], *, is_drawn: bool = False
) -> ModelRuntime:
    """Training thread. Needs no communication, because every rank builds the whole model first.

    Args:
        check_whole: called with the whole model; what it raises is raised.
        is_drawn: the initial weights are drawn, also for a restore.

    Raises:
        TaskFailed: the task's own code raised.
        ValueError: `init_from` with a task that reloads its frozen parameters.
    """
    task, spec, assignment = generation.task, generation.spec, generation.assignment
    choose_kernels(deterministic=spec.deterministic)
    with generation.user_code, noted(generation.position.note):
        model, distributions = _built(generation, is_drawn=is_drawn)
        if scalars := make_plain(model, task.line_of("build_model")):
            task.export["scalars"] = scalars
    check_whole(model)
    weights, url = None, spec.init_from or task.initial_weights
    reloads = task.reloads_frozen
    if reloads and spec.init_from is not None:
        raise ValueError(
            f"init_from is {spec.init_from!r}, and the task reloads its frozen parameters from initial_weights "
            f"({task.initial_weights!r}) whenever a group forms. Set one of them."
        )
    begins = not is_restoring(assignment)
    if url is not None and (reloads or begins):
        which = Which.ALL if not reloads else Which.FROZEN_AND_FOUND if begins else Which.FROZEN
        weights = InitialWeights(model, url, task.export, generation.position.note, which=which)
    with generation.user_code, noted(generation.position.note):
        compute_lr_factor(spec.schedule, 0, 1)  # a scheduler that cannot be made is the user's error, and known now
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        keep_freed_memory(_num_bytes(model))
        shape = shape_of(model)
        split = split_model(generation, model)
    assembly = split.assembly
    if weights is not None and reloads:
        assembly = replace(assembly, reloaded=frozenset(weights.frozen))
    if weights is None or reloads:
        draw_weights(assembly, distributions, spec.seed, read=weights.names if weights is not None else ())
    if weights is not None:
        weights.read_into(assembly)
    runtime = runtime_of(generation, replace(split, assembly=assembly), shape, num_parameters)
    update = runtime.update
    if not begins and not is_drawn and update.keeps_tensors:
        return build_runtime(generation, check_whole, is_drawn=True)
    if update.why_copies:
        generation.say(
            f"{update.why_copies}. So the state is not kept in shared memory: snapshots are copies, and an "
            "unexpected death repeats the steps since the last one."
        )
    return runtime


@dataclass(frozen=True, slots=True)
class SplitModel:
    """One rank's part of a model, before it has an optimizer."""

    assembly: Assembly
    calls: ModelCalls
    trained: tuple[str, ...]
    """Names of the whole model's parameters that need a gradient."""
    groups: list[ParameterGroup] | None
    """See `build_update`."""


def split_model(generation: Generation, model: nn.Module) -> SplitModel:
    """Consume the whole model."""
    task, spec = generation.task, generation.spec
    trained, groups = trained_and_groups(generation, model)
    calls = ModelCalls(task.evaluate, model)
    attach_task_state(task.instance, model, generation.layout)
    assembly = assemble(model, spec, generation.plan, generation.meshes, task.shard_units)
    return SplitModel(assembly, calls, trained, groups)


def trained_and_groups(generation: Generation, model: nn.Module) -> tuple[tuple[str, ...], list[ParameterGroup] | None]:
    """Freeze what the spec freezes in the whole model. Returns the names of what is trained, and the groups of its
    optimizer, if it has any beside those that a task makes of all parameters."""
    task, spec = generation.task, generation.spec
    _refuse_settings_without_effect(generation)
    freeze(model, spec.optimizer)
    trained = tuple(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    if not trained:
        raise ValueError(
            f"{task.line_of('build_model')}: no parameter of the model requires a gradient, so there is nothing to "
            "train; leave requires_grad on for those that should be trained."
        )
    groups = None
    # Before the model is split: a rank that has some stages only does not see all parameters of a group.
    if not task.has_optimizer and (spec.islands is not None or not spec.optimizer.is_plain_adamw):
        groups = groups_of_spec(model, spec.optimizer)
    elif generation.layout.pp > 1 and (whole := task.build_optimizer(model, spec.optimizer)) is not None:
        groups = groups_of(whole, model)
        # This optimizer refers to all parameters, and would keep the whole model in memory.
        del whole
    return trained, groups


def runtime_of(generation: Generation, split: SplitModel, shape: ModelShape, num_parameters: int) -> ModelRuntime:
    """Make the optimizer of a rank's part, whose values are final."""
    with generation.user_code:
        update = build_update(generation.task, split.assembly, generation.spec, split.groups)
    return ModelRuntime(
        rank=generation.rank,
        assembly=split.assembly,
        meshes=generation.meshes,
        calls=split.calls,
        update=update,
        state=state_of(split.assembly, update),
        shape=shape,
        num_parameters=num_parameters,
        trained=split.trained,
    )


def _built(generation: Generation, *, is_drawn: bool) -> tuple[nn.Module, Mapping[str, Distribution]]:
    """The whole model, and what is to be drawn in this rank's part of it."""
    task = generation.task
    if not is_drawn and (is_restoring(generation.assignment) or generation.spec.init_from is not None):
        return build_for_restore(task.build_model), {}
    if task.has_deferred_init and (undrawn := build_undrawn(task.build_model)) is not None:
        return undrawn
    with refused_if_too_large(available_bytes):
        model = task.build_model()
    num_bytes = _num_bytes(model)
    if num_bytes >= _NOTABLE_BYTES:
        generation.say(
            f"every worker has built the whole model, {num_bytes / (1 << 30):,.1f} GiB of parameters, and keeps its "
            "part: docs/tasks.md, deferred_init, tells how to do without this memory."
        )
    return model, {}


def _refuse_settings_without_effect(generation: Generation) -> None:
    spec = generation.spec
    given = {
        "optimizer.groups": spec.optimizer.groups,
        "optimizer.ema_decay": spec.optimizer.ema_decay is not None,
        "islands": spec.islands is not None,
    }
    if generation.task.has_optimizer and (keys := [key for key, is_given in given.items() if is_given]):
        raise ValueError(
            f"{generation.task.line_of('build_optimizer')}: the task makes its own optimizer, so {keys[0]} of "
            "the spec would have no effect. Remove one of them."
        )


def _num_bytes(model: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def shape_of(model: nn.Module) -> ModelShape:
    """Parameters and buffers, before the model is split."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return ModelShape(tensors={name: f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for name, t in tensors})


def choose_kernels(*, deterministic: bool) -> None:
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic, warn_only=False)
    # Else the mode also writes to every new tensor, which costs a pass over memory each time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


_TIMEOUT_S = 30.0


def warm_up(device: torch.device) -> None:
    """Training thread, before the first generation; leaves no group and no random state behind."""
    layout = fully_sharded(1)
    backend = backend_of(device.type, layout)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=_TIMEOUT_S))
        try:
            meshes = build_mesh(layout, device.type, _TIMEOUT_S, 0)
            model = build_for_restore(lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).to(device))
            shard_model(model, meshes, mixed_precision(Precision.FP32), list(model.children()))
            update = default_update(Assembly(layout, (model,)), OptimizerSpec())
            torch.autograd.backward(model(torch.ones(2, 8, device=device)).square().mean())
            update.step(1.0)
        finally:
            dist.destroy_process_group()


_LOOK_BYTES = 64 << 20
"""Created between two looks at the memory that is left."""
_MARGIN_BYTES = 128 << 20
_MIB = 1 << 20


class ModelTooLarge(Exception):
    """The whole model does not fit into the memory that is left for this worker."""


@contextmanager
def refused_if_too_large(available: Callable[[], int]) -> Iterator[None]:
    """Surrounds code that writes all parameters of a model. `available`: bytes that this process may still take.

    Workers of one node build at the same time, and each sees what the others have written. Raises ModelTooLarge."""
    created = since = 0

    def look(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal created, since
        size = parameter.nbytes if parameter is not None and parameter.layout is torch.strided else 0
        since += size
        if since >= _LOOK_BYTES:
            since = 0
            left = available()
            if size + _MARGIN_BYTES > left:
                raise ModelTooLarge(
                    f"the whole model does not fit into this worker's memory: after {created / _MIB:,.0f} MiB of "
                    f"parameters, {name} of {type(module).__name__} takes {size / _MIB:,.0f} MiB and "
                    f"{_MARGIN_BYTES / _MIB:,.0f} MiB are kept free, but {left / _MIB:,.0f} MiB are left. Every worker "
                    "builds the whole model before it keeps its part. Set deferred_init = True in the task "
                    "(docs/tasks.md), or run fewer workers on a node."
                )
        created += size

    with register_module_parameter_registration_hook(look):
        yield


@contextmanager
def noted(note: Callable[[str], None], *, every_s: float = 0.5) -> Iterator[None]:
    """Makes `note` get, within the block, the number of parameters that were created, at most once in `every_s`
    seconds."""
    created, noted_mono = 0, time.monotonic()

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal created, noted_mono
        created += parameter.numel() if parameter is not None else 0
        if time.monotonic() - noted_mono >= every_s:
            noted_mono = time.monotonic()
            note(f"building the model: {created:,} parameters so far")

    with register_module_parameter_registration_hook(count):
        yield
