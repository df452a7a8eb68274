"""Why an attempt ended and what follows from it: one exhaustive table, and the one rule for another attempt.

The store calls `decide_retry` when it applies the last report of an attempt; nothing else decides about retries.

LostAttempt: what a job had when its attempt was lost with the Ray cluster, or failed and was retried, kept until the
job trains again.

Pure. The store calls `after_end` when an attempt is over; the next attempt opens an incident from the result
(core/attempt/incidents.py), so that lost steps and the time without training have a cause.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from shoal_service.core.quantities import count_text, ranks_text
from shoal_workers.contract import EndReason, Frozen, IncidentCause, JobState, UserFailure


class AttemptEnd(Frozen):
    """How an attempt ended; the last report of its supervisor."""

    reason: EndReason
    message: str
    step: int
    failure: UserFailure | None = None
    has_run_long: bool = False
    """A script has run for a minute or more, which counts as progress also if it has reported no step."""

    @property
    def sentence(self) -> str:
        """The message; with the ranks on which the user's code has failed, if it is that of the failure and no more."""
        failure = self.failure
        if self.reason is EndReason.USER_ERROR and failure is not None and self.message == failure.sentence:
            return sentence_with_ranks(failure)
        return self.message


def sentence_with_ranks(failure: UserFailure) -> str:
    """Return the sentence of the failure with the ranks on which it was, unless it is advice."""
    is_advice = bool(failure.mistake) and failure.mistake not in _OF_SCRIPTS
    if is_advice or not failure.ranks:
        return failure.sentence
    ranks = ranks_text(failure.ranks) if len(failure.ranks) <= _MAX_RANKS else count_text(len(failure.ranks), "rank")
    return f"{failure.sentence.removesuffix('.')}, on {ranks}."


class Retry(StrEnum):
    NEVER = "never"
    """The job ends with the attempt."""
    BUDGET = "budget"
    """Back to the queue, if retry.max_failures allows it and steps were completed since the last failure."""
    FREE = "free"
    """Always back to the queue: the job did not cause the end."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What one end reason means."""

    state: JobState
    """The state of the job if no other attempt follows."""
    retry: Retry
    message: str
    """For people; the message of the supervisor has the details."""


ENDINGS: dict[EndReason, Ending] = {
    EndReason.FINISHED: Ending(JobState.SUCCEEDED, Retry.NEVER, "All steps are done."),
    EndReason.CANCELLED: Ending(JobState.CANCELLED, Retry.NEVER, "Cancelled on request."),
    EndReason.PAUSED: Ending(JobState.PAUSED, Retry.NEVER, "Paused on request; resume continues from its checkpoint."),
    EndReason.USER_ERROR: Ending(JobState.FAILED, Retry.BUDGET, "Your code raised an exception."),
    EndReason.NON_FINITE: Ending(JobState.FAILED, Retry.BUDGET, "The loss or the gradient norm is not finite."),
    EndReason.CAPACITY_TIMEOUT: Ending(
        JobState.FAILED, Retry.NEVER, "The cluster did not offer elasticity.min_workers within elasticity.wait_s."
    ),
    EndReason.RECOVERY_BUDGET: Ending(
        JobState.FAILED, Retry.NEVER, "The group was re-formed more often than retry.max_recoveries allows."
    ),
    EndReason.STORAGE_FAILED: Ending(JobState.FAILED, Retry.NEVER, "checkpoint.url could not be read or written."),
    EndReason.CHECKPOINTS_MISSING: Ending(
        JobState.FAILED, Retry.NEVER, "The job's checkpoints are not in its directory; it does not start over."
    ),
    EndReason.VALIDATION_FAILED: Ending(
        JobState.FAILED,
        Retry.NEVER,
        "All steps are done and the last checkpoint is committed, but the final validation did not complete.",
    ),
    EndReason.DAMAGED_CHECKPOINT: Ending(
        JobState.FAILED, Retry.NEVER, "Every checkpoint is damaged, and checkpoint.all_damaged is stop."
    ),
    EndReason.START_FAILED: Ending(JobState.FAILED, Retry.NEVER, "The workers could not be started."),
    EndReason.WORKERS_FAILED: Ending(
        JobState.FAILED,
        Retry.BUDGET,
        "Memory, device or operating system failed outside the task's code: on every worker, again after one was "
        "replaced, or where the supervisor runs.",
    ),
    EndReason.SERVER_STOPPED: Ending(JobState.FAILED, Retry.FREE, "The server that runs the Ray cluster was stopped."),
    EndReason.PREEMPTED: Ending(JobState.FAILED, Retry.FREE, "Its workers went to another job."),
    EndReason.MOVED: Ending(JobState.FAILED, Retry.FREE, "It moves to another cluster."),
    EndReason.CLUSTER_LOST: Ending(JobState.FAILED, Retry.FREE, "The Ray cluster was lost."),
    EndReason.SUPERVISOR_LOST: Ending(JobState.FAILED, Retry.FREE, "The job's supervisor was lost."),
    EndReason.INTERNAL: Ending(JobState.FAILED, Retry.BUDGET, "A fault inside Shoal; please report it."),
}


