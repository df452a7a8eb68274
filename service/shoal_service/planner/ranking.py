"""All layouts of some worlds, predicted and in order of preference.

It puts candidates, memory and step time together. Its rules of thumb have names (`Preference`), which appear in the
reasons of a chosen layout; docs/planner.md lists them. `Prediction` and `Ranking` are the answer of `rank` to REST and
`shoal plan`. `planning` and `report` call it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from pydantic import Field

from shoal_service.core.hardware_profile import GIB, DeviceKind, HardwareProfile, LinkClass, Racks
from shoal_service.core.layout_plan import UNKNOWN_NEED, HostNeed
from shoal_service.planner.candidates import LEVELS, Candidates, Floats, Limits, candidates, select_rows
from shoal_service.planner.memory import (
    BytesPart,
    Work,
    count_local_copies,
    gpu_host_bytes,
    host_need,
    memory,
    shard_params,
)
from shoal_service.planner.network import Spans, network
from shoal_service.planner.parameter_state import estimate_state
from shoal_service.planner.shape import ModelShape
from shoal_service.planner.stack import SHOAL, Stack
from shoal_service.planner.step_time import SecondsPart, step_time
from shoal_workers.contract import Frozen, JobSpec, Precision, plan_of
from shoal_workers.contract.checks.legality import LegalDegrees, is_plain_by_default, legal_degrees
from shoal_workers.contract.layout import AXES, PLANNED_AXES, Layout, ParallelismSpec, Recompute, ShardLevel

_EQUAL = 0.03
"""Among layouts whose predicted steps differ by less, the simpler one is taken."""
_MEMORY_ERROR = 0.1
"""Median error of predicted memory (bench/published_runs.py)."""


class Prediction(Frozen):
    """One layout of one job on one kind of hardware."""

    layout: Layout
    name: str
    """The layout in short form."""
    micro_batches_per_rank: int
    """Micro-batches that each rank runs in a step, padding included."""
    step_s: float
    """Seconds of one optimizer step."""
    seconds: dict[SecondsPart, float]
    """Their parts; they add up to step_s."""
    hidden: dict[SecondsPart, float] = Field(default_factory=dict)
    """By axis: share of its communication that runs beside computation and is not part of `seconds`."""
    memory_bytes: int
    """Peak of the rank that needs the most."""
    bytes: dict[BytesPart, int]
    """Their parts; they add up to memory_bytes, apart from rounding."""
    fits: bool
    """memory_bytes is within the usable memory."""
    host: HostNeed = UNKNOWN_NEED
    """Host memory of a worker."""
    tokens_per_s: float
    """Tokens per second of the whole job."""
    mfu: float
    """Model FLOPs utilisation: FLOP/s of the model, without recomputation, over the peak of all ranks."""
    links: dict[str, LinkClass] = Field(default_factory=dict)
    """By axis of more than one rank: the slowest class of links that its groups cross."""
    reasons: tuple[str, ...] = ()
    """`rule: sentence`."""

    @property
    def bubble(self) -> float:
        """Share of the step during which the slowest pipeline rank waits."""
        return self.seconds[SecondsPart.BUBBLE] / self.step_s


class StepCorrection(Frozen):
    """What measured steps on the same hardware make of predicted ones."""

    factor: float
    """Measured over predicted; the predictions contain it."""
    error: float
    """Relative error bar of a step time: 80 % of runs are expected within it."""
    num_jobs: int
    """Jobs that were measured; 0: the error bar is that of published runs."""


class Ranking(Frozen):
    """The best layouts of a world, best first."""

    world_size: int
    profile: str
    usable_bytes: int
    """Bytes of one rank that a layout may use."""
    num_params: int = 0
    """Parameters of the model; 0: unknown."""
    num_active_params: int = 0
    """Parameters that one token uses."""
    num_trained_params: int = 0
    """Parameters that are trained: adapters, and all that is not frozen."""
    state_bytes: float = 0.0
    """Bytes of optimizer state of a trained parameter, on average."""
    num_layouts: int = 0
    """Legal layouts."""
    num_fitting: int = 0
    """Legal layouts that fit into memory."""
    predictions: tuple[Prediction, ...] = ()
    """For each combination of degrees, the best choice of schedule, shard level and so on."""
    note: str = ""
    """Why there is no prediction, or what would fit if no layout does."""
    correction: StepCorrection | None = None
    """None if nothing is predicted."""
    why_not: tuple[str, ...] = ()
    """For each axis that the best layout does not use: what the best layout with it costs."""
    hints: tuple[str, ...] = ()
    """Settings with which steps would be shorter."""
    compared: Prediction | None = None
    """The best layout with the degrees that `compare` names."""
    compared_refused: tuple[str, ...] = ()
    """Why the engine refuses `compared`; (): it does not."""


@dataclass(frozen=True)
class Task:
    """What is planned: a job on one kind of hardware."""

    spec: JobSpec
    shape: ModelShape
    profile: HardwareProfile
    fixed: ParallelismSpec | None = None
    racks: Racks = ()
    """Where the workers are; (): not known, nodes of the profile's size in one rack."""
    tp_may_cross: bool = False
    """tp groups may be on several nodes. Fixed degrees are used wherever the workers are."""
    refused: tuple[Layout, ...] = ()
    """Layouts that a proof has refused."""
    stack: Stack = SHOAL
    is_hypothetical: bool = False
    """Layouts that other programs have and the engine refuses are planned, too: tp above the number of key and value
    heads, ep over ranks of tp and cp."""

    @property
    def work(self) -> Work:
        batch = self.spec.batch
        size = 4 if self.spec.precision is Precision.FP32 else 2
        in_place = count_local_copies(self.spec) if self.profile.kind is DeviceKind.CPU else 0
        param_state = estimate_state(self.spec, self.shape)
        stack = self.stack if self.spec.fp8 is None else replace(self.stack, fp8=True)
        reduction = self.spec.reduce_precision
        return Work(batch.micro_size, batch.num_micro_batches, size, in_place, param_state, stack, reduction)

    @property
    def may_be_plain(self) -> bool:
        """Every worker may have the whole state: it is asked for, or it is the default and no worker has measured that
        it does not fit."""
        if self.fixed is not None:
            return self.fixed.shard is ShardLevel.NONE
        is_refused = any(layout.shard is ShardLevel.NONE for layout in self.refused)
        return self.profile.kind is DeviceKind.CPU and is_plain_by_default(self.spec) and not is_refused

    def limits(self) -> Limits:
        degrees = self._degrees()
        nodes = tuple(size for rack in self.racks for size in rack)
        num_micro_batches, max_tp = self.spec.batch.num_micro_batches, self.profile.ranks_per_node
        return Limits(
            degrees,
            num_micro_batches,
            max_tp,
            self.fixed,
            nodes,
            self.tp_may_cross,
            may_be_plain=self.may_be_plain,
            refused=tuple(layout.features for layout in self.refused),
            folds_experts=self.is_hypothetical,
        )

    def _degrees(self) -> LegalDegrees:
        plan = plan_of(self.spec)
        if plan is None or not self.is_hypothetical:
            return legal_degrees(self.spec, plan)
        degrees = legal_degrees(self.spec, plan.model_copy(update={"num_kv_heads": plan.num_heads}))
        heads = max(1, plan.num_kv_heads)
        return replace(degrees, tp=tuple(tp for tp in degrees.tp if max(tp, heads) % min(tp, heads) == 0))


