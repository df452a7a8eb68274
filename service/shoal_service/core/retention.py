"""What may be deleted, and when: checkpoints of a running job, and what ended jobs leave behind.

Names, times and facts in, decisions with reasons out; it never touches the storage or the database. Of a running job,
`supervisor/checkpoints.py` deletes the checkpoints that are returned here:

    keep = 2      step-30 (torn, newest writer)   stays: it may still be committed
                  step-20  good                   stays
                  step-15  damaged                stays: fewer than 2 good ones are newer
                  step-10  good                   stays
                  step-05  good or damaged        is deleted
                  step-12  torn, older writer     is deleted: a later generation has committed

The newest good checkpoint is never deleted, nor is one that is in flight or that a user has pinned. A pinned one
counts as a newer one for others, so pins never make fewer than `keep` remain.

What an ended job leaves behind is removed by `control/retention.py`, by its age:

    ended_at --- logs_days --- checkpoints_days --- series_days --- events_days --- jobs_days ---> time
                 the log       all checkpoints      the points      its events      the job itself
                               but the newest       of each step                    with its files

A job that has not ended is never touched, nor is a pinned checkpoint, nor one that another job continues from. Called
by `control/retention.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from shoal_service.core.quantities import count_text
from shoal_workers.contract import CheckpointName


@dataclass(frozen=True, slots=True)
class Deletion:
    """One checkpoint directory that may be deleted, and why."""

    name: CheckpointName
    reason: str


def choose_deletions(
    committed: Collection[CheckpointName],
    uncommitted: Collection[CheckpointName],
    *,
    keep: int,
    damaged: Collection[CheckpointName],
    in_flight: Collection[CheckpointName],
    pinned: Collection[CheckpointName] = (),
) -> tuple[Deletion, ...]:
    """The directories to delete, oldest first.

    `committed`: directories with a commit marker. `uncommitted`: those without. `damaged`: committed ones that failed
    verification; they do not count for `keep`. `in_flight`: those being written, committed or read; never deleted.
    `pinned`: never deleted, not even if they are damaged.
    """
    assert keep >= 1, f"keep is {keep}, and must be at least 1: the newest checkpoint is always kept"
    good = sorted(set(committed) - set(damaged), reverse=True)
    deletions = [
        Deletion(name, f"newer: {count_text(num_newer, 'good checkpoint')}; kept: {keep}")
        for name in committed
        if name not in in_flight and name not in pinned and (num_newer := sum(other > name for other in good)) >= keep
    ]
    newest_writer = max(good, key=_written_order, default=None)
    if newest_writer is not None:
        deletions += [
            Deletion(name, f"never committed, and {newest_writer} was written later")
            for name in uncommitted
            if name not in in_flight and _written_order(name) < _written_order(newest_writer)
        ]
    return tuple(sorted(deletions, key=lambda deletion: deletion.name))


def best_names(
    committed: Collection[CheckpointName], damaged: Collection[CheckpointName], steps: Collection[int]
) -> frozenset[CheckpointName]:
    """The checkpoint to keep for each of the best steps: the newest good one."""
    good = set(committed) - set(damaged)
    there = {name.step for name in good} & set(steps)
    return frozenset(max(name for name in good if name.step == step) for step in there)


def why_kept(
    name: CheckpointName, committed: Collection[CheckpointName], *, pinned: Collection[CheckpointName], is_over: bool
) -> str:
    """Why a user may not delete this checkpoint now, and the way out; empty: it may be deleted.

    A job that has not ended keeps its newest good checkpoint: it resumes from it, and retention relies on it when it
    deletes the others at the same moment.

    Args:
        committed: the job's good ones. `is_over`: the job has ended.
    """
    if name in pinned:
        return f"it is pinned; `shoal pin JOB {name.step} --undo` takes the pin away"
    if not is_over and name in committed and name == max(committed):
        which = "the only one" if len(committed) == 1 else "the newest one"
        needed = f"it is {which}, and the job, which has not ended, would resume from it"
        return f"{needed}. Wait for the next one, or cancel the job first"
    return ""


def _written_order(name: CheckpointName) -> tuple[int, int, int]:
    """Sort key for the time of writing: a later generation may repeat steps of an earlier one."""
    return name.attempt, name.generation, name.step


_DAY_S = 86_400.0
_KEPT = 1
"""Good checkpoints of an ended job that stay as long as the job: its result."""


class Kind(StrEnum):
    """What a removal removes."""

    JOB = "job"
    CHECKPOINT = "checkpoint"
    LOGS = "logs"
    SERIES = "series"
    EVENTS = "events"
    ARCHIVE = "archive"
    AUDIT = "audit"
    PACKAGES = "packages"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionRules:
    """Days after a job's end; 0: for ever."""

    logs_days: float = 30
    checkpoints_days: float = 90
    series_days: float = 180
    events_days: float = 365
    jobs_days: float = 0
    archives_days: float = 30
    """Days after the archive was last uploaded, if no job names it."""
    packages_days: float = 30
    """Days after a process of a node has begun to use a set of packages of `code.pip`, if none uses it."""
    audit_days: float = 365
    """Days after the record; never fewer than LEAST_AUDIT_DAYS."""

    def has_passed(self, days: float, since: float, now: float) -> bool:
        return days > 0 and now - since > days * _DAY_S

    @property
    def first_days(self) -> float:
        """Days after a job's end in which nothing of it is deleted; 0: nothing is ever deleted."""
        days = (self.logs_days, self.checkpoints_days, self.series_days, self.events_days, self.jobs_days)
        return min((day for day in days if day > 0), default=0.0)


