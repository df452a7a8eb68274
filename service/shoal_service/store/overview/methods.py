"""OverviewMethods: the methods of `Store` behind the pages. See `Store` for what all of them share."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Connection, func, select

from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.goodput import Goodput
from shoal_service.fleet_views import ClusterGoodput, FleetJob, NodeJob
from shoal_service.store.database import Database
from shoal_service.store.errors import JobNotFound
from shoal_service.store.overview import fleet, job, rollups, samples
from shoal_service.store.overview.fleet import FleetQuery
from shoal_service.store.reads import history
from shoal_service.store.records import load_view
from shoal_service.store.tables import jobs
from shoal_service.views import (
    CheckpointView,
    EventView,
    IncidentView,
    JobOverview,
    SampleColumns,
    SeriesColumns,
    SpecVersion,
)
from shoal_workers.contract.job import JobState


class OverviewMethods:
    """A part of `Store`."""

    _database: Database

    def series(
        self, job_id: str, *, after_step: int = 0, until_step: int | None = None, max_points: int | None = None
    ) -> list[SeriesPoint]:
        """Every step after `after_step` up to `until_step`; means over equal buckets of steps if they are more than
        `max_points`."""
        with self._database.read() as tx:
            if max_points is None:
                return history.read_series(tx, job_id, after_step=after_step)
            num = _num(tx, job_id)
            return rollups.read(tx, num, after_step=after_step, until_step=until_step, max_points=max_points)

    def series_page(self, job_id: str, *, after_step: int, until_step: int, limit: int) -> list[SeriesPoint]:
        """The first `limit` steps after `after_step` up to `until_step`. Raises JobNotFound."""
        with self._database.read() as tx:
            return history.read_series_page(tx, job_id, after_step=after_step, until_step=until_step, limit=limit)

    def series_columns(self, job_id: str, *, after_step: int = -1, max_points: int = job.MAX_POINTS) -> SeriesColumns:
        return job.columns(self.series(job_id, after_step=after_step, max_points=max_points))

    def samples(self, job_id: str, *, after: float = 0.0) -> SampleColumns:
        """The accounts of a job over time, after `after`."""
        with self._database.read() as tx:
            return samples.read(tx, _num(tx, job_id), after=after)

    def newest_incidents(self, job_id: str) -> tuple[IncidentView, ...]:
        with self._database.read() as tx:
            return job.newest_incidents(tx, _num(tx, job_id))

    def newest_checkpoints(self, job_id: str) -> tuple[CheckpointView, ...]:
        with self._database.read() as tx:
            return job.newest_checkpoints(tx, _num(tx, job_id))

    def overview(self, job_id: str) -> JobOverview:
        """Raises JobNotFound."""
        with self._database.read() as tx:
            num = _num(tx, job_id)
            last = job.last_event(tx, num)
            before = max(0, last - job.MAX_EVENTS)
            points = rollups.read(tx, num, after_step=-1, until_step=None, max_points=job.MAX_POINTS)
            return JobOverview.model_construct(
                job=load_view(tx, job_id),
                series=job.columns(points),
                samples=samples.read(tx, num),
                incidents=job.newest_incidents(tx, num),
                workers=tuple(history.read_workers(tx, job_id)),
                events=tuple(history.read_events(tx, job_id, after=before, limit=job.MAX_EVENTS)),
                checkpoints=job.newest_checkpoints(tx, num),
            )

    def job_version(self, job_id: str) -> tuple[JobState, tuple[float, int, int]]:
        """Its state, and what identifies its present content: one small read. Raises JobNotFound."""
        query = select(jobs.c.state, jobs.c.updated_at, jobs.c.event_seq, jobs.c.log_seq).where(jobs.c.id == job_id)
        with self._database.read() as tx:
            row = tx.execute(query).one_or_none()
        if row is None:
            raise JobNotFound(job_id)
        return JobState(row.state), (row.updated_at, row.event_seq, row.log_seq)

    def newest_events(self, job_id: str, *, after: int, limit: int, newest: int | None = None) -> tuple[EventView, ...]:
        """The events after number `after`; `newest`: at most this many of the newest."""
        with self._database.read() as tx:
            if newest is not None:
                after = max(after, job.last_event(tx, _num(tx, job_id)) - newest)
            return tuple(history.read_events(tx, job_id, after=after, limit=limit))

    def spec_versions(self, job_id: str) -> list[SpecVersion]:
        """Oldest first. Raises JobNotFound."""
        with self._database.read() as tx:
            _num(tx, job_id)
            return job.spec_versions(tx, job_id)

    def fleet(self, query: FleetQuery) -> tuple[tuple[FleetJob, ...], int]:
        """A page of jobs, and how many match."""
        with self._database.read() as tx:
            return fleet.page(tx, query), fleet.count(tx, query)

    def fleet_accounts(
        self, visible: Collection[str] | None = None
    ) -> tuple[dict[JobState, int], tuple[ClusterGoodput, ...], Goodput | None]:
        """Jobs by state, the cluster's goodput of the last day, and the sum of the accounts of today's jobs. `visible`:
        only jobs of these projects, and nothing about the whole cluster."""
        with self._database.read() as tx:
            of_cluster = samples.cluster_goodput(tx) if visible is None else ()
            return fleet.num_by_state(tx, visible), of_cluster, fleet.accounts(tx, visible)

    def jobs_by_node(self, visible: Collection[str] | None = None) -> dict[str, tuple[NodeJob, ...]]:
        """What runs on each node, by node id."""
        with self._database.read() as tx:
            return fleet.jobs_by_node(tx, visible)

    def changed_jobs(self, since: float) -> dict[str, tuple[float, int, int]]:
        """What identifies the present content of each job that was changed at `since` or later, by id."""
        query = select(jobs.c.id, jobs.c.updated_at, jobs.c.event_seq, jobs.c.log_seq).where(jobs.c.updated_at >= since)
        with self._database.read() as tx:
            return {row.id: (row.updated_at, row.event_seq, row.log_seq) for row in tx.execute(query)}

    def newest_change(self) -> float:
        """When a job was changed last; 0: there is none."""
        with self._database.read() as tx:
            return float(tx.execute(select(func.max(jobs.c.updated_at))).scalar() or 0.0)


def _num(connection: Connection, job_id: str) -> int:
    num: int | None = connection.execute(select(jobs.c.num).where(jobs.c.id == job_id)).scalar_one_or_none()
    if num is None:
        raise JobNotFound(job_id)
    return num
