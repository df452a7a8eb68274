"""Builds the model, the optimizer and the state of one rank under a generation's layout. Called by the engine.

Every rank builds the whole model, but writes only its own part of it, unless the task's weights must be drawn by its
own code: see fast_build.py. Never restores: if the generation starts from a snapshot or a checkpoint, the parameters
hold arbitrary values afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import nn

from shoal_workers.contract.model.shape import ModelShape
from shoal_workers.engine.model.build_progress import noted, refused_if_too_large
from shoal_workers.engine.model.draw import Distribution
from shoal_workers.engine.model.fast_build import build_for_restore, build_undrawn
from shoal_workers.engine.model.initial_weights import InitialWeights, draw_weights
from shoal_workers.engine.model.runtime import ModelRuntime
from shoal_workers.engine.parallel.assemble import assemble
from shoal_workers.engine.parallel.plain_parameters import make_plain
from shoal_workers.engine.process.warm_memory import keep_freed_memory
from shoal_workers.engine.state.double_buffered_state import DoubleBufferedState
from shoal_workers.engine.state.restore import is_restoring
from shoal_workers.engine.step.generation import Generation
from shoal_workers.engine.step.parameter_groups import groups_of
from shoal_workers.engine.step.update import build_update
from shoal_workers.engine.task.model_calls import ModelCalls
from shoal_workers.machine_limits import available_bytes

_NOTABLE_BYTES = 256 << 20


def build_runtime(generation: Generation) -> ModelRuntime:
    """Training thread. Needs no communication, because every rank builds the whole model first.

    Raises:
        TaskFailed: the task's own code raised.
    """
    task, spec, assignment = generation.task, generation.spec, generation.assignment
    _choose_kernels(deterministic=spec.deterministic)
    with generation.user_code, noted(generation.position.note):
        model, distributions = _built(generation)
        make_plain(model, task.line_of("build_model"))
    weights, url = None, spec.init_from or task.initial_weights
    if url is not None and not is_restoring(assignment):
        weights = InitialWeights(model, url, task.export, generation.position.note)
    with generation.user_code, noted(generation.position.note):
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        keep_freed_memory(_num_bytes(model))
        shape = shape_of(model)
        trained = tuple(name for name, parameter in model.named_parameters() if parameter.requires_grad)
        if not trained:
            raise ValueError(
                f"{task.line_of('build_model')}: no parameter of the model requires a gradient, so there is nothing to "
                "train; leave requires_grad on for those that should be trained."
            )
        calls = ModelCalls(task.evaluate, model)
        groups = None
        if generation.layout.pp > 1 and (whole := task.build_optimizer(model, spec.optimizer)) is not None:
            groups = groups_of(whole, model)
            del whole
        assembly = assemble(model, spec, generation.plan, generation.meshes, task.shard_units)
    if weights is not None:
        weights.read_into(assembly)
    else:
        draw_weights(assembly, distributions, spec.seed)
    with generation.user_code:
        update = build_update(task, assembly, spec, groups)
    if generation.rank == 0 and update.not_logged and not update.is_elementwise:
        generation.outbox.log_text(
            f"{update.not_logged}. So the state is not kept in shared memory: snapshots are copies, and an unexpected "
            "death repeats the steps since the last one."
        )
    return ModelRuntime(
        rank=assignment.rank,
        assembly=assembly,
        meshes=generation.meshes,
        calls=calls,
        update=update,
        state=DoubleBufferedState(assembly, update),
        shape=shape,
        num_parameters=num_parameters,
        trained=trained,
    )


def _built(generation: Generation) -> tuple[nn.Module, Mapping[str, Distribution]]:
    """The whole model, and what is to be drawn in this rank's part of it."""
    task = generation.task
    if is_restoring(generation.assignment) or generation.spec.init_from is not None:
        return build_for_restore(task.build_model), {}
    if task.has_deferred_init and (undrawn := build_undrawn(task.build_model)) is not None:
        return undrawn
    with refused_if_too_large(available_bytes):
        model = task.build_model()
    num_bytes = _num_bytes(model)
    if generation.rank == 0 and num_bytes >= _NOTABLE_BYTES:
        generation.outbox.log_text(
            f"every worker has built the whole model, {num_bytes / (1 << 30):,.1f} GiB of parameters, and keeps its "
            "part: docs/tasks.md, deferred_init, tells how to do without this memory."
        )
    return model, {}


def _num_bytes(model: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def shape_of(model: nn.Module) -> ModelShape:
    """Parameters and buffers, before the model is split."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return ModelShape(tensors={name: f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for name, t in tensors})


def _choose_kernels(*, deterministic: bool) -> None:
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic, warn_only=False)
    # Else the mode also writes to every new tensor, which costs a pass over memory each time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
