"""A job's whole life beyond one run: which checkpoint it begins from, and whether an ended job may go on.

Pure decisions, called by the store. Nothing here reads a checkpoint or starts a worker. A checkpoint of another job is
held as long as a job that continues from it needs it:

job A   step-40  step-60  step-80          job B   continue_from: {job: A, step: 60}
                    ^--- held for B -----------------'  until B has a checkpoint of its own, or has ended

An ended job goes on with `shoal extend` or `shoal retry`:

SUCCEEDED | FAILED | CANCELLED  --extend to N steps-->  QUEUED, from its newest checkpoint
FAILED                          --retry-->              QUEUED, from its newest checkpoint, with a new retry budget
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from shoal_service.core.quantities import count_text
from shoal_workers.contract import CheckpointName, ContinueFrom, JobState, StopSpec
from shoal_workers.contract.base import FieldError

_SHOWN = 8


@dataclass(eq=False)
class NoSuchCheckpoint(FieldError, ValueError, text="{message}"):
    """The job cannot go on from what `continue_from` names; the message names the way out."""

    code = "no_such_checkpoint"
    message: str


def choose(wanted: ContinueFrom, committed: Collection[CheckpointName], stop: StopSpec | None) -> CheckpointName:
    """The newest of the other job's good checkpoints, or the newest of the step that is asked for. `stop`: None: a loop
    decides when it ends.

    Raises:
        NoSuchCheckpoint: there is none, or nothing would be left to train.
    """
    if not committed:
        raise NoSuchCheckpoint(f"continue_from.job {wanted.job} has no checkpoint in its storage.")
    fitting = [name for name in committed if wanted.step is None or name.step == wanted.step]
    if not fitting:
        steps = sorted({name.step for name in committed})
        shown = ", ".join(map(str, steps[-_SHOWN:]))
        more = f" and {len(steps) - _SHOWN} older ones" if len(steps) > _SHOWN else ""
        raise NoSuchCheckpoint(
            f"continue_from.step {wanted.step}: job {wanted.job} has no checkpoint of this step. It has those of "
            f"{'step' if len(steps) == 1 else 'steps'} {shown}{more}."
        )
    chosen = max(fitting)
    if stop is not None and stop.steps is not None and stop.steps <= chosen.step:
        raise NoSuchCheckpoint(
            f"continue_from: job {wanted.job}'s checkpoint has "
            f"{count_text(chosen.step, 'completed step')}, and stop.steps is "
            f"{stop.steps}, so nothing is left to train. The steps count on from there: set stop.steps to more than "
            f"{chosen.step}."
        )
    return chosen


@dataclass(frozen=True, slots=True)
class Training:
    """What is known of a job's training."""

    state: JobState
    step: int
    """Completed steps."""
    stop: StopSpec | None
    """None if a script decides when it ends."""
    has_checkpoint: bool
    """A good one of its own, or one of another job that it goes on from."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Empty `problem`: it is done; `reopens`: the ended job returns to the queue."""

    problem: str = ""
    reopens: bool = False


def extension(training: Training, steps: int) -> Answer:
    """Tell whether the job may go on to `steps` steps in all."""
    if training.stop is None:
        return Answer(
            "be extended: its script decides when it ends. Submit the script again with other arguments (script.args)"
        )
    if steps <= training.step:
        problem = f"be extended to {count_text(steps, 'step')}: {training.step} done. Give more than {training.step}"
        return Answer(problem)
    if not training.state.ended:
        if training.stop.steps is not None and steps <= training.stop.steps:
            return Answer(
                f"be extended to {count_text(steps, 'step')}: it goes on to stop.steps {training.stop.steps} "
                "already. PATCH `stop` "
                "shortens it"
            )
        return Answer()
    if training.step and not training.has_checkpoint:
        return Answer(
            f"be extended: it has no checkpoint any more, so its {count_text(training.step, 'step')} would begin again"
        )
    return Answer(reopens=True)


def retrial(training: Training) -> Answer:
    """Tell whether the job may try again in place."""
    if training.state is JobState.FAILED:
        return Answer(reopens=True)
    way_out = {
        JobState.SUCCEEDED: "all its steps are done; `shoal extend` gives it more",
        JobState.CANCELLED: "it was cancelled; `shoal submit --from` goes on from its checkpoint as a new job",
    }
    if training.stop is None:
        way_out = {
            JobState.SUCCEEDED: "its script is done; submit it again",
            JobState.CANCELLED: "it was cancelled; submit it again",
        }
    return Answer(f"be tried again: {way_out.get(training.state, 'it has not failed')}")


def is_outdated_end(step: int, before: StopSpec, now: StopSpec) -> bool:
    """An attempt that has reached the end of its spec: whether a newer version of the spec has more steps, of which the
    attempt did not know in time.

    Args:
        step: completed steps. `before`: the attempt's `stop`. `now`: the newest.
    """
    return before != now and (now.steps is None or now.steps > step)
