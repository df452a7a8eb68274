"""The life of a job as data: which state follows from which input. The store calls `step` and commits the result.

    QUEUED --begun--> STARTING --reports--> RUNNING <-> RECOVERING | RESIZING | WAITING
       ^  ^                                    | pause            | cancel
       |  '----- retry, requeue ---------- PAUSING          CANCELLING
       |                                       | ended            | ended
       |-- resume -- PAUSED <------------------'                  '--> CANCELLED | SUCCEEDED | FAILED
       '-- extend, retry ---------------------------------------------------------------'

A job has the state that the system has reached, and the state that the user desires (`JobStanding`). A request changes
the first one directly only if no supervisor is involved. Otherwise the job goes to PAUSING or CANCELLING, and the end
of the attempt decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, assert_never

from shoal_service.core.desired import Desired
from shoal_service.core.endings import ENDINGS
from shoal_workers.contract import EndReason, JobState

ACTIVE = frozenset(
    {JobState.STARTING, JobState.RUNNING, JobState.RECOVERING, JobState.RESIZING, JobState.WAITING},
)
"""States in which an attempt runs and shall go on."""
ATTEMPT_STATES = ACTIVE | {JobState.PAUSING, JobState.CANCELLING}
"""States in which an attempt exists. Only here may a supervisor report."""


@dataclass(frozen=True, slots=True)
class JobStanding:
    state: JobState
    desired: Desired


@dataclass(frozen=True, slots=True)
class Requested:
    """A request of the user."""

    desired: Desired


@dataclass(frozen=True, slots=True)
class AttemptBegun:
    """The scheduler gave the job its workers."""


@dataclass(frozen=True, slots=True)
class Reported:
    """The supervisor of the current attempt reports its state."""

    state: JobState


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """The attempt is over. `again`: another one follows, as `endings.decide_retry` decided."""

    reason: EndReason
    again: bool


@dataclass(frozen=True, slots=True)
class Requeued:
    """The attempt is lost, and its supervisor reported no end."""


@dataclass(frozen=True, slots=True)
class Reopened:
    """An ended job goes on: to more steps, or after a failure. `lifecycle.reopening` has decided that it may."""


JobInput: TypeAlias = Requested | AttemptBegun | Reported | AttemptEnded | Requeued | Reopened


def step(standing: JobStanding, event: JobInput) -> JobStanding | None:
    """The next standing, which may be the same; None if the input is refused in this standing."""
    match event:
        case Requested(desired=desired):
            return _requested(standing, desired)
        case AttemptBegun():
            return JobStanding(JobState.STARTING, Desired.RUN) if standing.state is JobState.QUEUED else None
        case Reported(state=reported):
            return _reported(standing, reported)
        case AttemptEnded(reason=reason, again=again):
            if standing.state not in ATTEMPT_STATES:
                return None
            return _settled(standing, JobState.QUEUED if again else ENDINGS[reason].state)
        case Requeued():
            return _settled(standing, JobState.QUEUED) if standing.state in ATTEMPT_STATES else None
        case Reopened():
            return JobStanding(JobState.QUEUED, Desired.RUN) if standing.state.ended else None
        case _:
            assert_never(event)


REQUESTS: dict[tuple[JobState, Desired], JobState] = {
    (JobState.QUEUED, Desired.RUN): JobState.QUEUED,
    (JobState.QUEUED, Desired.PAUSE): JobState.PAUSED,
    (JobState.QUEUED, Desired.CANCEL): JobState.CANCELLED,
    (JobState.PAUSED, Desired.RUN): JobState.QUEUED,
    (JobState.PAUSED, Desired.PAUSE): JobState.PAUSED,
    (JobState.PAUSED, Desired.CANCEL): JobState.CANCELLED,
    # A resume while the pause is being carried out: the supervisor may still go back to RUNNING. If the attempt ends
    # first, the job goes to the queue instead of PAUSED.
    (JobState.PAUSING, Desired.RUN): JobState.PAUSING,
    (JobState.PAUSING, Desired.PAUSE): JobState.PAUSING,
    (JobState.PAUSING, Desired.CANCEL): JobState.CANCELLING,
    (JobState.CANCELLING, Desired.CANCEL): JobState.CANCELLING,
    (JobState.CANCELLED, Desired.CANCEL): JobState.CANCELLED,
    **{(state, Desired.RUN): state for state in ACTIVE},
    **{(state, Desired.PAUSE): JobState.PAUSING for state in ACTIVE},
    **{(state, Desired.CANCEL): JobState.CANCELLING for state in ACTIVE},
}
"""Every request that is accepted; all others are conflicts."""


def _requested(standing: JobStanding, desired: Desired) -> JobStanding | None:
    state = REQUESTS.get((standing.state, desired))
    return None if state is None else JobStanding(state, desired)


def _reported(standing: JobStanding, reported: JobState) -> JobStanding | None:
    if standing.state not in ATTEMPT_STATES or reported not in ATTEMPT_STATES:
        return None
    if reported is JobState.CANCELLING and standing.desired is not Desired.CANCEL:
        return None
    if standing.state is JobState.CANCELLING:
        return standing  # reported before the supervisor received the cancel
    if standing.state is JobState.PAUSING and standing.desired is Desired.PAUSE:
        return standing  # reported before the supervisor received the pause
    return JobStanding(reported, standing.desired)


def _settled(standing: JobStanding, state: JobState) -> JobStanding:
    """The standing after the attempt: if the job has not ended, what the user desires decides."""
    if state.ended:
        return JobStanding(state, standing.desired)
    return JobStanding(_WITHOUT_ATTEMPT[standing.desired], standing.desired)


_WITHOUT_ATTEMPT = {
    Desired.RUN: JobState.QUEUED,
    Desired.PAUSE: JobState.PAUSED,
    Desired.CANCEL: JobState.CANCELLED,
}
"""State of a job without an attempt, by what the user desires."""
