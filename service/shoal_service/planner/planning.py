"""plan(spec, world size) -> Plan: the layout for a number of workers.

The attempt machine calls `plan` whenever a group forms, so it always has an answer: if no layout is predicted to fit,
it is the one that needs the least memory, and the reason says so. If the layout leaves ranks idle, the reason says why.

    a script                                      one replica per worker: it splits its own work
    deterministic                                 fully sharded
    fixed degrees                                 used if they fit the world; else planned again, or idle ranks
    workers without a GPU                         plain replicas if the whole state fits and each worker has a
                                                  micro-batch; else data axes while each worker has one
    a model of unknown sizes                      plain replicas without a GPU, until a worker has measured that the
                                                  whole state does not fit; else fully sharded
    otherwise                                     the best of all legal layouts
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from shoal_service.core.hardware_profile import GIB, DeviceKind, HardwareProfile, Racks
from shoal_service.core.layout_plan import Plan
from shoal_service.planner.candidates import LEVELS
from shoal_service.planner.gpus import CPU, DEFAULT_GPU, PROFILES
from shoal_service.planner.memory import BytesPart, least_need, num_params_of
from shoal_service.planner.ranking import (
    PLAIN,
    LayoutTable,
    Prediction,
    Preference,
    Task,
    partitioned,
    predict_layouts,
    prefers_data_axes,
    select_layouts,
)
from shoal_service.planner.shape import shape_of
from shoal_service.planner.step_time import SecondsPart
from shoal_workers.contract.checks.legality import (
    fixed_layout,
    is_plain_by_default,
    loop_layout,
    violations,
    why_not_plain,
)
from shoal_workers.contract.layout import Layout, ParallelismSpec, ShardLevel, micro_batches_fed, plain, replicated
from shoal_workers.contract.proofs import is_refused
from shoal_workers.contract.spec import JobSpec, plan_of

_FEW = 16
"""A world of at most this size is compared with every smaller one."""
_CLEARLY_FASTER = 0.95
"""A smaller world has to need at most this share of the step time."""
_OWN_ERROR = 0.25
"""By how much the predicted steps of two shard levels have to differ for the prediction to be believed: the ratio of
two layouts is that much off, and more for single ones (docs/measured/layouts.md)."""
_MAX_CACHED = 512
"""Plans in the cache."""


def plan(
    spec: JobSpec,
    world_size: int,
    profile: HardwareProfile | None = None,
    racks: Racks = (),
    refused: tuple[Layout, ...] = (),
) -> Plan:
    """The layout for `world_size` workers, of which some may stay idle, and the reason. The last answers are cached.

    `profile`: of the nodes. Default: h100 for workers with a GPU, else cores of a CPU.
    `racks`: where the usable workers are, at least `world_size` of them; (): not known, nodes of the profile's size in
    one rack. A planned tp leaves no tp group on two nodes, unless no such layout is predicted to fit and another is.
    `refused`: layouts that a proof has refused. Also fixed degrees that use all that one of them uses are planned anew.
    """
    assert world_size >= 1
    if spec.script is not None:
        return Plan(replicated(world_size), f"{Preference.OF_SCRIPT}: the script splits its own work")
    if spec.loop is not None:
        return _plan_loop(spec, world_size)
    profile = profile_for(spec, profile)
    text = spec.model_dump_json(include=_DECIDES)
    racks = normal_racks(racks, profile)
    return _cached_plan(_PlanKey(text, world_size, profile.model_dump_json(), racks, refused, spec, profile))


def _plan_loop(spec: JobSpec, world_size: int) -> Plan:
    layout = loop_layout(spec.parallelism, world_size)
    if not isinstance(spec.parallelism, ParallelismSpec):
        return Plan(layout, f"{Preference.OF_SCRIPT}: the loop splits its own work")
    reason = f"{Preference.AS_REQUESTED}"
    if fixed_layout(spec.parallelism, layout.world_size, None) is None:
        reason = f"a new plan, because the degrees of parallelism need a multiple of {spec.parallelism.unit} workers"
    return Plan(layout, reason + _idle(layout.world_size, world_size))


_SECTIONS = ("task", "model", "data", "batch", "precision", "parallelism", "plan", "worker", "islands")
_DECIDES: Mapping[str, Any] = {
    **dict.fromkeys((*_SECTIONS, "reduce_precision", "module_precision", "fp8", "snapshot", "deterministic"), True),
    "optimizer": {"name", "fused", "args", "groups", "ema_decay"},
}
"""The keys of a spec that a plan depends on. A change of another one, such as `elasticity`, keeps cached plans."""


def normal_racks(racks: Racks, profile: HardwareProfile) -> Racks:
    """Sorted; (): whole nodes of one rack, as assumed without them."""
    racks = tuple(sorted(tuple(sorted(rack)) for rack in racks if rack))
    is_as_assumed = len(racks) == 1 and set(racks[0]) == {profile.ranks_per_node}
    return () if is_as_assumed else racks


def plans(spec: JobSpec, world_sizes: Iterable[int], profile: HardwareProfile | None = None) -> dict[int, Plan]:
    """Fill the cache: afterwards `plan` answers immediately for these worlds."""
    return {world_size: plan(spec, world_size, profile) for world_size in world_sizes}


def plan_ahead(spec: JobSpec, profile: HardwareProfile | None = None) -> None:
    """Fill the cache for every world that the job may have, the largest first; at most half of the cache."""
    least, most = spec.elasticity.min_workers, spec.elasticity.max_workers
    plans(spec, range(most, max(least - 1, most - _MAX_CACHED // 2), -1), profile)


def profile_for(spec: JobSpec, profile: HardwareProfile | None = None) -> HardwareProfile:
    """The hardware assumed for the workers. Without a GPU it has `worker.cpus` cores and `worker.memory_gib`."""
    if profile is None:
        profile = PROFILES[DEFAULT_GPU] if spec.worker.gpus else CPU
    if profile.kind is not DeviceKind.CPU:
        return profile
    threads = max(1, int(spec.worker.cpus))
    updates: dict[str, object] = {
        "peak_flops": {precision: threads * rate for precision, rate in profile.peak_flops.items()},
        "processors_per_node": -(-profile.processors_per_node // threads),
    }
    if spec.worker.memory_gib > 0:
        updates["memory_bytes"] = max(1, round(spec.worker.memory_gib * GIB))
    return profile.model_copy(update=updates)


@dataclass(frozen=True)
class _PlanKey:
    """Cache key. It compares texts, since a spec contains dicts, which have no hash."""

    spec_text: str
    world_size: int
    profile_text: str
    racks: Racks
    refused: tuple[Layout, ...]
    spec: JobSpec = field(compare=False)
    profile: HardwareProfile = field(compare=False)


@lru_cache(maxsize=_MAX_CACHED)
def _cached_plan(key: _PlanKey) -> Plan:
    spec, world_size, profile = key.spec, key.world_size, key.profile
    if spec.deterministic:
        return _fully_sharded(spec, world_size, Preference.DETERMINISTIC, "the order of sums must be fixed")
    fixed = spec.parallelism if isinstance(spec.parallelism, ParallelismSpec) else None
    why_not = ""
    if fixed is not None:
        requested = _plan_as_requested(spec, fixed, world_size, profile, key.racks)
        if requested is not None and not is_refused(requested.layout, key.refused):
            return requested
        why_not = f"; a new plan, because the degrees of parallelism need a multiple of {fixed.unit} workers"
        if requested is not None:
            why_not = f"; a new plan, because {requested.layout.describe()} failed its proof"
    best = _best(spec, world_size, profile, key.racks, key.refused)
    if key.racks and not best.fits:
        across_nodes = _best(spec, world_size, profile, key.racks, key.refused, tp_may_cross=True)
        best = across_nodes if across_nodes.fits else best
    return replace(best, reason=best.reason + why_not)


def _best(
    spec: JobSpec,
    world_size: int,
    profile: HardwareProfile,
    racks: Racks,
    refused: tuple[Layout, ...],
    *,
    tp_may_cross: bool = False,
) -> Plan:
    shape = shape_of(spec)
    if shape is None:
        return _plan_unknown_size(spec, world_size, refused)
    if not tp_may_cross:
        profile = on_nodes(profile, racks)
    if world_size == 1:  # with one worker nothing can be sharded
        refused = tuple(layout for layout in refused if layout.shard is not ShardLevel.NONE)
    task = Task(spec, shape, profile, racks=racks, tp_may_cross=tp_may_cross, refused=refused)
    table = None
    if prefers_data_axes(profile, world_size, spec.batch.num_micro_batches):
        table = _on_data_axes(predict_layouts(task, [world_size]), world_size)
    if table is not None:
        planned = _with_rivals(table, table.best(1)[0], world_size, f"{Preference.DATA_AXES_ON_CPU}")
    else:
        planned = _plan_worlds(task, world_size)
    why = "" if planned.layout.shard is ShardLevel.NONE else _why_split(task, world_size)
    return replace(planned, reason=f"{planned.reason}; {why}") if why else planned


def _why_split(task: Task, world_size: int) -> str:
    """Return why the workers of a job on CPUs do not have the whole state; empty if there is one worker, or the spec
    fixes degrees."""
    spec, num_micro_batches = task.spec, task.spec.batch.num_micro_batches
    if task.profile.kind is DeviceKind.GPU or world_size == 1 or spec.parallelism != "auto":
        return ""
    reasons = list(why_not_plain(spec))
    if not reasons and world_size > num_micro_batches:
        reasons = [f"the {world_size} workers are more than the {num_micro_batches} micro-batches of a step"]
    elif not reasons:
        whole = replace(task, fixed=ParallelismSpec(shard=ShardLevel.NONE), refused=())
        need = predict_layouts(whole, [world_size]).least_memory().memory_bytes
        reasons = [f"the whole state does not fit on each worker, where it needs {need / GIB:.2f} GiB"]
    return f"split since {' and '.join(reasons)}"


def on_nodes(profile: HardwareProfile, racks: Racks) -> HardwareProfile:
    """The profile with the size of the largest node, if the nodes are known."""
    if not racks:
        return profile
    return profile.model_copy(update={"ranks_per_node": max(size for rack in racks for size in rack)})


def _plan_worlds(task: Task, world_size: int) -> Plan:
    """The best layout of this world and of smaller ones. A smaller one must be clearly faster, as ranks idle."""
    best: Prediction | None = None
    table: LayoutTable | None = None
    for world in _worlds(world_size):
        if best is not None and best.fits and not _could_be_faster(world, best):
            continue
        predicted = predict_layouts(task, [world])
        if not len(predicted):
            continue
        rival = _best_of_world(task, predicted, world)
        if best is None or _is_clearly_better(rival, best):
            best, table = rival, predicted
    if best is None or table is None:  # one rank is always legal
        table = next(f for world in range(world_size, 0, -1) if len(f := predict_layouts(task, [world])))
        best = table.best(1)[0]
    if not best.fits and task.profile.kind is DeviceKind.GPU:
        rescued = predict_layouts(task, [world_size], offload=True)
        if len(rescued) and rescued.num_fitting:
            best, table = rescued.best(1)[0], rescued
    return _with_rivals(table, best, world_size, "")


def _best_of_world(task: Task, table: LayoutTable, world: int) -> Prediction:
    """The best layout; plain replicas instead of shards, where they fit and the data axes are enough."""
    best = table.best(1)[0]
    whole = _on_data_axes(table, world) if task.may_be_plain and not best.layout.planned_axes else None
    return best if whole is None else whole.best(1)[0]


def _could_be_faster(world: int, best: Prediction) -> bool:
    """Return False if so few ranks are not clearly faster than `best`, even without any loss."""
    ideal_s = best.seconds[SecondsPart.COMPUTE] * best.layout.world_size / world
    return ideal_s < _CLEARLY_FASTER * best.step_s


def _worlds(world_size: int) -> list[int]:
    """Larger ones first: this world, and all smaller ones; of a large world only those divisible by powers of two."""
    if world_size <= _FEW:
        return list(range(world_size, 0, -1))
    rounded = {world_size // (1 << bits) << bits for bits in range(world_size.bit_length())}
    return sorted(rounded | {world_size - 1, world_size - 2}, reverse=True)


def _is_clearly_better(rival: Prediction, best: Prediction) -> bool:
    if rival.fits != best.fits:
        return rival.fits
    if not rival.fits:
        return rival.memory_bytes < best.memory_bytes
    return rival.step_s < _CLEARLY_FASTER * best.step_s


def _plan_as_requested(
    spec: JobSpec, fixed: ParallelismSpec, world_size: int, profile: HardwareProfile, racks: Racks
) -> Plan | None:
    """The plan with the fixed degrees; None if they do not fit the world, and others may be chosen."""
    worlds = [world_size]
    if fixed.otherwise == "idle":
        most = world_size // fixed.unit * fixed.unit
        worlds = list(range(most, 0, -fixed.unit)) if fixed.dp_shard == "auto" else [fixed.unit] * (most > 0)
    if fixed.shard is ShardLevel.NONE:
        worlds = [min(world_size, spec.batch.num_micro_batches)]
    shape, known = shape_of(spec), plan_of(spec)
    for world in worlds:
        layout = fixed_layout(fixed, world, known)
        if layout is None:
            continue
        if shape is not None:
            task = Task(spec, shape, on_nodes(profile, racks), fixed, racks)
            table = predict_layouts(task, [world], offload=fixed.offload)
            if len(table):
                return _plan_from(table.best(1)[0], world_size, f"{Preference.AS_REQUESTED}")
        elif not violations(layout, spec, known):
            fed = micro_batches_fed(layout, spec.batch.num_micro_batches)
            reason = partitioned(spec, layout.num_data_ranks, fed)
            rule = f"{Preference.PLAIN}: {PLAIN}; " if layout.shard is ShardLevel.NONE else ""
            reason = f"{reason}; {rule}{Preference.AS_REQUESTED}{_idle(world, world_size)}"
            return Plan(layout, reason, host=least_need(spec, layout, num_params_of(spec)))
    return None


def _plan_unknown_size(spec: JobSpec, world_size: int, refused: tuple[Layout, ...]) -> Plan:
    """Plain where that is the default, until a worker has measured that the whole state does not fit. The host memory
    is the least that the job needs, so that of shards."""
    why = "the sizes of the model are unknown"
    ranks = min(world_size, spec.batch.num_micro_batches)
    if is_plain_by_default(spec):
        if ranks == 1 or not is_refused(plain(ranks), refused):
            sharded = _fully_sharded(spec, world_size, Preference.PLAIN, PLAIN)
            return replace(sharded, layout=plain(ranks))
        why = "the whole state does not fit on each worker"
    elif reasons := list(why_not_plain(spec)):
        why += f", and {' and '.join(reasons)}"
    return _fully_sharded(spec, world_size, Preference.UNKNOWN_MODEL, why)


def _fully_sharded(spec: JobSpec, world_size: int, rule: Preference, why: str) -> Plan:
    ranks = min(world_size, spec.batch.num_micro_batches)
    layout = Layout(dp_shard=ranks)
    fed = micro_batches_fed(layout, spec.batch.num_micro_batches)
    reason = f"{partitioned(spec, ranks, fed)}; {rule}: {why}{_idle(ranks, world_size)}"
    shape = shape_of(spec)
    return Plan(layout, reason, host=least_need(spec, layout, num_params_of(spec) if shape is None else shape.params))


def _on_data_axes(table: LayoutTable, world_size: int) -> LayoutTable | None:
    """Plain replicas if they fit, if need be with recomputation; else shards over all ranks. None if neither fits."""
    columns = table.columns
    is_plain, recomputes = columns.level == LEVELS.index(ShardLevel.NONE), columns.recompute > 0
    is_sharded = (columns.dp_shard == world_size) & (columns.ep == 1) & ~is_plain
    in_order = (is_plain & ~recomputes, is_plain, is_sharded & ~recomputes)
    tables = (select_layouts(table, chosen) for chosen in in_order)
    return next((chosen for chosen in tables if chosen.num_fitting), None)


def _with_rivals(table: LayoutTable, best: Prediction, world_size: int, rule: str) -> Plan:
    others = [level for level in table.other_levels(best) if level.step_s <= (1 + _OWN_ERROR) * best.step_s]
    rivals = tuple(_rival(other, best, world_size) for other in others) if best.fits else ()
    return replace(_plan_from(best, world_size, rule), rivals=rivals)


def _rival(rival: Prediction, best: Prediction, world_size: int) -> Plan:
    why = (
        f"{Preference.MEASURED}: predicted steps take {rival.step_s:.3g} s with shard "
        f"{rival.layout.shard} and {best.step_s:.3g} s with shard {best.layout.shard}, too close to "
        "choose without a measurement"
    )
    return replace(_plan_from(rival, world_size, ""), reason=why)


def _plan_from(best: Prediction, world_size: int, rule: str) -> Plan:
    fits = f"{best.memory_bytes / GIB:.2f} GiB a rank"
    if not best.fits:
        fits += ", more than there is"
    parts = [*best.reasons, *([rule] if rule else []), f"predicted {best.step_s:.3g} s a step, {fits}"]
    reason = "; ".join(parts) + _idle(best.layout.world_size, world_size)
    touched = best.memory_bytes - best.bytes[BytesPart.RESERVED] - best.bytes[BytesPart.SNAPSHOTS]
    return Plan(best.layout, reason, touched, best.fits, best.host)


def _idle(used: int, world_size: int) -> str:
    idle = world_size - used
    return f"; {Preference.IDLE_FOR_SPEED}: {idle} of {world_size} ranks idle" if idle else ""