@dataclass(frozen=True)
class LayoutTable:
    """All layouts of some worlds and the predictions for them."""

    task: Task
    columns: Candidates
    step_s: Floats
    memory_bytes: Floats
    shard_params: Floats
    """Parameters of the rank that holds the most."""
    fits: np.ndarray
    """A mask: within what a worker may use. The host memory of workers with a GPU is limited by `worker.memory_gib`, if
    that is set."""
    has_host_memory: np.ndarray
    """A mask: `worker.memory_gib` has room for what workers with a GPU need in the host's memory."""
    order: np.ndarray
    """Row numbers, best first."""
    spans: Spans
    seconds: dict[SecondsPart, Floats]
    hidden: dict[SecondsPart, Floats]
    """Seconds of communication beside computation."""
    bytes: dict[BytesPart, Floats]

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def num_fitting(self) -> int:
        return int(np.sum(self.fits))

    @property
    def may_fit(self) -> np.ndarray:
        """A mask: layouts that fit if the prediction for a GPU is as far off as it often is."""
        profile = self.task.profile
        usable = (1 + _MEMORY_ERROR * (profile.kind is DeviceKind.GPU)) * profile.usable_bytes
        within: np.ndarray = self.fits | (self.has_host_memory & (self.memory_bytes <= usable))
        return within

    def fastest(self, chosen: np.ndarray) -> Prediction | None:
        """The fastest of the chosen layouts that fit; None if none does. `chosen`: a mask."""
        rows = np.flatnonzero(chosen & self.fits)
        return self._prediction(int(rows[np.argmin(self.step_s[rows])])) if len(rows) else None

    def best(self, count: int) -> tuple[Prediction, ...]:
        """The best layout of each combination of degrees, at most `count`. dp_replicate and dp_shard count as one, so
        that the list does not begin with several of nearly equal steps."""
        columns, chosen, seen = self.columns, [], set()
        for row in self.order:
            degrees = tuple(int(getattr(columns, axis)[row]) for axis in PLANNED_AXES)
            if degrees not in seen:
                seen.add(degrees)
                chosen.append(self._prediction(int(row)))
            if len(chosen) == count:
                break
        return tuple(chosen)

    def other_levels(self, best: Prediction) -> tuple[Prediction, ...]:
        """Layouts that fit and differ from `best` in the shard level only, fastest first."""
        others = {best.layout.model_copy(update={"shard": level}) for level in LEVELS} - {best.layout}
        degrees = [getattr(self.columns, axis) == getattr(best.layout, axis) for axis in AXES]
        rows = np.flatnonzero(np.logical_and.reduce([*degrees, self.fits]))
        predictions = [self._prediction(int(row)) for row in rows if self.columns.layout(int(row)) in others]
        return tuple(sorted(predictions, key=lambda prediction: prediction.step_s))

    def least_memory(self) -> Prediction:
        """The layout that needs the least memory, at any speed."""
        return self._prediction(int(np.lexsort((self.step_s, self.memory_bytes))[0]))

    def host(self, row: int) -> HostNeed:
        """Host memory of a worker."""
        params = float(self.shard_params[row])
        if self.task.profile.kind is DeviceKind.GPU:
            training = params * self.task.work.param_state.offloaded_bytes(self.task.shape) * self.columns.offload
        else:
            elsewhere = self.bytes[BytesPart.RESERVED] + self.bytes[BytesPart.SNAPSHOTS]
            training = float((self.memory_bytes - elsewhere)[row])
        return host_need(self.task.spec, params, training, self.task.shape)

    def _prediction(self, row: int) -> Prediction:
        task, layout = self.task, self.columns.layout(row)
        step_s, num_bytes = float(self.step_s[row]), round(float(self.memory_bytes[row]))
        seconds = {part: float(values[row]) for part, values in self.seconds.items()}
        communication = {part: (float(values[row]), seconds[part]) for part, values in self.hidden.items()}
        hidden = {part: beside / (beside + rest) for part, (beside, rest) in communication.items() if beside}
        parts = {part: round(float(values[row])) for part, values in self.bytes.items()}
        tokens = task.spec.batch.global_size * task.shape.seq_len
        peak = (
            task.profile.peak_flops[task.spec.precision] * layout.world_size / task.profile.sharing(layout.world_size)
        )
        fed, links = int(self.columns.fed[row]), self.spans.classes(row)
        return Prediction(
            layout=layout,
            name=layout.describe(),
            micro_batches_per_rank=fed,
            step_s=step_s,
            seconds=seconds,
            hidden=hidden,
            memory_bytes=num_bytes,
            bytes=parts,
            fits=bool(self.fits[row]),
            host=self.host(row),
            tokens_per_s=tokens / step_s,
            mfu=task.shape.flops_per_token * tokens / step_s / peak,
            links=links,
            reasons=reasons(layout, links, seconds, hidden, parts, partitioned(task.spec, layout.num_data_ranks, fed)),
        )


