"""The fleet over time: which job had how many workers when, what the scheduler gave to whom and why, and where the
worker-seconds went, by project. http/routes/overviews.py calls it.

It reads the samples of the jobs' accounts and the events of the scheduler's decisions, of the newest jobs that had an
attempt in the window: a bounded number of primary-key ranges, one for each job.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection
from typing import Any

from sqlalchemy import select

from shoal_service.core.events.catalogue import describe
from shoal_service.core.events.job import JobGranted, JobPreempted, JobStateChanged
from shoal_service.core.goodput import Category
from shoal_service.fleet_views import FleetTimeline, ProjectGoodput, TimelineDecision, TimelineJob
from shoal_service.store.database import Transaction
from shoal_service.store.tables import events, job_samples, jobs
from shoal_workers.contract.job import JobState

MAX_JOBS = 100
MAX_DECISIONS = 500
_MAX_OF_JOB = 100
_CATEGORIES = frozenset(Category)
_TYPES = (JobGranted.type, JobPreempted.type, JobStateChanged.type)


def read(tx: Transaction, *, since: float, until: float, visible: Collection[str] | None = None) -> FleetTimeline:
    """`visible`: only jobs of these projects; None: of all."""
    query = select(jobs.c.num, jobs.c.id, jobs.c.name, jobs.c.project, jobs.c.user, jobs.c.state, jobs.c.status)
    query = query.where(jobs.c.attempt > 0, jobs.c.ended_at.is_(None) | (jobs.c.ended_at >= since))
    if visible is not None:
        query = query.where(jobs.c.project.in_(sorted(visible)))
    rows = tx.execute(query.order_by(jobs.c.num.desc()).limit(MAX_JOBS + 1)).all()
    shown = [(row, _job(tx, row, since, until)) for row in rows[:MAX_JOBS]]
    names = {row.id: row.name for row, _ in shown}
    decisions = [one for row, _ in shown for one in _decisions(tx, row, since, until, names)]
    decisions.sort(key=lambda one: -one.at)
    return FleetTimeline(
        since=since,
        until=until,
        jobs=tuple(job for _, job in shown if job.at),
        num_left_out=max(0, len(rows) - MAX_JOBS),
        decisions=tuple(decisions[:MAX_DECISIONS]),
        projects=_projects([row for row, _ in shown]),
    )


def _job(tx: Transaction, row: Any, since: float, until: float) -> TimelineJob:
    columns = (job_samples.c.at, job_samples.c.workers, job_samples.c.granted, job_samples.c.state)
    query = select(*columns).where(job_samples.c.job_num == row.num)
    before = query.where(job_samples.c.at <= since).order_by(job_samples.c.at.desc()).limit(1)
    within = query.where(job_samples.c.at > since, job_samples.c.at <= until).order_by(job_samples.c.at)
    found: list[tuple[float, int, int, str]] = []
    for sample in (*tx.execute(before), *tx.execute(within)):
        one = (max(sample.at, since), sample.workers, sample.granted, sample.state)
        if not found or one[1:] != found[-1][1:]:
            found.append(one)
    return TimelineJob(
        id=row.id,
        name=row.name,
        project=row.project,
        user=row.user,
        state=JobState(row.state),
        at=tuple(round(one[0], 2) for one in found),
        workers=tuple(one[1] for one in found),
        granted=tuple(one[2] for one in found),
        states=tuple(JobState(one[3]) for one in found),
    )


def _decisions(tx: Transaction, row: Any, since: float, until: float, names: dict[str, str]) -> list[TimelineDecision]:
    query = select(events.c.at, events.c.type, events.c.data).where(
        events.c.job_num == row.num, events.c.type.in_(_TYPES), events.c.at >= since, events.c.at <= until
    )
    found = []
    for event in tx.execute(query.order_by(events.c.seq.desc()).limit(_MAX_OF_JOB)):
        data = json.loads(event.data)
        workers = _workers(event.type, data)
        if workers is not None:
            receiver = data.get("beneficiary") or ""
            found.append(
                TimelineDecision(
                    at=event.at,
                    job=row.id,
                    name=row.name,
                    before=workers[0],
                    after=workers[1],
                    to=receiver,
                    to_name=names.get(receiver, receiver),
                    reason=data.get("reason" if event.type != JobStateChanged.type else "message") or "",
                    words=describe(event.type, data).message,
                )
            )
    return found


def _workers(kind: str, data: dict[str, Any]) -> tuple[int, int] | None:
    """The workers before the decision and after it. None: the event is not a decision about workers."""
    if kind == JobGranted.type:
        return data["from"], data["to"]
    if kind == JobPreempted.type:
        return data["workers"], 0
    return (0, data["workers"]) if data.get("workers") else None


def _projects(rows: Collection[Any]) -> tuple[ProjectGoodput, ...]:
    by_project: dict[str, dict[Category, float]] = defaultdict(lambda: defaultdict(float))
    for row in rows:
        goodput = json.loads(row.status).get("goodput") or {}
        for name, amount in goodput.get("seconds", {}).items():
            if name in _CATEGORIES:
                by_project[row.project][Category(name)] += amount
    return tuple(
        ProjectGoodput(project=project, seconds=dict(seconds), total=sum(seconds.values()))
        for project, seconds in sorted(by_project.items())
    )
