"""MarketBuilder: rows of the store, nodes of the cluster and measurements as the MarketState of a policy.

A job keeps its value as long as its row does not change, so a pass in which little happened costs little. It hides how
a throughput curve comes about: the planner predicts it (`CurveBook`), and what running jobs show of their speed and of
the cost of a start and a change corrects it (`Measurements`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shoal_service.control.planning import measured_profile
from shoal_service.core import nodes as node_rules
from shoal_service.core.desired import Desired
from shoal_service.core.goodput import Category
from shoal_service.core.nodes import Node
from shoal_service.core.scheduling.market import (
    START_S,
    SWITCH_S,
    ClusterState,
    MarketJob,
    MarketNode,
    MarketState,
    Project,
    ThroughputCurve,
    User,
    WorkerNeed,
)
from shoal_service.planner import HardwareProfile, rank
from shoal_service.store.driving import DriveRow
from shoal_service.views import JobStatus
from shoal_workers.contract import ANY_CLUSTER, MARKET_TYPE_LABEL, SPOT, JobSpec, JobState
from shoal_workers.recently_used import RecentlyUsed

_PREDICTIONS_PER_PASS = 8
_NOTHING = WorkerNeed()
_NOWHERE: frozenset[str] = frozenset()
_SETTLED_STEPS = 3
"""Number of first steps of a group that are not measured, because they are slower than those that follow."""
_NEWEST = 0.5
"""Weight of the newest measurement."""
_SERVED = (
    Category.PRODUCTIVE,
    Category.RECOMPUTED,
    Category.CHECKPOINT_STALL,
    Category.RECOVERING,
    Category.RESIZING,
)
_DECIDES = {"task", "script", "model", "data", "batch", "precision", "parallelism", "plan", "worker", "deterministic"}
"""The keys of a spec that a prediction depends on, besides the world sizes."""
_FEW = 8
"""Largest world size up to which each size is predicted."""
_REMEMBERED = 4096
_LEAST_GAIN = 1.01
_DOUBLING = 0.95
"""Speed-up of a doubling of the workers, relative to the ideal one, that is assumed of a task of unknown sizes."""


@dataclass(frozen=True, slots=True)
class ClusterConstraints:
    """What a market needs to know about clusters beside their nodes."""

    own: str = ""
    """Name of the cluster of attempts that name none."""
    clusters: Mapping[str, ClusterState] = field(default_factory=dict)
    """The clusters that have joined, by name."""
    held: frozenset[str] = frozenset()
    """Ids of the jobs with an attempt about which nothing is decided: their cluster does not answer, or they move."""
    excluded: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Clusters in which a queued job may not start, by job id, because its checkpoints are not known to be reachable
    there."""


SINGLE = ClusterConstraints()


class MarketBuilder:
    """Builds the market. The control loop makes it, and calls it once per pass. It blocks for some predictions, so it
    is not for an event loop."""

    def __init__(self, profiles: tuple[HardwareProfile, ...] = ()) -> None:
        self._measurements = Measurements()
        self._curves = CurveBook(profiles)
        self._known: dict[str, tuple[DriveRow, MarketJob, bool]] = {}
        """For each job its row, the market job made of it, and whether its curve is predicted, by job id."""
        self._may_predict = 0
        self.num_new = 0
        """Number of jobs that the last `build` saw for the first time."""

    def build(
        self,
        rows: Sequence[DriveRow],
        nodes: Sequence[Node],
        foreign: Mapping[str, WorkerNeed],
        workers: Mapping[str, Mapping[str, int]],
        projects: Mapping[str, Project],
        users: Mapping[str, User],
        now: float,
        where: ClusterConstraints = SINGLE,
    ) -> MarketState:
        """
        Args:
            foreign: what others have reserved, by node id.
            workers: those that each job really has, by job and node.
        """
        self._may_predict = _PREDICTIONS_PER_PASS
        self._measurements.forget_all_but({row.id for row in rows})
        self.num_new = 0
        self._known = {row.id: self._build_job(row, now) for row in rows}
        jobs = [
            _place(_with_workers(job, workers.get(job.job_id, {})), where)
            for row, job, _ in self._known.values()
            if not is_preempted(row)  # its workers are promised to another job
        ]
        capacity = market_nodes(nodes, [row.id for row in rows], foreign)
        return MarketState(jobs=jobs, nodes=capacity, projects=projects, users=users, clusters=where.clusters)

    def _build_job(self, row: DriveRow, now: float) -> tuple[DriveRow, MarketJob, bool]:
        known = self._known.get(row.id)
        if known is not None and known[0] is row and (known[2] or not self._may_predict):
            return known
        self.num_new += known is None
        measured = self._measurements.observe(row, now)
        curve, is_predicted = self._choose_curve(row, measured)
        return row, self._make_market_job(row, measured, curve), is_predicted

    def _choose_curve(self, row: DriveRow, measured: JobMeasured) -> tuple[ThroughputCurve, bool]:
        predicted = self._curves.predicted(row.spec, may_compute=False)
        if predicted is None and self._may_predict:
            self._may_predict -= 1
            predicted = self._curves.predicted(row.spec, may_compute=True)
        rates = measured.rates
        return corrected(predicted or _predict_unplanned(row.spec), rates), predicted is not None

    def _make_market_job(self, row: DriveRow, measured: JobMeasured, curve: ThroughputCurve) -> MarketJob:
        left, done = _measure_work(row, measured)
        return replace(
            requested(row),
            curve=curve,
            is_measured=bool(measured.rates),
            left=left,
            done=done,
            served_s=served_s(row.status),
            moved_at=measured.moved_at,
            switch_s=self._measurements.switch_s(measured),
            start_s=self._measurements.start_s(measured),
        )


