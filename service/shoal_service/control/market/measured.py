"""Measurements: what the running jobs show of their speed, and of what a start and a change of size cost them.

Fed by the control loop with the rows of every pass, which hold what the supervisors have reported last. Kept in memory
only: a new control plane starts with the predictions, and has measured again after some steps of each job.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from shoal_service.core.goodput import Category
from shoal_service.core.scheduling.market import START_S, SWITCH_S
from shoal_service.store.driving import DriveRow
from shoal_service.views import JobStatus
from shoal_workers.contract.job import JobState

_SETTLED_STEPS = 3
"""The first steps of a group are slower than those that follow."""
_NEWEST = 0.5
"""Weight of the newest measurement."""
_SERVED = (
    Category.PRODUCTIVE,
    Category.RECOMPUTED,
    Category.CHECKPOINT_STALL,
    Category.RECOVERING,
    Category.RESIZING,
)


@dataclass(slots=True)
class JobMeasured:
    """What was measured of one job."""

    step_s: dict[int, float] = field(default_factory=dict)
    """Seconds of a step, by the number of workers."""
    switch_s: float | None = None
    start_s: float | None = None
    moved_at: float | None = None
    """When its grant was seen to change last."""
    granted: int | None = None
    group: tuple[int, int] = (0, 0)
    """Attempt and generation that are measured now."""
    group_step: int = 0
    """Step of that generation when it was seen first."""
    resizing_s: float = 0.0
    """Seconds spent on changes of size until the last one was measured."""
    starting_s: float = 0.0
    """Seconds spent on starts until the last one was measured."""


class Measurements:
    """What was measured of all jobs that wait or run."""

    def __init__(self) -> None:
        self._jobs: dict[str, JobMeasured] = {}
        self._switch_s = SWITCH_S
        self._start_s = START_S

    def observe(self, row: DriveRow, now: float) -> JobMeasured:
        """What is known of the job by now. Call it with every new row."""
        job = self._jobs.setdefault(row.id, JobMeasured())
        if job.granted != row.granted_workers:
            if job.granted is not None:
                job.moved_at = now
            job.granted = row.granted_workers
        if row.status.state is JobState.RUNNING and row.status.workers:
            self._observe_group(job, row)
        return job

    def switch_s(self, job: JobMeasured) -> float:
        """Seconds without training at a change of its size; of other jobs if it had none."""
        return job.switch_s if job.switch_s is not None else self._switch_s

    def start_s(self, job: JobMeasured) -> float:
        """Seconds from its grant to its first step."""
        return job.start_s if job.start_s is not None else self._start_s

    def forget_all_but(self, job_ids: Collection[str]) -> None:
        self._jobs = {job_id: job for job_id, job in self._jobs.items() if job_id in job_ids}

    def _observe_group(self, job: JobMeasured, row: DriveRow) -> None:
        status, group = row.status, (row.attempt, row.status.generation)
        if group != job.group:
            self._observe_pause(job, row)
            job.group, job.group_step = group, status.step
        step_s = seconds_per_step(status)
        if step_s is not None and status.step - job.group_step >= _SETTLED_STEPS:
            job.step_s[status.workers] = step_s

    def _observe_pause(self, job: JobMeasured, row: DriveRow) -> None:
        """A new group runs: what its start, or the change of size before it, has cost."""
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
                job.start_s = _mean(job.start_s, took_s)
                self._start_s = _mean(self._start_s, took_s)
        elif (took_s := resizing_s - job.resizing_s) > 0:
            job.switch_s = _mean(job.switch_s, took_s)
            self._switch_s = _mean(self._switch_s, took_s)
        job.resizing_s, job.starting_s = resizing_s, starting_s


def seconds_per_step(status: JobStatus) -> float | None:
    """The supervisor's moving average; None: nothing was measured yet."""
    left = (status.total_steps or 0) - status.step
    if status.eta_s is not None and left > 0:
        return status.eta_s / left or None
    if status.tokens_per_s and status.tokens and status.step:
        return status.tokens / status.step / status.tokens_per_s
    return None


def served_s(status: JobStatus) -> float:
    """Worker-seconds that the job has received."""
    booked = status.goodput
    return 0.0 if booked is None else sum(booked.seconds.get(one, 0.0) for one in _SERVED)


def _mean(before: float | None, newest: float) -> float:
    return newest if before is None else (1 - _NEWEST) * before + _NEWEST * newest
