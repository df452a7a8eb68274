"""The message for a model that no layout fits: what it needs, and what would fit. `report` calls this."""

from __future__ import annotations

import math
from dataclasses import replace

from shoal_service.core.hardware_profile import GIB, DeviceKind
from shoal_service.planner.host_memory import STATE_BYTES, gpu_host_bytes, own_copies
from shoal_service.planner.prediction import Prediction
from shoal_service.planner.ranking import LayoutTable, Task, predict_layouts

_MOST_RANKS = 65_536


def too_large(task: Task, world_size: int, table: LayoutTable) -> str:
    """The least memory that any layout needs, what it is for, and what would fit: more ranks, or another technique."""
    is_gpu = task.profile.kind is DeviceKind.GPU
    usable = task.profile.usable_bytes / GIB
    least = table.least_memory()
    have = task.profile.memory_bytes / GIB
    tries = (
        _more_ranks(task, world_size, is_gpu),
        _smaller_batch(task, world_size),
        _without_snapshots(task, world_size),
        _offload(task, world_size),
    )
    ways = [way for way in tries if way]
    return (
        f"{task.shape.params / 1e9:,.3g} B parameters do not fit on {_ranks(world_size, is_gpu)} of {have:,.3g} GiB, "
        f"of which {usable:,.1f} may be used. Of {len(table):,} layouts {least.name} ({least.layout.shard}, recompute "
        f"{least.layout.recompute}) needs the least memory, {least.memory_bytes / GIB:,.1f} GiB: {_parts(least)}. "
        + (
            f"What would fit: {'; or '.join(ways)}."
            if ways
            else "No technique that the planner knows would make it fit."
        )
    )


def _ranks(count: int, is_gpu: bool) -> str:
    return f"{count:,} {'GPU' if is_gpu else 'worker'}{'s' if count > 1 else ''}"


def _parts(prediction: Prediction) -> str:
    largest = sorted(prediction.bytes.items(), key=lambda item: -item[1])[:4]
    return ", ".join(f"{part} {size / GIB:,.1f}" for part, size in largest if size)


def _more_ranks(task: Task, world_size: int, is_gpu: bool) -> str:
    if task.fixed is not None and task.fixed.dp_shard != "auto":
        return ""
    world, step = world_size, 1
    while world < _MOST_RANKS:
        step = max(1, min(world, task.profile.ranks_per_node))
        world = (2 * world) // step * step
        found = predict_layouts(task, [world])
        if len(found) and found.num_fitting:
            return f"{_ranks(world, is_gpu)} ({found.best(1)[0].name})"
    return ""


def _smaller_batch(task: Task, world_size: int) -> str:
    batch = task.spec.batch
    if batch.micro_size == 1:
        return ""
    spec = task.spec.model_copy(update={"batch": batch.model_copy(update={"micro_size": 1})})
    found = predict_layouts(replace(task, spec=spec), [world_size])
    if not len(found) or not found.num_fitting:
        return ""
    return f"batch.micro_size 1 ({found.best(1)[0].memory_bytes / GIB:,.1f} GiB with {found.best(1)[0].name})"


def _without_snapshots(task: Task, world_size: int) -> str:
    if not task.spec.snapshot.enabled:
        return ""
    snapshot = task.spec.snapshot.model_copy(update={"enabled": False})
    found = predict_layouts(replace(task, spec=task.spec.model_copy(update={"snapshot": snapshot})), [world_size])
    if not len(found) or not found.num_fitting:
        return ""
    best = found.best(1)[0]
    return f"snapshot.enabled: false ({best.memory_bytes / GIB:,.1f} GiB with {best.name})"


def _offload(task: Task, world_size: int) -> str:
    if task.profile.kind is not DeviceKind.GPU:
        return ""
    found = predict_layouts(task, [world_size], offload=True)
    if not len(found):
        return ""
    if not found.num_fitting:
        return _more_host_memory(found)
    best = found.best(1)[0]
    return (
        f"parallelism.offload: true ({best.memory_bytes / GIB:,.1f} GiB with {best.name}, {best.step_s:,.1f} s a step)"
    )


def _more_host_memory(found: LayoutTable) -> str:
    """Offloading, if only `worker.memory_gib` forbids it."""
    on_device = found.memory_bytes <= found.task.profile.usable_bytes
    if not on_device.any():
        return ""
    spec, params = found.task.spec, found.shard_params[on_device]
    least = float(gpu_host_bytes(spec, params, offload=True).min()) / GIB
    kept = f" and {STATE_BYTES * own_copies(spec)} of its snapshots" if own_copies(spec) else ""
    return (
        f"parallelism.offload: true with worker.memory_gib {math.ceil(least)} (16 bytes for each parameter of a worker"
        f"{kept} are {least:,.1f} GiB with the process; worker.memory_gib is {spec.worker.memory_gib:g})"
    )