def predict_layouts(task: Task, worlds: Sequence[int], *, offload: bool = False) -> LayoutTable:
    """Predict every legal layout of every world in `worlds`."""
    columns = candidates(task.shape, task.limits(), worlds, offload=offload)
    return predict_columns(task, columns)


def select_layouts(table: LayoutTable, chosen: np.ndarray) -> LayoutTable:
    """The chosen rows. `chosen`: a mask."""
    return predict_columns(table.task, select_rows(table.columns, chosen))


def partitioned(spec: JobSpec, num_data_ranks: int, fed: int) -> str:
    """How the batch is partitioned, in words."""
    micro_batches = spec.batch.num_micro_batches
    padding = fed * num_data_ranks - micro_batches
    text = f"{micro_batches} micro-batches over {num_data_ranks} ranks: {fed} each"
    return text + (f", {padding} of them zero-weight padding" if padding else "")


def predict_columns(task: Task, columns: Candidates) -> LayoutTable:
    """Predict these layouts."""
    num_bytes, byte_parts = memory(task.shape, task.work, task.profile, columns)
    links = network(columns, task.profile, task.racks, task.stack.locality)
    step_s, seconds, hidden = step_time(task.shape, task.work, task.spec.precision, links, columns)
    params, host_gib = shard_params(task.shape, columns), task.spec.worker.memory_gib
    has_host_memory = np.ones(len(columns), dtype=bool)
    if task.profile.kind is DeviceKind.GPU and host_gib:
        has_host_memory = gpu_host_bytes(task.spec, task.shape, params, offload=columns.offload) <= host_gib * GIB
    fits = has_host_memory & (num_bytes <= task.profile.usable_bytes)
    order = _order(columns, step_s, num_bytes, fits)
    return LayoutTable(
        task, columns, step_s, num_bytes, params, fits, has_host_memory, order, links.spans, seconds, hidden, byte_parts
    )