_MISTAKEN = "The task cannot be trained as it is."
"""Replaces the message of USER_ERROR if Shoal knows the mistake or has refused the task: nothing was raised then."""
REPEATED = "repeated_end"
"""Value of `UserFailure.mistake`: a script has ended in the same way several times in a row without progress."""
_OF_SCRIPTS = {"exit_status": "The script has failed."}
"""The same for mistakes that only a script makes."""
_MAX_RANKS = 8
"""Ranks that a message names."""


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """What a job has used of its retry budget."""

    failures: int
    """Failures that were charged to the budget so far."""
    last_step: int
    """Completed steps when the last failure was charged; 0: none was."""
    max_failures: int
    """retry.max_failures."""


@dataclass(frozen=True, slots=True)
class RetryDecision:
    again: bool
    charged: bool
    """It is charged to retry.max_failures."""
    reason: str
    """Why, with the numbers."""


def decide_retry(
    reason: EndReason, step: int, record: FailureRecord, *, mistake: str = "", has_run_long: bool = False
) -> RetryDecision:
    """Tell whether another attempt follows one that ended after `step` steps.

    A failure without a completed step since the last one is final, whatever the budget is. Without this rule an error
    in building the model would be repeated until the budget is used up, and the user would read about it much later.
    `has_run_long`: of the attempt's end (`AttemptEnd`); it counts as much as a completed step.
    `mistake`: of the failure (`UserFailure`); the message then says what is wrong, and nothing was raised by the task.
    """
    ending = ENDINGS[reason]
    is_mistaken = bool(mistake) and reason is EndReason.USER_ERROR
    message = _OF_SCRIPTS.get(mistake, _MISTAKEN) if is_mistaken else ending.message
    if ending.retry is Retry.FREE:
        return RetryDecision(True, False, f"{ending.message} Back to the queue with {count_text(step, 'step')} kept.")
    if ending.retry is Retry.NEVER:
        return RetryDecision(False, False, ending.message)
    if mistake == REPEATED:
        return RetryDecision(False, True, "Not retried: it would end in the same way again.")
    if step <= record.last_step and not has_run_long:
        return RetryDecision(
            False,
            True,
            f"{message} Not retried: "
            + (
                f"it failed again at step {record.last_step} without progress."
                if record.failures
                else "no step was completed."
            ),
        )
    if record.failures >= record.max_failures:
        return RetryDecision(
            False, True, f"{message} Not retried: retry.max_failures {record.max_failures} is used up."
        )
    since = f"{count_text(step - record.last_step, 'step')} completed" + (" since the last" if record.failures else "")
    if step <= record.last_step:
        since = "after a minute or more"
    return RetryDecision(
        True,
        True,
        f"{message} Retrying from the newest checkpoint: retry {record.failures + 1} of at most {record.max_failures}, "
        f"{since}.",
    )


_LOSSES = (EndReason.SUPERVISOR_LOST, EndReason.CLUSTER_LOST)
_SAVING = (EndReason.SERVER_STOPPED, EndReason.PREEMPTED, EndReason.MOVED)
"""Nothing is lost, unless the storage could not be written."""


class LostAttempt(Frozen):
    """An attempt whose supervisor and workers are gone, and with them the steps since its newest checkpoint."""

    attempt: int
    generation: int
    workers: int
    layout: str
    step: int
    """Its newest completed step that was reported."""
    at: float
    """When the control plane noticed, or ended the cluster itself."""
    last_report_at: float | None
    """Wall-clock time of its last stored report."""
    message: str
    cause: IncidentCause = IncidentCause.CLUSTER_LOST


def after_end(
    lost_before: LostAttempt | None, ended: LostAttempt, reason: EndReason, *, saved_step: int, is_retried: bool = False
) -> LostAttempt | None:
    """Return what the job has lost by now; None if nothing.

    Args:
        lost_before: None if a step was completed since.
        ended: the attempt that is over.
        saved_step: step of its newest checkpoint.
        is_retried: it has failed, and another one follows.
    """
    if is_retried:
        ended = ended.model_copy(update={"cause": IncidentCause.RETRIED})
    is_lost = is_retried or reason in _LOSSES or (reason in _SAVING and saved_step < ended.step)
    if lost_before is None:
        return ended if is_lost else None
    return ended.model_copy(update={"step": max(lost_before.step, ended.step)}) if is_lost else lost_before
