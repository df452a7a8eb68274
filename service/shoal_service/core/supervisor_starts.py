"""Whether a supervisor that never gets to record its start is started again. Pure; called by `control/driver.py`.

    its actor cannot be created            start it again after 1, 2, 4 and 8 s; five failures end the attempt
    its process dies, Ray starts another   nine processes in a row that claimed no life in the journal end the attempt

A supervisor that has recorded its start judges itself, see supervisor/restart_limit.py. This one cannot: it died while
its process was set up, or its node lacks what it needs.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_FAILED_STARTS = 5
MAX_UNRECORDED_STARTS = 8
"""As many as `restart_limit.MAX_SHORT_RUNS`."""


@dataclass(frozen=True, slots=True)
class StartDecision:
    again: bool
    after_s: float
    """Pause before the next start; 0 if there is none."""
    reason: str


def after_failure(num_failed: int, error: str) -> StartDecision:
    """`num_failed`: starts of this attempt's supervisor that failed in a row, this one included."""
    if num_failed >= MAX_FAILED_STARTS:
        return StartDecision(False, 0.0, f"the supervisor could not be started {num_failed} times in a row: {error}")
    after_s = 2.0 ** (num_failed - 1)
    return StartDecision(True, after_s, f"start {num_failed} of at most {MAX_FAILED_STARTS} failed: {error}")


def while_unanswered(num_unrecorded: int, known_before: int) -> StartDecision:
    """Whether Ray may go on starting it.

    Args:
        num_unrecorded: processes of this supervisor that were started and have claimed no life, in all.
        known_before: the same, when it last answered.
    """
    num_in_vain = num_unrecorded - known_before
    if num_in_vain > MAX_UNRECORDED_STARTS:
        return StartDecision(
            False,
            0.0,
            f"the supervisor's process died {num_in_vain - 1} times in a row before it recorded its start. See the "
            "logs of the Ray workers on its node.",
        )
    return StartDecision(True, 0.0, f"{num_in_vain} of at most {MAX_UNRECORDED_STARTS} starts are not recorded")