def _order(columns: Candidates, step_s: Floats, num_bytes: Floats, fits: np.ndarray) -> np.ndarray:
    """FITS_FIRST, FASTEST, SIMPLEST_OF_EQUALS; then the degrees, so that equal input always gives the same order."""
    if not len(columns):
        return np.zeros(0, np.int64)
    axes = sum((getattr(columns, axis) > 1).astype(np.int64) for axis in AXES if axis != "dp_shard")
    model_axes = [axis for axis in reversed(AXES) if not axis.startswith("dp_")]
    fastest_s = np.min(step_s, where=fits, initial=np.inf)
    coarse = np.floor(np.log(step_s / (fastest_s if fits.any() else np.min(step_s))) / np.log1p(_EQUAL))
    most_urgent_last = (
        columns.schedule,
        columns.recompute,
        columns.context,
        *(getattr(columns, axis) for axis in model_axes),
        step_s,
        num_bytes,
        columns.level,
        axes,
        np.where(fits, coarse, num_bytes),
        ~fits,
    )
    return np.lexsort(most_urgent_last)


class Preference(StrEnum):
    TP_INSIDE_NODE = "tp_inside_node"
    """tp communicates in every layer, so it goes over the network only if nothing else fits into memory."""
    DATA_AXES_ON_CPU = "data_axes_on_cpu"
    """Workers without a GPU stay on the data axes while each has a micro-batch, because their links are slow."""
    FITS_FIRST = "fits_first"
    """Layouts that fit into memory come before those that do not."""
    FASTEST = "fastest"
    SIMPLEST_OF_EQUALS = "simplest_of_equals"
    """Among layouts whose steps differ by at most 3 %: fewer axes, then less memory."""
    PLAIN = "plain"
    """The whole state fits on each worker, so each trains the task's own module."""
    LEAST_SHARDED = "least_sharded"
    """The shard level with the least communication, among those that fit."""
    MEASURED = "measured"
    """Shard levels whose predicted steps differ by less than the prediction's own error: the fastest in the job's own
    steps."""
    RECOMPUTE_FOR_MEMORY = "recompute_for_memory"
    OFFLOAD_AS_LAST_RESORT = "offload_as_last_resort"
    IDLE_FOR_SPEED = "idle_for_speed"
    """Ranks stay idle only if that is 5 % faster, or the only legal layout."""
    AS_REQUESTED = "as_requested"
    """The degrees that the spec fixes."""
    UNKNOWN_MODEL = "unknown_model"
    """A user task of unknown sizes is fully sharded."""
    OF_SCRIPT = "of_script"
    """A script gets all workers, each as a rank of its own."""
    DETERMINISTIC = "deterministic"
    """A deterministic job is fully sharded: the fixed order of sums supports only that."""


