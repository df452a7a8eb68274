"""Which checkpoint a new job goes on from, and which checkpoints of a job others still need.

job A   step-40  step-60  step-80          job B   continue_from: {job: A, step: 60}
                    ^--- held for B -----------------'  until B has a checkpoint of its own, or has ended
"""

from __future__ import annotations

from collections.abc import Collection

from shoal_service.core.quantities import count_text
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.spec import ContinueFrom, StopSpec

_SHOWN = 8


class NoSuchCheckpoint(ValueError):
    """The job cannot go on from what `continue_from` names; the message names the way out."""

    code = "no_such_checkpoint"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


def choose(wanted: ContinueFrom, committed: Collection[CheckpointName], stop: StopSpec) -> CheckpointName:
    """The newest of the other job's good checkpoints, or the newest of the step that is asked for.

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
    if stop.steps is not None and stop.steps <= chosen.step:
        raise NoSuchCheckpoint(
            f"continue_from: job {wanted.job}'s checkpoint has "
            f"{count_text(chosen.step, 'completed step')}, and stop.steps is "
            f"{stop.steps}, so nothing is left to train. The steps count on from there: set stop.steps to more than "
            f"{chosen.step}."
        )
    return chosen