def _measure_work(row: DriveRow, measured: JobMeasured) -> tuple[float | None, float]:
    """Return the samples that are left, None if that is not known, and the samples that are done.

    Those of a script are in the unit in which its speed was measured.
    """
    status, stop = row.status, row.spec.stop
    if stop is None:
        done = float(status.tokens or 0)
        if status.total_steps is None or not done or not status.step or not measured.rates:
            return None, done
        return max(0, status.total_steps - status.step) * done / status.step, done
    samples = row.spec.batch.global_size
    total_steps = status.total_steps if status.total_steps is not None else stop.steps
    left = None if total_steps is None else float(max(0, total_steps - status.step) * samples)
    return left, float(status.step * samples)


def requested(row: DriveRow) -> MarketJob:
    """What the job asks for and was given, without its progress and its speed."""
    spec = row.spec
    return MarketJob(
        job_id=row.id,
        submitted_at=row.created_at,
        min_workers=spec.elasticity.min_workers,
        max_workers=spec.elasticity.max_workers,
        need=WorkerNeed(cpus=spec.worker.cpus, gpus=spec.worker.gpus, memory_gib=spec.worker.memory_gib),
        project=spec.project,
        user=spec.user,
        sweep=spec.sweep.name if spec.sweep is not None else "",
        sweep_limit=spec.sweep.limit if spec.sweep is not None else None,
        priority=row.priority,
        finish_by=spec.finish_by,
        capacity=spec.capacity,
        selector=spec.worker.node_labels,
        placement=spec.placement,
        granted=row.granted_workers if row.state is not JobState.QUEUED else 0,
        cluster=named_cluster(spec) if row.state is JobState.QUEUED else row.cluster,
        is_leaving=row.desired is not Desired.RUN,
    )


def named_cluster(spec: JobSpec) -> str:
    """The only cluster in which the job may run; empty if it may run in any."""
    return "" if spec.worker.cluster == ANY_CLUSTER else spec.worker.cluster


def fingerprint(state: MarketState) -> object:
    """Everything in a state except the progress of its jobs, to compare it with another state. Jobs that have not
    changed give the same object again, which is compared by its identity."""
    jobs = [job.fingerprint for job in state.jobs]
    return jobs, tuple(state.nodes), dict(state.projects), dict(state.users), dict(state.clusters)


def is_preempted(row: DriveRow) -> bool:
    """Return whether the attempt has to save and end, since its workers were given to another job."""
    return row.state is not JobState.QUEUED and row.granted_workers == 0


def market_nodes(
    nodes: Sequence[Node], job_ids: Sequence[str], foreign: Mapping[str, WorkerNeed]
) -> tuple[MarketNode, ...]:
    """The nodes that jobs may use. A drained node is not among them, because its workers are leaving it."""
    usable = [(node, foreign.get(node.node_id, _NOTHING)) for node in node_rules.usable(nodes, job_ids)]
    return tuple(
        MarketNode(
            node_id=node.node_id,
            cluster=node.cluster,
            cpus=max(0.0, node.cpus - others.cpus),
            gpus=max(0.0, node.gpus - others.gpus),
            memory_gib=max(0.0, node.memory_gib - others.memory_gib),
            labels=node.labels,
            is_spot=node.labels.get(MARKET_TYPE_LABEL) == SPOT,
            is_cordoned=node.cordon is not None,
        )
        for node, others in usable
    )


def _with_workers(job: MarketJob, on_nodes: Mapping[str, int]) -> MarketJob:
    return job if on_nodes == job.on_nodes else replace(job, held=sum(on_nodes.values()), on_nodes=on_nodes)