LEAST_AUDIT_DAYS = 30.0
"""Who has access for an hour must not be able to let the records of it vanish."""
DEFAULT_RULES = RetentionRules()
DEFAULT_EVERY_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedJob:
    """What the store knows about it."""

    id: str
    name: str
    ended_at: float
    has: frozenset[Kind] = frozenset()
    """Those of LOGS, SERIES and EVENTS of which there are rows."""
    committed: tuple[CheckpointName, ...] = ()
    damaged: tuple[CheckpointName, ...] = ()
    kept: frozenset[CheckpointName] = field(default_factory=frozenset)
    """Pinned, or another job continues from it."""
    is_needed: bool = False
    """Another job goes on from one of its checkpoints, and has none of its own yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """One thing that may be deleted."""

    kind: Kind
    job_id: str = ""
    name: str = ""
    """Name of the job, the checkpoint or the archive."""
    reason: str = ""


def due(jobs: Collection[EndedJob], rules: RetentionRules, now: float) -> tuple[Removal, ...]:
    """The removals, in the order in which they are carried out."""
    return tuple(removal for job in jobs for removal in _of_job(job, rules, now))


def _of_job(job: EndedJob, rules: RetentionRules, now: float) -> Iterator[Removal]:
    def is_due(days: float) -> bool:
        return rules.has_passed(days, job.ended_at, now)

    def why(setting: str, days: float) -> str:
        return f"the job ended {(now - job.ended_at) / _DAY_S:.0f} days ago, and {setting} is {days:g}"

    if is_due(rules.jobs_days) and not job.is_needed:
        reason = why("retain_jobs_days", rules.jobs_days)
        yield Removal(kind=Kind.JOB, job_id=job.id, name=job.name, reason=reason)
        return
    if is_due(rules.checkpoints_days):
        reason = why("retain_checkpoints_days", rules.checkpoints_days)
        everything = {*job.committed, *job.damaged}
        for deletion in choose_deletions(
            everything, (), keep=_KEPT, damaged=job.damaged, in_flight=(), pinned=job.kept
        ):
            yield Removal(kind=Kind.CHECKPOINT, job_id=job.id, name=str(deletion.name), reason=reason)
    for kind, setting, days in (
        (Kind.LOGS, "retain_logs_days", rules.logs_days),
        (Kind.SERIES, "retain_series_days", rules.series_days),
        (Kind.EVENTS, "retain_events_days", rules.events_days),
    ):
        if kind in job.has and is_due(days):
            yield Removal(kind=kind, job_id=job.id, name=job.name, reason=why(setting, days))
