"""All layouts of some worlds, predicted and in order of preference. `planning`, `report` and `capacity` call it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal_service.core.attempt.plan_layout import HostNeed
from shoal_service.core.hardware_profile import GIB, DeviceKind, HardwareProfile, Racks
from shoal_service.planner.candidates import LEVELS, Candidates, Limits, candidates, select_rows
from shoal_service.planner.collectives import Floats
from shoal_service.planner.host_memory import OFFLOADED_BYTES, gpu_host_bytes, host_need, own_copies
from shoal_service.planner.links import Spans, network
from shoal_service.planner.memory import BytesPart, Work, memory, shard_params
from shoal_service.planner.prediction import Prediction
from shoal_service.planner.preferences import reasons
from shoal_service.planner.shape import ModelShape
from shoal_service.planner.step_time import SecondsPart, step_time
from shoal_workers.contract.checks.legality import legal_degrees
from shoal_workers.contract.layout import AXES, Layout
from shoal_workers.contract.proofs import kind_of
from shoal_workers.contract.spec import JobSpec, ParallelismSpec, Precision, plan_of

_EQUAL = 0.01
"""Relative error of predictions. Among layouts that differ by less, the simpler one is taken."""


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

    @property
    def work(self) -> Work:
        batch = self.spec.batch
        size = 4 if self.spec.precision is Precision.FP32 else 2
        in_place = own_copies(self.spec) if self.profile.kind is DeviceKind.CPU else 0
        return Work(batch.micro_size, batch.num_micro_batches, size, in_place)

    def limits(self) -> Limits:
        degrees = legal_degrees(self.spec, plan_of(self.spec))
        nodes = tuple(size for rack in self.racks for size in rack)
        num_micro_batches, max_tp = self.spec.batch.num_micro_batches, self.profile.ranks_per_node
        kinds = tuple(kind_of(layout) for layout in self.refused)
        return Limits(degrees, num_micro_batches, max_tp, self.fixed, nodes, self.tp_may_cross, kinds)


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
    order: np.ndarray
    """Row numbers, best first."""
    spans: Spans
    seconds: dict[SecondsPart, Floats]
    bytes: dict[BytesPart, Floats]

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def num_fitting(self) -> int:
        return int(np.sum(self.fits))

    def best(self, count: int) -> tuple[Prediction, ...]:
        """The best layout of each combination of degrees, at most `count`."""
        columns, found, seen = self.columns, [], set()
        for row in self.order:
            degrees = tuple(int(getattr(columns, axis)[row]) for axis in AXES)
            if degrees not in seen:
                seen.add(degrees)
                found.append(self._prediction(int(row)))
            if len(found) == count:
                break
        return tuple(found)

    def other_levels(self, best: Prediction) -> tuple[Prediction, ...]:
        """Layouts that fit and differ from `best` in the shard level only, fastest first."""
        others = {best.layout.model_copy(update={"shard": level}) for level in LEVELS} - {best.layout}
        degrees = [getattr(self.columns, axis) == getattr(best.layout, axis) for axis in AXES]
        rows = np.flatnonzero(np.logical_and.reduce([*degrees, self.fits]))
        found = [self._prediction(int(row)) for row in rows if self.columns.layout(int(row)) in others]
        return tuple(sorted(found, key=lambda one: one.step_s))

    def least_memory(self) -> Prediction:
        """The layout that needs the least memory, at any speed."""
        return self._prediction(int(np.lexsort((self.step_s, self.memory_bytes))[0]))

    def host(self, row: int) -> HostNeed:
        """Host memory of a worker."""
        params = float(self.shard_params[row])
        if self.task.profile.kind is DeviceKind.GPU:
            training = params * OFFLOADED_BYTES * self.columns.offload
        else:
            elsewhere = self.bytes[BytesPart.RESERVED] + self.bytes[BytesPart.SNAPSHOTS]
            training = float((self.memory_bytes - elsewhere)[row])
        return host_need(self.task.spec, params, training)

    def _prediction(self, row: int) -> Prediction:
        task, layout = self.task, self.columns.layout(row)
        step_s, num_bytes = float(self.step_s[row]), round(float(self.memory_bytes[row]))
        seconds = {part: float(values[row]) for part, values in self.seconds.items()}
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
            memory_bytes=num_bytes,
            bytes=parts,
            fits=bool(self.fits[row]),
            host=self.host(row),
            tokens_per_s=tokens / step_s,
            mfu=task.shape.flops_per_token * tokens / step_s / peak,
            links=links,
            reasons=reasons(layout, links, seconds, parts, partitioned(task.spec, layout.num_data_ranks, fed)),
        )


def predict_layouts(task: Task, worlds: Sequence[int], *, offload: bool = False) -> LayoutTable:
    """Predict every legal layout of every world in `worlds`."""
    columns = candidates(task.shape, task.limits(), worlds, offload=offload)
    return _predicted(task, columns)


def select_layouts(table: LayoutTable, chosen: np.ndarray) -> LayoutTable:
    """The chosen rows. `chosen`: a mask."""
    return _predicted(table.task, select_rows(table.columns, chosen))


def partitioned(spec: JobSpec, num_data_ranks: int, fed: int) -> str:
    """How the batch is partitioned, in words."""
    micro_batches = spec.batch.num_micro_batches
    padding = fed * num_data_ranks - micro_batches
    text = f"{micro_batches} micro-batches over {num_data_ranks} ranks: {fed} each"
    return text + (f", {padding} of them zero-weight padding" if padding else "")


def _predicted(task: Task, columns: Candidates) -> LayoutTable:
    num_bytes, byte_parts = memory(task.shape, task.work, task.profile, columns)
    links = network(columns, task.profile, task.racks)
    step_s, seconds = step_time(task.shape, task.work, task.spec.precision, links, columns)
    fits, params = num_bytes <= task.profile.usable_bytes, shard_params(task.shape, columns)
    host_gib = task.spec.worker.memory_gib
    if task.profile.kind is DeviceKind.GPU and host_gib:
        fits &= gpu_host_bytes(task.spec, params, offload=columns.offload) <= host_gib * GIB
    order = _order(columns, step_s, num_bytes, fits)
    return LayoutTable(task, columns, step_s, num_bytes, params, fits, order, links.spans, seconds, byte_parts)


def _order(columns: Candidates, step_s: Floats, num_bytes: Floats, fits: np.ndarray) -> np.ndarray:
    """FITS_FIRST, FASTEST, SIMPLEST_OF_EQUALS; then the degrees, so that equal input always gives the same order."""
    if not len(columns):
        return np.zeros(0, np.int64)
    axes = sum((getattr(columns, axis) > 1).astype(np.int64) for axis in AXES if axis != "dp_shard")
    model_axes = [axis for axis in reversed(AXES) if not axis.startswith("dp_")]
    coarse = np.floor(np.log(step_s) / np.log1p(_EQUAL))
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