def _place(job: MarketJob, where: ClusterConstraints) -> MarketJob:
    """The job with its cluster, and whether it is leaving; or, if it is queued, with the clusters in which it may not
    start. A job whose values stay as they are is returned as the same object."""
    if not job.granted:
        excluded = where.excluded.get(job.job_id, _NOWHERE)
        return job if excluded == job.excluded_clusters else replace(job, excluded_clusters=excluded)
    cluster, is_leaving = job.cluster or where.own, job.is_leaving or job.job_id in where.held
    if (cluster, is_leaving) == (job.cluster, job.is_leaving):
        return job
    return replace(job, cluster=cluster, is_leaving=is_leaving)


@dataclass(slots=True)
class JobMeasured:
    """What was measured of one job."""

    rates: dict[int, float] = field(default_factory=dict)
    """Samples per second, by the number of workers. A script counts them in its own unit, if it reports them."""
    switch_s: float | None = None
    start_s: float | None = None
    moved_at: float | None = None
    """When the last change of the job's grant was seen; None if none was."""
    granted: int | None = None
    group: tuple[int, int] = (0, 0)
    """Attempt and generation that are measured at present."""
    group_step: int = 0
    """Step of that generation when it was seen first."""
    resizing_s: float = 0.0
    """Seconds spent on changes of size until the last one was measured."""
    starting_s: float = 0.0
    """Seconds spent on starts until the last one was measured."""


class Measurements:
    """What the running jobs show of their speed, and of what a start and a change of size cost them.

    The rows of every pass are given to it, which hold what the supervisors have reported last. It is kept in memory
    only: a new control plane starts with the predictions, and has measured again after some steps of each job.
    """

    def __init__(self) -> None:
        self._jobs: dict[str, JobMeasured] = {}
        self._switch_s = SWITCH_S
        self._start_s = START_S

    def observe(self, row: DriveRow, now: float) -> JobMeasured:
        """Take a new row, and return what is known of the job by now. Call it with every new row."""
        job = self._jobs.setdefault(row.id, JobMeasured())
        if job.granted != row.granted_workers:
            if job.granted is not None:
                job.moved_at = now
            job.granted = row.granted_workers
        if row.status.state is JobState.RUNNING and row.status.workers:
            self._observe_group(job, row)
        return job

    def switch_s(self, job: JobMeasured) -> float:
        """Seconds without training at a change of the job's size; those of other jobs if its size has not changed."""
        return job.switch_s if job.switch_s is not None else self._switch_s

    def start_s(self, job: JobMeasured) -> float:
        """Seconds from the grant of a job to its first step."""
        return job.start_s if job.start_s is not None else self._start_s

    def forget_all_but(self, job_ids: Collection[str]) -> None:
        self._jobs = {job_id: job for job_id, job in self._jobs.items() if job_id in job_ids}

    def _observe_group(self, job: JobMeasured, row: DriveRow) -> None:
        status, group = row.status, (row.attempt, row.status.generation)
        if group != job.group:
            self._observe_pause(job, row)
            job.group, job.group_step = group, status.step
        rate = _measure_rate(row)
        if rate is not None and status.step - job.group_step >= _SETTLED_STEPS:
            job.rates[status.workers] = rate

    def _observe_pause(self, job: JobMeasured, row: DriveRow) -> None:
        """Note what the start of a new group, or the change of size before it, has cost."""
        booked = row.status.goodput
        if booked is None:
            return
        asked = max(1, row.spec.elasticity.max_workers)  # all categories are booked for this many workers
        resizing_s = booked.seconds.get(Category.RESIZING, 0.0) / asked
        starting_s = booked.seconds.get(Category.STARTING, 0.0) / asked
        if job.group == (0, 0) and row.status.step > 0 and row.status.generation > 1:
            pass  # it trained before this control plane saw it: the sums are those of several changes
        elif row.attempt != job.group[0]:
            if (took_s := starting_s - job.starting_s) > 0:
                job.start_s = _average(job.start_s, took_s)
                self._start_s = _average(self._start_s, took_s)
        elif (took_s := resizing_s - job.resizing_s) > 0:
            job.switch_s = _average(job.switch_s, took_s)
            self._switch_s = _average(self._switch_s, took_s)
        job.resizing_s, job.starting_s = resizing_s, starting_s


def _measure_rate(row: DriveRow) -> float | None:
    """Return samples per second; None if nothing was measured yet, or a script does not report them.

    The steps of a script or a loop say nothing about its speed: with more workers a step may have more samples.
    """
    if row.spec.program is not None:
        return row.status.tokens_per_s or None
    step_s = seconds_per_step(row.status)
    return None if step_s is None else row.spec.batch.global_size / step_s


