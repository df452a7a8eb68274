"""rank(...): the table of `shoal plan` and POST /v1/plans. refusal(...): why a job fits no machine, asked at submit.
predict_planned_step(...): what a job that has been measured should have taken.

If no layout fits, both say what the model needs and what would fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from shoal_service.core.hardware_profile import GIB, DeviceKind, HardwareProfile, Racks
from shoal_service.core.layout_plan import HostNeed
from shoal_service.core.quantities import count_text
from shoal_service.planner.gpus import PROFILES
from shoal_service.planner.memory import count_local_copies, gpu_host_bytes
from shoal_service.planner.parameter_state import estimate_state
from shoal_service.planner.planning import normal_racks, on_nodes, plan, profile_for
from shoal_service.planner.ranking import LayoutTable, Prediction, Ranking, Task, predict_layouts
from shoal_service.planner.shape import shape_of
from shoal_workers.contract.checks.legality import is_plain_by_default, violations
from shoal_workers.contract.layout import AXES, PLANNED_AXES, ParallelismSpec, Recompute, ShardLevel
from shoal_workers.contract.spec import JobSpec, plan_of

_MOST_RANKS = 65_536
_FEW_TIMES = 8
"""If something else would fit, at most so many times the ranks are named as another way."""
_CLEARLY_FASTER = 0.95
"""Another micro-batch is named if its step takes at most this share."""


def rank(
    spec: JobSpec,
    world_size: int,
    profile: HardwareProfile | None = None,
    top: int = 10,
    racks: Racks = (),
    compare: Mapping[str, int] | None = None,
) -> Ranking:
    """The `top` best combinations of degrees for exactly `world_size` ranks, each with the best other choices.

    `racks`: where the workers are; (): nodes of the profile's size in one rack.
    `compare`: degrees by axis; the best layout with them is predicted too, whatever its place, also if other programs
    have it and the engine refuses it. Axes that it does not name are 1, except dp_shard.

    There are none for a user task, a script or a loop, and none if the world has no legal layout; `note` says so.
    """
    profile = profile_for(spec, profile)
    shape = shape_of(spec)
    empty = Ranking(world_size=world_size, profile=profile.name, usable_bytes=int(profile.usable_bytes))
    if shape is None:
        return empty.model_copy(
            update={
                "note": "the planner does not know the model of a script or a loop, so it predicts nothing."
                if spec.program is not None
                else (
                    f"the planner does not know the sizes of the model of task {spec.task!r}, so it predicts nothing."
                )
            }
        )
    fixed = spec.parallelism if isinstance(spec.parallelism, ParallelismSpec) else None
    racks = normal_racks(racks, profile)
    task = Task(spec, shape, on_nodes(profile, racks), fixed, racks)
    table = predict_layouts(task, [world_size], offload=fixed is not None and fixed.offload)
    trained, state = estimate_state(spec, shape).count_trained(shape)
    model = {
        "num_params": shape.params,
        "num_active_params": shape.active_params,
        "num_trained_params": trained,
        "state_bytes": state,
    }
    if not len(table):
        return empty.model_copy(update=model | {"note": _no_layout(task, world_size)})
    compared = None if compare is None else _compared(task, world_size, compare)
    return empty.model_copy(
        update=model
        | {
            "num_layouts": len(table),
            "num_fitting": table.num_fitting,
            "predictions": table.best(top),
            "note": "" if table.num_fitting else too_large(task, world_size, table),
            "why_not": why_not(table),
            "hints": _micro_size_hints(task, world_size, table),
            "compared": compared,
            "compared_refused": () if compared is None else _refused(spec, compared),
        }
    )


def why_not(table: LayoutTable) -> tuple[str, ...]:
    """A line for each axis that the best layout does not use: the fastest layout with it, and what it loses there."""
    best = table.best(1)[0]
    if not best.fits:
        return ()
    lines = []
    for axis in (*PLANNED_AXES, "dp_replicate"):
        degrees = getattr(table.columns, axis)
        if getattr(best.layout, axis) > 1:
            continue
        if not (degrees > 1).any():
            lines.append(f"{axis}: no legal layout of {best.layout.world_size} ranks uses it")
            continue
        rival = table.fastest(degrees > 1)
        if rival is None:
            lines.append(f"{axis}: no layout with it fits into memory")
            continue
        lines.append(f"{axis}: {rival.name} {compare_steps(rival, best)}")
    return tuple(lines)


def compare_steps(rival: Prediction, best: Prediction) -> str:
    """How much longer or shorter the steps of a rival are, and the part that loses most."""
    ratio = rival.step_s / best.step_s - 1
    if ratio < 0:
        return f"is predicted to be {-ratio:.1%} faster, too little for another axis"
    lost = {part: seconds - best.seconds[part] for part, seconds in rival.seconds.items()}
    part = max(lost, key=lambda name: lost[name])
    return f"takes {ratio:.1%} longer: {part} {best.seconds[part]:.3g} -> {rival.seconds[part]:.3g} s"


def _compared(task: Task, world_size: int, degrees: Mapping[str, int]) -> Prediction | None:
    """None if neither this engine nor another program that is known has a layout of the world with these degrees."""
    fixed = replace(task, fixed=ParallelismSpec.model_validate(dict(degrees)))
    tables = (predict_layouts(replace(fixed, is_hypothetical=beyond), [world_size]) for beyond in (False, True))
    return next((table.best(1)[0] for table in tables if len(table)), None)


def _refused(spec: JobSpec, prediction: Prediction) -> tuple[str, ...]:
    return tuple(
        f"{violation.message} ({violation.rule})" for violation in violations(prediction.layout, spec, plan_of(spec))
    )


def _micro_size_hints(task: Task, world_size: int, table: LayoutTable) -> tuple[str, ...]:
    """Other micro-batches with which the best degrees are clearly faster."""
    best, batch = table.best(1)[0], task.spec.batch
    if not best.fits or task.profile.kind is not DeviceKind.GPU:
        return ()
    degrees = {axis: getattr(best.layout, axis) for axis in AXES}
    rivals: list[tuple[float, int, Prediction]] = []
    for micro_size in (batch.micro_size // 4, batch.micro_size // 2, 2 * batch.micro_size, 4 * batch.micro_size):
        if micro_size < 1 or batch.global_size % micro_size:
            continue
        spec = task.spec.model_copy(update={"batch": batch.model_copy(update={"micro_size": micro_size})})
        other = _fitting(replace(task, spec=spec, fixed=ParallelismSpec(**degrees)), world_size)
        if other is not None:
            rivals.append((other.step_s, micro_size, other))
    step_s, micro_size, rival = min(rivals, default=(best.step_s, batch.micro_size, best), key=lambda found: found[0])
    if step_s > _CLEARLY_FASTER * best.step_s:
        return ()
    return (
        f"batch.micro_size {micro_size} instead of {batch.micro_size}: {1 - step_s / best.step_s:.0%} shorter steps "
        f"with {rival.name}, recompute {rival.layout.recompute}, {rival.memory_bytes / GIB:,.1f} GiB",
    )


def predict_planned_step(spec: JobSpec, world_size: int, profile: HardwareProfile) -> float | None:
    """Seconds of a step in the layout that `plan` gives that many workers; None if the sizes are unknown."""
    shape = shape_of(spec)
    if shape is None:
        return None
    layout = plan(spec, world_size, profile).layout
    choices = {axis: getattr(layout, axis) for axis in (*AXES, "shard", "schedule", "recompute", "context", "offload")}
    task = Task(spec, shape, profile_for(spec, profile), ParallelismSpec.model_validate(choices))
    table = predict_layouts(task, [layout.world_size], offload=layout.offload)
    return float(table.step_s[table.order[0]]) if len(table) else None


def refusal(spec: JobSpec) -> str:
    """Why no layout of any world that the job may have fits into memory; "": one does, or the sizes are unknown.

    Called at submit, when the nodes are unknown. Workers with a GPU are assumed to have the largest built-in one, and
    workers without one are limited by `worker.memory_gib` only.
    """
    shape = shape_of(spec)
    if shape is None:
        return _too_large_of_its_own(spec)
    if not spec.worker.gpus and not spec.worker.memory_gib:
        return ""
    largest = max(PROFILES.values(), key=lambda profile: (profile.kind is DeviceKind.GPU, profile.memory_bytes))
    profile = profile_for(spec, largest if spec.worker.gpus else None)
    task, world_size = Task(spec, shape, profile), spec.elasticity.max_workers
    table = _largest_table(task, world_size)
    if table.may_fit.any() or (spec.worker.gpus and predict_layouts(task, [world_size], offload=True).may_fit.any()):
        return ""
    return too_large(task, world_size, table)


def memory_note(spec: JobSpec, nodes: Iterable[tuple[float, float, float]], profile: HardwareProfile | None) -> str:
    """Says that `elasticity.max_workers` workers do not fit into the memory of the nodes that are there at submit; "":
    they do, or the need is not known. `nodes`: CPUs, GPUs and the GiB that Ray counts, of each; the largest are filled
    first. What buddies keep on a node is not counted, since it is not known yet who they are."""
    most, nodes = spec.elasticity.max_workers, list(nodes)
    planned = plan(spec, most, profile)
    note = _memory_note(spec, nodes, planned.host)
    if note and planned.layout.shard is ShardLevel.NONE and is_plain_by_default(spec):
        # a group of shards follows whose machines have no room for plain replicas
        return _memory_note(spec, nodes, plan(spec, most, profile, (), (planned.layout,)).host)
    return note


def _memory_note(spec: JobSpec, nodes: Iterable[tuple[float, float, float]], need: HostNeed) -> str:
    left, full = spec.elasticity.max_workers, []
    for room, gib in sorted(((_room(spec, cpus, gpus), gib) for cpus, gpus, gib in nodes), reverse=True):
        number = min(left, room)
        left -= number
        if need.of(number) > gib * GIB and need.own:
            full.append((need.of(number) / GIB - gib, number, gib))
    if not full:
        return ""
    _, number, gib = max(full)
    gibs = [size / GIB for size in (need.of(number), need.process, need.own, number * need.snapshots)]
    return (
        f"For {count_text(number, 'worker')} on one node the planner predicts {gibs[0]:,.1f} GiB "
        f"(process {gibs[1]:,.1f} + {number} x {gibs[2]:,.1f}), but Ray counts {gib:,.1f} GiB there. "
        "Spread them over more nodes (worker.memory_gib, placement), or set snapshot.enabled: false, "
        f"which saves {gibs[3]:,.1f} GiB."
    )


def _room(spec: JobSpec, cpus: float, gpus: float) -> int:
    worker = spec.worker
    rooms = [int(has // needs) for has, needs in ((cpus, worker.cpus), (gpus, worker.gpus)) if needs]
    return min(rooms, default=spec.elasticity.max_workers)


def _too_large_of_its_own(spec: JobSpec) -> str:
    """Says that a task which declares the number of its parameters needs too much memory: its least need with all
    workers, on one node. "": it fits."""
    need, limit = plan(spec, spec.elasticity.max_workers).host, spec.worker.memory_gib
    if not limit or need.alone <= limit * GIB:
        return ""
    is_build = need.alone == need.process + need.build
    parts = {"the process": need.process}
    parts |= {"the whole model": need.build} if is_build else {"training": need.training, "snapshots": need.snapshots}
    ways = [f"worker.memory_gib {math.ceil(need.alone / GIB)}"]
    if is_build:
        ways.append("deferred_init = True in the task and in plan, so that no worker builds the whole model")
    else:
        ways.append("more workers (elasticity.max_workers)")
        if need.snapshots and need.alone - need.snapshots <= limit * GIB:
            ways.append("snapshot.enabled: false")
    sizes = ", ".join(f"{part} {size / GIB:,.1f} GiB" for part, size in parts.items() if size)
    return (
        f"Each worker needs at least {need.alone / GIB:,.1f} GiB, and worker.memory_gib is {limit:g}: {sizes}. "
        f"What would fit: {'; or '.join(ways)}."
    )


def _largest_table(task: Task, world_size: int) -> LayoutTable:
    """The table of the largest world that has a layout."""
    return next(table for world in range(world_size, 0, -1) if len(table := predict_layouts(task, [world])))


def _no_layout(task: Task, world_size: int) -> str:
    near = [world for size in range(1, 2048) for world in (world_size - size, world_size + size) if world > 0]
    legal = next((world for world in near if len(predict_layouts(task, [world]))), None)
    hint = f" The nearest number of ranks with one is {legal}." if legal else ""
    fixed = " with the degrees that parallelism fixes" if task.fixed is not None else ""
    return (
        f"There is no legal layout of {world_size} ranks{fixed}: a layout has at most "
        f"{task.spec.batch.num_micro_batches} data ranks (micro-batches a step), times degrees that "
        f"the model allows.{hint}"
    )


def too_large(task: Task, world_size: int, table: LayoutTable) -> str:
    """The least memory that any layout needs, what it is for, and what would fit: more ranks, or another technique."""
    is_gpu = task.profile.kind is DeviceKind.GPU
    usable = task.profile.usable_bytes / GIB
    least = table.least_memory()
    have = task.profile.memory_bytes / GIB
    ways = []
    for text, changed in _remedies(task):
        if (best := _fitting(changed, world_size)) is not None:
            ways.append(text.format(size=_size(best), recompute=best.layout.recompute))
    if offload := _offload(task, world_size):
        ways.append(offload)
    most = _FEW_TIMES * world_size if ways else _MOST_RANKS
    if more := _more_ranks(task, world_size, is_gpu, most):
        ways.insert(0, more)
    return (
        f"A model of {task.shape.params / 1e9:,.3g} B parameters does not fit on "
        f"{_ranks(world_size, is_gpu)} of {have:,.3g} GiB ({usable:,.1f} usable). The smallest of "
        f"{len(table):,} layouts, {least.name} ({least.layout.shard}, recompute "
        f"{least.layout.recompute}), needs {least.memory_bytes / GIB:,.1f} GiB: {_parts(least)}. "
    ) + (f"What would fit: {'; or '.join(ways)}." if ways else "Nothing that the planner knows makes it fit.")


def _ranks(count: int, is_gpu: bool) -> str:
    return f"{count:,} {'GPU' if is_gpu else 'worker'}{'s' if count > 1 else ''}"


def _parts(prediction: Prediction) -> str:
    largest = sorted(prediction.bytes.items(), key=lambda item: -item[1])[:4]
    return ", ".join(f"{part} {size / GIB:,.1f}" for part, size in largest if size)


def _fitting(task: Task, world_size: int) -> Prediction | None:
    """The best layout of the world; None if none fits."""
    table = predict_layouts(task, [world_size])
    return table.best(1)[0] if len(table) and table.num_fitting else None


def _size(best: Prediction) -> str:
    return f"{best.memory_bytes / GIB:,.1f} GiB with {best.name}"


def _remedies(task: Task) -> Iterator[tuple[str, Task]]:
    """Yield the job with other settings that need less memory, and a text that names them."""
    spec, fixed = task.spec, task.fixed
    if fixed is not None and fixed.recompute not in ("auto", Recompute.FULL):
        any_recompute = fixed.model_copy(update={"recompute": "auto"})
        yield "parallelism.recompute: {recompute} ({size})", replace(task, fixed=any_recompute)
    if spec.batch.micro_size > 1:
        batch = spec.batch.model_copy(update={"micro_size": 1})
        yield "batch.micro_size 1 ({size})", replace(task, spec=spec.model_copy(update={"batch": batch}))
    if spec.snapshot.enabled:
        snapshot = spec.snapshot.model_copy(update={"enabled": False})
        yield "snapshot.enabled: false ({size})", replace(task, spec=spec.model_copy(update={"snapshot": snapshot}))
    if fixed is not None:
        yield "parallelism: auto ({size}, recompute {recompute})", replace(task, fixed=None)


def _more_ranks(task: Task, world_size: int, is_gpu: bool, most: int) -> str:
    if task.fixed is not None and task.fixed.dp_shard != "auto":
        return ""
    world, step = world_size, 1
    while 2 * world <= most:
        step = max(1, min(world, task.profile.ranks_per_node))
        world = (2 * world) // step * step
        if (best := _fitting(task, world)) is not None:
            return f"{_ranks(world, is_gpu)} ({best.name})"
    return ""


def _offload(task: Task, world_size: int) -> str:
    if task.profile.kind is not DeviceKind.GPU:
        return ""
    table = predict_layouts(task, [world_size], offload=True)
    if not len(table):
        return ""
    if not table.num_fitting:
        return _more_host_memory(table)
    best = table.best(1)[0]
    return f"parallelism.offload: true ({_size(best)}, {best.step_s:,.1f} s a step)"


def _more_host_memory(table: LayoutTable) -> str:
    """Offloading, if only `worker.memory_gib` forbids it."""
    on_device = table.memory_bytes <= table.task.profile.usable_bytes
    if not on_device.any():
        return ""
    spec, shape, params = table.task.spec, table.task.shape, table.shard_params[on_device]
    least = float(gpu_host_bytes(spec, shape, params, offload=True).min()) / GIB
    param_state = estimate_state(spec, shape)
    kept = (
        f" and {param_state.snapshot_bytes(shape) * count_local_copies(spec):.3g} of its snapshots"
        if count_local_copies(spec)
        else ""
    )
    return (
        f"parallelism.offload: true with worker.memory_gib {math.ceil(least)} "
        f"({param_state.offloaded_bytes(shape):.3g} bytes for each parameter of a worker"
        f"{kept} are {least:,.1f} GiB with the process; worker.memory_gib is {spec.worker.memory_gib:g})"
    )
