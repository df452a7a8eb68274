"""MarketBuilder: rows of the store, nodes of the cluster and measurements as the MarketState of a policy.

A job keeps its value as long as its row does not change, so a pass in which little happened costs little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from shoal_service.control.market.curves import CurveBook, by_partition, corrected
from shoal_service.control.market.measured import JobMeasured, Measurements, served_s
from shoal_service.core import nodes as node_rules
from shoal_service.core.desired import Desired
from shoal_service.core.nodes import Node
from shoal_service.core.scheduling.facts import facts_of
from shoal_service.core.scheduling.market import (
    ClusterState,
    MarketJob,
    MarketNode,
    MarketState,
    Project,
    ThroughputCurve,
    User,
    WorkerNeed,
)
from shoal_service.planner import HardwareProfile
from shoal_service.store.driving import DriveRow
from shoal_workers.contract.job import JobState
from shoal_workers.contract.placing import ANY_CLUSTER, MARKET_TYPE_LABEL, SPOT
from shoal_workers.contract.spec import JobSpec

_PREDICTIONS_PER_PASS = 8
_NOTHING = WorkerNeed()
_NOWHERE: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """What a market needs to know about clusters beside their nodes."""

    own: str = ""
    """The cluster of attempts that name none."""
    clusters: Mapping[str, ClusterState] = field(default_factory=dict)
    """Those that have joined, by name."""
    held: frozenset[str] = frozenset()
    """Jobs with an attempt about which nothing is decided: their cluster does not answer, or they move."""
    excluded: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """By queued job: clusters in which it may not start, since its checkpoints are not known to be reachable there."""


SINGLE = Whereabouts()


class MarketBuilder:
    """Made by the control loop, called once per pass. Blocks for some predictions, so not on an event loop."""

    def __init__(self, profiles: tuple[HardwareProfile, ...] = ()) -> None:
        self._measurements = Measurements()
        self._curves = CurveBook(profiles)
        self._known: dict[str, tuple[DriveRow, MarketJob, bool]] = {}
        """By job: the row and what was made of it, and whether its curve is predicted."""
        self._may_predict = 0
        self.num_new = 0
        """Jobs that the last `build` saw for the first time."""

    def build(
        self,
        rows: Sequence[DriveRow],
        nodes: Sequence[Node],
        foreign: Mapping[str, WorkerNeed],
        workers: Mapping[str, Mapping[str, int]],
        projects: Mapping[str, Project],
        users: Mapping[str, User],
        now: float,
        where: Whereabouts = SINGLE,
    ) -> MarketState:
        """
        Args:
            foreign: what others have reserved, by node id.
            workers: those that each job really has, by job and node.
        """
        self._may_predict = _PREDICTIONS_PER_PASS
        self._measurements.forget_all_but({row.id for row in rows})
        self.num_new = 0
        self._known = {row.id: self._job(row, now) for row in rows}
        jobs = [
            _placed(_with_workers(job, workers.get(job.job_id, {})), where)
            for row, job, _ in self._known.values()
            if not is_preempted(row)  # its workers are promised to another job
        ]
        capacity = market_nodes(nodes, [row.id for row in rows], foreign)
        return MarketState(jobs=jobs, nodes=capacity, projects=projects, users=users, clusters=where.clusters)

    def _job(self, row: DriveRow, now: float) -> tuple[DriveRow, MarketJob, bool]:
        known = self._known.get(row.id)
        if known is not None and known[0] is row and (known[2] or not self._may_predict):
            return known
        self.num_new += known is None
        measured = self._measurements.observe(row, now)
        curve, is_predicted = self._curve(row, measured)
        return row, self._market_job(row, measured, curve), is_predicted

    def _curve(self, row: DriveRow, measured: JobMeasured) -> tuple[ThroughputCurve, bool]:
        predicted = self._curves.predicted(row.spec, may_compute=False)
        if predicted is None and self._may_predict:
            self._may_predict -= 1
            predicted = self._curves.predicted(row.spec, may_compute=True)
        samples = row.spec.batch.global_size
        rates = {size: samples / step_s for size, step_s in measured.step_s.items()}
        return corrected(predicted or by_partition(row.spec), rates), predicted is not None

    def _market_job(self, row: DriveRow, measured: JobMeasured, curve: ThroughputCurve) -> MarketJob:
        status, samples = row.status, row.spec.batch.global_size
        total_steps = status.total_steps if status.total_steps is not None else row.spec.stop.steps
        return replace(
            requested(row),
            curve=curve,
            left=None if total_steps is None else float(max(0, total_steps - status.step) * samples),
            done=float(status.step * samples),
            served_s=served_s(status),
            moved_at=measured.moved_at,
            switch_s=self._measurements.switch_s(measured),
            start_s=self._measurements.start_s(measured),
        )


def requested(row: DriveRow) -> MarketJob:
    """What the job asks for and was given; nothing of its progress and its speed."""
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
    """The only one in which the job may run; empty: any."""
    return "" if spec.worker.cluster == ANY_CLUSTER else spec.worker.cluster


def standing_of(state: MarketState) -> object:
    """All of a state but the progress of its jobs, to compare it with another one. Jobs that have not changed give the
    same object again, which is compared by its identity."""
    jobs = [facts_of(job).standing(job) for job in state.jobs]
    return jobs, tuple(state.nodes), dict(state.projects), dict(state.users), dict(state.clusters)


def is_preempted(row: DriveRow) -> bool:
    """The attempt has to save and end, since its workers were given to another job."""
    return row.state is not JobState.QUEUED and row.granted_workers == 0


def market_nodes(
    nodes: Sequence[Node], job_ids: Sequence[str], foreign: Mapping[str, WorkerNeed]
) -> tuple[MarketNode, ...]:
    """The nodes that jobs may use. A drained node is none of them: its workers are leaving it."""
    return tuple(_market_node(node, foreign.get(node.node_id, _NOTHING)) for node in node_rules.usable(nodes, job_ids))


def _market_node(node: Node, foreign: WorkerNeed) -> MarketNode:
    return MarketNode(
        node_id=node.node_id,
        cluster=node.cluster,
        cpus=max(0.0, node.cpus - foreign.cpus),
        gpus=max(0.0, node.gpus - foreign.gpus),
        memory_gib=max(0.0, node.memory_gib - foreign.memory_gib),
        labels=node.labels,
        is_spot=node.labels.get(MARKET_TYPE_LABEL) == SPOT,
        is_cordoned=node.cordon is not None,
        ends_at=node.maintenance_at,
    )


def _with_workers(job: MarketJob, on_nodes: Mapping[str, int]) -> MarketJob:
    return job if on_nodes == job.on_nodes else replace(job, held=sum(on_nodes.values()), on_nodes=on_nodes)


def _placed(job: MarketJob, where: Whereabouts) -> MarketJob:
    """A job that nothing of this concerns stays the same object."""
    if not job.granted:
        excluded = where.excluded.get(job.job_id, _NOWHERE)
        return job if excluded == job.excluded_clusters else replace(job, excluded_clusters=excluded)
    cluster, is_leaving = job.cluster or where.own, job.is_leaving or job.job_id in where.held
    if (cluster, is_leaving) == (job.cluster, job.is_leaving):
        return job
    return replace(job, cluster=cluster, is_leaving=is_leaving)
