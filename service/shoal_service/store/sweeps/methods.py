"""SweepMethods: the methods of `Store` for sweeps. See `Store` for what all of them share."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence

from sqlalchemy import Connection, select

from shoal_service.core.desired import Desired
from shoal_service.core.events.catalogue import describe
from shoal_service.core.events.job import JobOutperformed, JobRequested
from shoal_service.core.job_machine import ACTIVE, Requested, step
from shoal_service.core.sweeps import Rule, Verdict, step_to_compare, verdict
from shoal_service.fleet_views import SweepSummary, SweepView
from shoal_service.store import lease as leases
from shoal_service.store.database import Database
from shoal_service.store.edit import JobEdit
from shoal_service.store.hub import Hub
from shoal_service.store.records import load
from shoal_service.store.sweeps import listing, reads, submitting
from shoal_service.store.tables import events
from shoal_service.views import Page
from shoal_workers.contract.spec import JobSpec

PRUNED = "pruned"
"""Reason of a job that was ended because others of its sweep are better."""


class SweepMethods:
    """A part of `Store`."""

    _database: Database
    _hub: Hub

    def create_sweep(self, name: str, jobs: Sequence[tuple[JobSpec, str]], *, now: float) -> tuple[list[str], bool]:
        """All jobs of a sweep, or none. `jobs`: their specs, all of one project, and the notes of their statuses.
        Returns their ids in this order, and whether one is new. Raises SweepConflict, SweepTooLarge; SpecError, as
        `create_job`."""
        with self._database.write() as tx:
            found = submitting.create(tx, name, jobs, now=now)
        for job_id, created in found:
            if created:
                self._hub.publish(job_id, is_request=True)
        return [job_id for job_id, _ in found], any(created for _, created in found)

    def cancel_sweep(self, project: str, name: str, *, now: float) -> list[str]:
        """Ends those of its jobs that have not ended; their ids. Raises SweepNotFound."""
        with self._database.write() as tx:
            cancelled = submitting.cancel(tx, project, name, now=now)
        for job_id in cancelled:
            self._hub.publish(job_id, is_request=True)
        return cancelled

    def list_sweeps(
        self,
        *,
        project: str | None = None,
        name: str | None = None,
        visible: Collection[str] | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> Page[SweepSummary]:
        """The newest first, by their first jobs. None: of all. Raises InvalidCursor."""
        which = listing.Which(project, name, visible)
        with self._database.read() as tx:
            return listing.page(tx, which, limit=limit, cursor=cursor)

    def get_sweep(self, project: str, name: str, order: Sequence[str] = ()) -> SweepView:
        """Its jobs, the best first; `order`: only those with these ids, in this order. Raises SweepNotFound."""
        with self._database.read() as tx:
            return listing.view(tx, project, name, order)

    def compare(self, project: str, sweep: str, rules: dict[str, Rule]) -> dict[str, Verdict]:
        """Which of these jobs of a sweep are worse than the others, by their ids."""
        found: dict[str, Verdict] = {}
        with self._database.read() as tx:
            nums = reads.members(tx, project, sweep)
            for measure in {rule.measure for rule in rules.values()}:
                reached = reads.reached(tx, nums, measure)
                for job_id, rule in rules.items():
                    at = step_to_compare(job_id, reached, rule) if rule.measure is measure else None
                    if at is not None and (worse := verdict(job_id, at, reads.values(tx, nums, at, measure))):
                        found[job_id] = worse
        return found

    def prune(self, job_id: str, sweep: str, worse: Verdict, rule: Rule, *, epoch: int, now: float) -> bool:
        """End a job that others of its sweep outperform; False: it has ended, or a user has asked for something else.
        Raises JobNotFound, LeaseLost."""
        with self._database.write() as tx:
            leases.hold(tx, epoch)
            job = load(tx, job_id, lock=True)
            after = step(job.standing, Requested(Desired.CANCEL))
            if job.state not in ACTIVE or job.standing.desired is not Desired.RUN or after is None:
                return False
            edit = JobEdit(tx, job, now)
            event = JobOutperformed(
                sweep=sweep,
                measure=rule.measure.value,
                step=worse.step,
                value=None if math.isnan(worse.value) else worse.value,
                median=worse.median,
                num_others=worse.num_others,
            )
            edit.event(event)
            edit.move(after, PRUNED, event.words())
            edit.save()
        self._hub.publish(job_id, is_request=True)
        return True


def why_pruned(connection: Connection, job_num: int) -> str:
    """Why the job was asked to end, if it was not a user who said so."""
    asked = (JobOutperformed.type, JobRequested.type)
    query = select(events.c.type, events.c.data).where(events.c.job_num == job_num, events.c.type.in_(asked))
    newest = connection.execute(query.order_by(events.c.seq.desc()).limit(1)).one_or_none()
    if newest is None or newest.type != JobOutperformed.type:
        return ""
    return describe(newest.type, json.loads(newest.data)).message
