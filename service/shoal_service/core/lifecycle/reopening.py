"""Whether an ended job may go on, and to which step: `shoal extend` and `shoal retry`.

SUCCEEDED | FAILED | CANCELLED  --extend to N steps-->  QUEUED, from its newest checkpoint
FAILED                          --retry-->              QUEUED, from its newest checkpoint, with a new retry budget
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal_service.core.quantities import count_text
from shoal_workers.contract.job import JobState
from shoal_workers.contract.spec import StopSpec


@dataclass(frozen=True, slots=True)
class Course:
    """What is known of a job's training."""

    state: JobState
    step: int
    """Completed steps."""
    stop: StopSpec
    has_checkpoint: bool
    """A good one of its own, or one of another job that it goes on from."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Empty `problem`: it is done; `reopens`: the ended job returns to the queue."""

    problem: str = ""
    reopens: bool = False


def extension(course: Course, steps: int) -> Answer:
    """Whether the job may go on to `steps` steps in all."""
    if steps <= course.step:
        return Answer(f"be extended to {count_text(steps, 'step')}: {course.step} done. Give more than {course.step}")
    if not course.state.ended:
        if course.stop.steps is not None and steps <= course.stop.steps:
            return Answer(
                f"be extended to {count_text(steps, 'step')}: it goes on to stop.steps {course.stop.steps} "
                "already. PATCH `stop` "
                "shortens it"
            )
        return Answer()
    if course.step and not course.has_checkpoint:
        return Answer(
            f"be extended: it has no checkpoint any more, so its {count_text(course.step, 'step')} would begin again"
        )
    return Answer(reopens=True)


def retrial(course: Course) -> Answer:
    """Whether the job may try again in place."""
    if course.state is JobState.FAILED:
        return Answer(reopens=True)
    way_out = {
        JobState.SUCCEEDED: "all its steps are done; `shoal extend` gives it more",
        JobState.CANCELLED: "it was cancelled; `shoal submit --from` goes on from its checkpoint as a new job",
    }.get(course.state, "it has not failed")
    return Answer(f"be tried again: {way_out}")


def is_outdated_end(step: int, before: StopSpec, now: StopSpec) -> bool:
    """An attempt that has reached the end of its spec: whether a newer version of the spec has more steps, of which the
    attempt did not know in time.

    Args:
        step: completed steps. `before`: the attempt's `stop`. `now`: the newest.
    """
    return before != now and (now.steps is None or now.steps > step)
