"""The fleet over time: which job had how many workers when, from whom it got them and to whom they went, and where the
worker-seconds went, by project; and what each project has used by week or month. http/routes/job_tables.py calls it.

It reads the samples of the jobs' accounts and the events that change their workers, of the newest jobs that had an
attempt in the window: a bounded number of primary-key ranges, one for each job. `core/worker_changes.py` joins what
came free with what was given next, `core/goodput.py` divides the accounts by time.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any

from sqlalchemy import select

from shoal_service.core.events import IncidentClosed, IncidentOpened, JobGranted, JobPreempted, JobStateChanged
from shoal_service.core.events.catalogue import describe
from shoal_service.core.goodput import Category, Window, edges_of, recovering
from shoal_service.core.job_machine import ATTEMPT_STATES
from shoal_service.core.worker_changes import Change, ChangeKind, connected
from shoal_service.fleet_views import (
    FleetTimeline,
    ProjectGoodput,
    ProjectUsage,
    TimelineChange,
    TimelineJob,
    WorkerFlow,
)
from shoal_service.store.database import Transaction, events, in_projects, job_samples, jobs
from shoal_service.store.histories import read_incidents
from shoal_service.views import IncidentView
from shoal_workers.contract import IncidentCause, JobState

MAX_JOBS = 100
MAX_COUNTED = 300
"""Jobs whose worker-seconds are counted."""
MAX_CHANGES = 500
NUM_INTERVALS = 48
_MAX_OF_JOB = 100
_SAME_S = 1.0
"""Between an incident and its event, whose time may be that of another clock."""
_TYPES = tuple(
    event_type.type for event_type in (JobGranted, JobPreempted, JobStateChanged, IncidentOpened, IncidentClosed)
)
_COLUMNS = (job_samples.c.at, job_samples.c.workers, job_samples.c.granted, job_samples.c.state, job_samples.c.seconds)


def read(tx: Transaction, *, since: float, until: float, visible: Collection[str] | None = None) -> FleetTimeline:
    """Read the timeline of the newest jobs. `visible`: only jobs of these projects; None means all."""
    query = select(
        *(jobs.c.num, jobs.c.id, jobs.c.name, jobs.c.project, jobs.c.user, jobs.c.state, jobs.c.cluster),
        *(jobs.c.created_at, jobs.c.status),
    ).where(jobs.c.attempt > 0, jobs.c.ended_at.is_(None) | (jobs.c.ended_at >= since))
    query = query.where(in_projects(jobs.c.project, visible))
    rows = tx.execute(query.order_by(jobs.c.num.desc()).limit(MAX_COUNTED)).all()
    edges = edges_of(since, until, NUM_INTERVALS)
    windows: dict[str, Window] = {}
    lanes = []
    changes: list[Change] = []
    for place, row in enumerate(rows):
        samples = _read_samples(tx, row.num, since, until)
        windows.setdefault(row.project, Window(edges)).add(_list_accounts(row, samples))
        if place < MAX_JOBS:
            lanes.append(_make_lane(row, samples, since))
            changes += _list_changes(tx, row, since, until, lanes[-1])
    newest_changes = connected(changes)[::-1][:MAX_CHANGES]
    by_id = {row.id: row for row in rows}
    return FleetTimeline(
        since=since,
        until=until,
        jobs=tuple(lane for lane in lanes if lane.at),
        num_left_out=int(len(rows) > MAX_JOBS),
        decisions=tuple(_make_view(change, by_id) for change in newest_changes),
        edges=tuple(edges),
        projects=tuple(_make_goodput(project, window) for project, window in sorted(windows.items())),
    )


_NOT_USED = (Category.QUEUED, Category.DEGRADED)
_MIN_USED_S = 1e-6


def usage(
    tx: Transaction, edges: Sequence[float], *, visible: Collection[str] | None = None, project: str | None = None
) -> tuple[ProjectUsage, ...]:
    """What each project has used between the edges, by time and project. Of a job that crosses an edge, the samples on
    both sides of it are read; of any other, its status only. `visible`: only these projects; None means all."""
    query = select(jobs.c.num, jobs.c.project, jobs.c.created_at, jobs.c.ended_at, jobs.c.status).where(
        jobs.c.attempt > 0, jobs.c.created_at < edges[-1], jobs.c.ended_at.is_(None) | (jobs.c.ended_at >= edges[0])
    )
    query = query.where(in_projects(jobs.c.project, visible, project))
    sums: dict[tuple[int, str], tuple[float, float, int]] = defaultdict(lambda: (0.0, 0.0, 0))
    for row in tx.execute(query):
        crossed = [edge for edge in edges if row.created_at < edge < (row.ended_at or edges[-1])]
        samples = {sample.at: sample for edge in crossed for sample in _read_around(tx, row.num, edge)}
        window = Window(edges)
        window.add(_list_accounts(row, [samples[at] for at in sorted(samples)]))
        spent = {account: amounts for account, amounts in window.by_account.items() if account not in _NOT_USED}
        for index in range(len(edges) - 1):
            used_s = sum(amounts[index] for amounts in spent.values())
            if used_s > _MIN_USED_S:
                productive_s = spent[Category.PRODUCTIVE][index] if Category.PRODUCTIVE in spent else 0.0
                before = sums[index, row.project]
                sums[index, row.project] = before[0] + used_s, before[1] + productive_s, before[2] + 1
    return tuple(
        ProjectUsage(
            project=name,
            since=edges[index],
            until=edges[index + 1],
            worker_s=used_s,
            productive_s=productive_s,
            num_jobs=num_jobs,
        )
        for (index, name), (used_s, productive_s, num_jobs) in sorted(sums.items())
    )


def _read_around(tx: Transaction, num: int, at: float) -> Sequence[Any]:
    """The newest sample up to a time, and the first one after it."""
    query = select(*_COLUMNS).where(job_samples.c.job_num == num).limit(1)
    before = query.where(job_samples.c.at <= at).order_by(job_samples.c.at.desc())
    after = query.where(job_samples.c.at > at).order_by(job_samples.c.at)
    return (*tx.execute(before), *tx.execute(after))


def _read_samples(tx: Transaction, num: int, since: float, until: float) -> Sequence[Any]:
    """The newest sample up to the beginning of the window, and those within it."""
    query = select(*_COLUMNS).where(job_samples.c.job_num == num)
    before = query.where(job_samples.c.at <= since).order_by(job_samples.c.at.desc()).limit(1)
    within = query.where(job_samples.c.at > since, job_samples.c.at <= until).order_by(job_samples.c.at)
    return (*tx.execute(before), *tx.execute(within))


def _make_lane(row: Any, samples: Sequence[Any], since: float) -> TimelineJob:
    """Make the columns of a job: samples that differ in nothing but the time are one stretch."""
    changes = groupby(samples, lambda sample: (sample.workers, sample.granted, sample.state))
    stretches = [(max(next(stretch).at, since), *values) for values, stretch in changes]
    return TimelineJob(
        id=row.id,
        name=row.name,
        project=row.project,
        user=row.user,
        state=JobState(row.state),
        at=tuple(round(at, 2) for at, *_ in stretches),
        workers=tuple(workers for _, workers, *_ in stretches),
        granted=tuple(granted for _, _, granted, _ in stretches),
        states=tuple(JobState(state) for *_, state in stretches),
    )


def _list_changes(tx: Transaction, row: Any, since: float, until: float, lane: TimelineJob) -> list[Change]:
    query = select(events.c.at, events.c.type, events.c.data).where(
        events.c.job_num == row.num, events.c.type.in_(_TYPES), events.c.at >= since, events.c.at <= until
    )
    newest = tx.execute(query.order_by(events.c.seq.desc()).limit(_MAX_OF_JOB)).all()
    granted = lane.granted[0] if lane.at and lane.at[0] <= since else 0
    in_group = 0
    changes = []
    known: list[IncidentView] | None = None
    for event in reversed(newest):
        data = json.loads(event.data)
        if event.type == IncidentOpened.type and not data["ranks"]:
            known = read_incidents(tx, row.id, newest=_MAX_OF_JOB) if known is None else known
            data |= _find_learned(event.at, data["id"], known)
        change = _change(row, event.at, event.type, data, granted, in_group)
        if event.type == IncidentOpened.type:
            in_group = data["workers"] - len(data["ranks"])
        if change is None:
            continue
        changes.append(change)
        if change.kind not in (ChangeKind.LOST, ChangeKind.RECOVERED):
            granted = change.after
    return changes


def _find_learned(at: float, number: int, known: Sequence[IncidentView]) -> dict[str, Any]:
    """What an incident that opened at this time has learned since: a survivor may report that its collective failed
    before anybody knows which worker was lost. Numbers begin anew with each attempt."""
    same = [incident for incident in known if incident.id == number and abs(incident.at - at) < _SAME_S]
    return {"cause": same[-1].cause, "ranks": same[-1].ranks, "message": same[-1].message} if same else {}


def _change(row: Any, at: float, event_type: str, data: dict[str, Any], granted: int, in_group: int) -> Change | None:
    """Read from an event how it changed the workers of the job; None if it did not.

    Args:
        granted: the workers that the job was granted before.
        in_group: the workers that the last incident has left in its group.
    """
    message = describe(event_type, data).message
    common: dict[str, Any] = {"at": at, "job": row.id, "cluster": row.cluster, "words": message}
    others = tuple((data.get("others") or {}).items())
    match event_type:
        case JobGranted.type:
            before, after = data["from"], data["to"]
            moved = ChangeKind.GROW if after > before else ChangeKind.SHRINK
            return Change(kind=moved, before=before, after=after, others=others, reason=data["reason"], **common)
        case JobPreempted.type:
            before, receiver = data["workers"], data["beneficiary"]
            others = others or (((receiver, before),) if receiver else ())
            reason = data["reason"]
            return Change(kind=ChangeKind.PREEMPT, before=before, after=0, others=others, reason=reason, **common)
        case JobStateChanged.type:
            workers, reason = data.get("workers"), data["message"] or data["reason"]
            if workers:
                return Change(kind=ChangeKind.START, before=0, after=workers, others=others, reason=reason, **common)
            if JobState(data["to"]) not in ATTEMPT_STATES and granted:
                ended = f"{data['to']}: {reason}"
                return Change(kind=ChangeKind.LEAVE, before=granted, after=0, reason=ended, **common)
        case IncidentOpened.type if data["ranks"]:
            left = data["workers"] - len(data["ranks"])
            return Change(kind=ChangeKind.LOST, before=data["workers"], after=left, reason=message, **common)
        case IncidentClosed.type if data["to_workers"] not in (None, in_group):
            after = data["to_workers"]
            return Change(kind=ChangeKind.RECOVERED, before=in_group, after=after, reason=message, **common)
    return None


def _make_view(change: Change, by_id: Mapping[str, Any]) -> TimelineChange:
    def flows(job_flows: Sequence[tuple[str, int]]) -> tuple[WorkerFlow, ...]:
        return tuple(
            WorkerFlow(job=job, name=by_id[job].name if job in by_id else job, workers=workers)
            for job, workers in job_flows
        )

    row = by_id[change.job]
    return TimelineChange(
        at=change.at,
        job=change.job,
        name=row.name,
        project=row.project,
        kind=change.kind,
        before=change.before,
        after=change.after,
        others=flows(change.others),
        free=change.free,
        freed_by=flows(change.freed_by),
        taken_by=flows(change.taken_by),
        reason=change.reason,
        words=change.words,
    )


def _list_accounts(row: Any, samples: Sequence[Any]) -> list[tuple[float, dict[str, float]]]:
    """The job's accounts over time, from its creation to its newest status."""
    totals: list[tuple[float, dict[str, float]]] = [(row.created_at, {})]
    totals += [(sample.at, json.loads(sample.seconds)) for sample in samples if sample.at > row.created_at]
    newest = json.loads(row.status).get("goodput") or {}
    if (newest.get("at") or 0.0) > totals[-1][0]:
        causes = {recovering(cause): amount for cause, amount in newest.get("recovering", {}).items()}
        totals.append((newest["at"], {**newest.get("seconds", {}), **causes}))
    return totals


def _make_goodput(project: str, window: Window) -> ProjectGoodput:
    totals = window.totals()
    seconds = {category: totals[category] for category in Category if totals.get(category)}
    causes = {cause: totals[recovering(cause)] for cause in IncidentCause if totals.get(recovering(cause))}
    return ProjectGoodput(
        project=project,
        seconds=seconds,
        recovering=causes,
        total=sum(seconds.values()),
        by_interval={
            category: tuple(round(interval, 1) for interval in window.by_account[category]) for category in seconds
        },
    )
