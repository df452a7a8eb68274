"""Why an attempt ended, and what follows from it: one exhaustive table, and the one rule for trying again.

Pure. Read by the store when it applies the last news of an attempt; nobody else decides about retries.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from shoal_workers.contract.base import Frozen
from shoal_workers.contract.job import EndReason, JobState, UserFailure


class AttemptEnd(Frozen):
    """How an attempt ended; the last report of its supervisor."""

    reason: EndReason
    message: str
    step: int
    failure: UserFailure | None = None


class Retry(StrEnum):
    NEVER = "never"
    """The job ends with the attempt."""
    BUDGET = "budget"
    """Back to the queue while retry.max_failures lasts and steps were made since the failure before."""
    FREE = "free"
    """Back to the queue always: nothing that the job did ended the attempt."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What one end reason means."""

    state: JobState
    """Where the job goes when it is not tried again."""
    retry: Retry
    words: str
    """For people; the supervisor's own message says the particulars."""


ENDINGS: dict[EndReason, Ending] = {
    EndReason.FINISHED: Ending(JobState.SUCCEEDED, Retry.NEVER, "All steps are done."),
    EndReason.CANCELLED: Ending(JobState.CANCELLED, Retry.NEVER, "Cancelled on request."),
    EndReason.PAUSED: Ending(JobState.PAUSED, Retry.NEVER, "Paused on request; resume continues from its checkpoint."),
    EndReason.USER_ERROR: Ending(JobState.FAILED, Retry.BUDGET, "The task's own code raised an exception."),
    EndReason.NON_FINITE: Ending(JobState.FAILED, Retry.BUDGET, "The loss or the gradient norm is not finite."),
    EndReason.CAPACITY_TIMEOUT: Ending(
        JobState.FAILED, Retry.NEVER, "The cluster did not offer elasticity.min_workers within elasticity.wait_s."
    ),
    EndReason.RECOVERY_BUDGET: Ending(
        JobState.FAILED, Retry.NEVER, "The group was re-formed retry.max_recoveries times; something kills workers."
    ),
    EndReason.STORAGE_FAILED: Ending(JobState.FAILED, Retry.NEVER, "checkpoint.url could not be read or written."),
    EndReason.START_FAILED: Ending(JobState.FAILED, Retry.NEVER, "The workers could not be started."),
    EndReason.CLUSTER_LOST: Ending(JobState.FAILED, Retry.FREE, "The Ray cluster went away under the job."),
    EndReason.SUPERVISOR_LOST: Ending(JobState.FAILED, Retry.FREE, "The job's supervisor was lost."),
    EndReason.INTERNAL: Ending(JobState.FAILED, Retry.BUDGET, "A fault inside Shoal; please report it."),
}


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """What a job has already spent of its budget."""

    failures: int
    """Failures that were charged so far."""
    last_step: int
    """Steps done when the last one was charged; 0: none was."""
    max_failures: int
    """retry.max_failures."""


@dataclass(frozen=True, slots=True)
class RetryDecision:
    again: bool
    charged: bool
    """It counts against retry.max_failures."""
    reason: str
    """With the numbers."""


def decide_retry(reason: EndReason, step: int, record: FailureRecord) -> RetryDecision:
    """Whether an attempt that ended after `step` steps is followed by another one.

    A failure without progress since the last one is final, whatever the budget: an error in build or in step 1 would
    otherwise be repeated until the budget is gone, and the user would read about it that much later.
    """
    ending = ENDINGS[reason]
    if ending.retry is Retry.FREE:
        return RetryDecision(True, False, f"{ending.words} Back to the queue with {step} steps kept.")
    if ending.retry is Retry.NEVER:
        return RetryDecision(False, False, ending.words)
    if step <= record.last_step:
        return RetryDecision(
            False,
            True,
            f"{ending.words} Not tried again: no step was made since "
            + (f"the last failure (step {record.last_step})." if record.failures else "the start."),
        )
    if record.failures >= record.max_failures:
        return RetryDecision(
            False, True, f"{ending.words} Not tried again: retry.max_failures {record.max_failures} is used up."
        )
    return RetryDecision(
        True,
        True,
        f"{ending.words} Trying again from the newest checkpoint: failure {record.failures + 1} of at most "
        f"{record.max_failures}, {step - record.last_step} steps were made since the last.",
    )