def reasons(
    layout: Layout,
    links: dict[str, LinkClass],
    seconds: dict[SecondsPart, float],
    hidden: dict[SecondsPart, float],
    num_bytes: dict[BytesPart, int],
    batch_partition: str,
) -> tuple[str, ...]:
    """The reasons for a layout: which links its axes use, and what they cost."""
    step_s = sum(seconds.values())

    def share(part: SecondsPart) -> str:
        beside = f", after {100 * hidden[part]:.0f} % of its communication is hidden" if part in hidden else ""
        return f"{100 * seconds[part] / step_s:.1f} % of the step{beside}"

    reasons_found = []
    for axis in (axis for axis in links if axis in layout.planned_axes):  # the busiest first
        degree, axis_text = getattr(layout, axis), links[axis].words
        rule = f"{Preference.TP_INSIDE_NODE}: " if axis == "tp" and links[axis] is LinkClass.INSIDE_NODE else ""
        if axis == "pp":
            how = f" ({layout.schedule}, {len(layout.stages)} stages)"
            reasons_found.append(
                f"pp {degree}{how} {axis_text}: bubble {share(SecondsPart.BUBBLE)}, messages {share(SecondsPart.PP)}"
            )
        else:
            how = f" ({layout.context})" if axis == "cp" else ""
            reasons_found.append(f"{rule}{axis} {degree}{how} {axis_text}, {share(SecondsPart(axis))}")
    if layout.shard is ShardLevel.NONE:
        reasons_found.append(f"{Preference.PLAIN}: {PLAIN}, {share(SecondsPart.DP)}")
    if layout.num_shards > 1 and layout.pp == 1:
        where = f" {links['dp_shard'].words}" if "dp_shard" in links else ""
        reasons_found.append(f"{Preference.LEAST_SHARDED}: {_LEVELS[layout.shard]}{where}, {share(SecondsPart.DP)}")
    if layout.recompute is not Recompute.NONE:
        reasons_found.append(
            f"{Preference.RECOMPUTE_FOR_MEMORY}: {layout.recompute}, activations "
            f"{num_bytes[BytesPart.ACTIVATIONS] / GIB:.1f} GiB, {share(SecondsPart.RECOMPUTE)}"
        )
    if layout.offload:
        reasons_found.append(f"{Preference.OFFLOAD_AS_LAST_RESORT}: optimizer state in host memory")
    return (batch_partition, *reasons_found)


PLAIN = "every worker has the whole state and trains the task's own module"
_LEVELS = {
    ShardLevel.OPTIMIZER: "ZeRO-1 is enough",
    ShardLevel.GRADIENTS: "ZeRO-2, whole gradients would not fit or cost more",
    ShardLevel.FULL: "ZeRO-3, whole parameters would not fit",
}


def prefers_data_axes(profile: HardwareProfile, world_size: int, num_micro_batches: int) -> bool:
    """Return whether DATA_AXES_ON_CPU applies."""
    return profile.kind is DeviceKind.CPU and world_size <= num_micro_batches