def seconds_per_step(status: JobStatus) -> float | None:
    """Seconds of a step: the supervisor's moving average; None if nothing was measured yet."""
    left = (status.total_steps or 0) - status.step
    if status.eta_s is not None and left > 0:
        return status.eta_s / left or None
    if status.tokens_per_s and status.tokens and status.step:
        return status.tokens / status.step / status.tokens_per_s
    return None


def served_s(status: JobStatus) -> float:
    """Worker-seconds that the job has received."""
    booked = status.goodput
    return 0.0 if booked is None else sum(booked.seconds.get(kind, 0.0) for kind in _SERVED)


def _average(before: float | None, newest: float) -> float:
    return newest if before is None else (1 - _NEWEST) * before + _NEWEST * newest


class CurveBook:
    """The throughput curve of each job, as the planner predicts it. Not thread-safe: one pass at a time asks.

        predicted   the planner's best layout at some world sizes; without it (a user task) the batch's partition, and
                    for a script nearly linear
        corrected   at a size that was measured, its measurement; at the others, the prediction times what the nearest
                    measured size was off by

    A predicted curve rises by at least 1 % per worker: what no other job needs is used even if the planner sees no
    gain, since it may be wrong. A measured curve may fall. A prediction takes about 3 ms per size, so only a few jobs
    are predicted per pass, and jobs of equal specs share one.
    """

    def __init__(self, profiles: tuple[HardwareProfile, ...]) -> None:
        self._profiles = profiles
        self._predicted: RecentlyUsed[str, ThroughputCurve] = RecentlyUsed(_REMEMBERED)

    def predicted(self, spec: JobSpec, *, may_compute: bool) -> ThroughputCurve | None:
        """The curve; None if it has to be computed, and `may_compute` forbids that now."""
        key = f"{spec.elasticity.max_workers} {spec.model_dump_json(include=_DECIDES)}"
        curve = self._predicted.get(key)
        if curve is None and may_compute:
            curve = predict(spec, measured_profile(self._profiles, has_gpu=spec.worker.gpus > 0))
            self._predicted.put(key, curve)
        return curve


def predict(spec: JobSpec, profile: HardwareProfile | None = None) -> ThroughputCurve:
    """Predicts samples per second by world size, as the planner expects them."""
    rates = {}
    for size in choose_sizes(spec.elasticity.max_workers):
        best = rank(spec, size, profile, 1).predictions
        if not best:
            continue  # no layout uses exactly this many workers, or the sizes of the model are unknown
        rates[size] = spec.batch.global_size / best[0].step_s
    return make_curve(rising(rates)) if rates else _predict_unplanned(spec)


def _predict_unplanned(spec: JobSpec) -> ThroughputCurve:
    """Predict the speed without the planner.

    A step of a task takes as long as that of the rank with the most micro-batches. Nothing is known of a script or a
    loop until it reports samples; its speed is relative to that of one worker. A doubling gains nearly all that it can.
    """
    batch = spec.batch
    rates = {
        size: (batch.global_size / math.ceil(batch.num_micro_batches / size) if spec.program is None else float(size))
        * _DOUBLING ** math.log2(size)
        for size in choose_sizes(spec.elasticity.max_workers)
    }
    return make_curve(rising(rates))


def rising(rates: Mapping[int, float]) -> dict[int, float]:
    """Raises the rates, so that none is lower than that of a smaller size, and adds a bit per worker."""
    rising_at: dict[int, float] = {}
    least, before = 0.0, 0
    for size in sorted(rates):
        rising_at[size] = max(rates[size], least * _LEAST_GAIN ** (size - before))
        least, before = rising_at[size], size
    return rising_at


def corrected(curve: ThroughputCurve, measured: Mapping[int, float]) -> ThroughputCurve:
    """Corrects a curve. `measured`: samples per second by world size."""
    if not measured:
        return curve
    off_by = {size: rate / curve.rate(size) for size, rate in measured.items()}
    rates = dict(measured)
    for size, rate in zip(curve.sizes, curve.rates, strict=True):
        nearest = min(off_by, key=lambda known: (abs(math.log(known / size)), known))
        rates.setdefault(size, rate * off_by[nearest])
    return make_curve(rates)


def make_curve(rates: Mapping[int, float]) -> ThroughputCurve:
    sizes = sorted(rates)
    return ThroughputCurve(tuple(sizes), tuple(rates[size] for size in sizes))


def choose_sizes(most: int) -> list[int]:
    """The world sizes at which a curve is predicted: small ones, then powers of two, then the largest."""
    doubled = [1 << bits for bits in range(_FEW.bit_length(), most.bit_length())]
    return sorted({*range(1, min(most, _FEW) + 1), *doubled, most})
