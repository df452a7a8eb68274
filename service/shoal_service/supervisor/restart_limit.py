"""Whether a supervisor that Ray restarts again and again should go on. Pure; called when a supervisor starts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

MAX_SHORT_RUNS = 8
SHORT_RUN_S = 15.0


def is_crash_loop(starts: Sequence[float]) -> bool:
    """Whether each of the last MAX_SHORT_RUNS runs ended within SHORT_RUN_S seconds of its start.

    A supervisor that dies from time to time is restarted without limit: a machine may be lost every minute. When all of
    the last runs were short, the cause is one that another restart does not remove.

    Args:
        starts: when each run of one attempt's supervisor began, wall-clock seconds, oldest first, this run included.
    """
    last = starts[-MAX_SHORT_RUNS - 1 :]
    return len(last) > MAX_SHORT_RUNS and all(later - earlier < SHORT_RUN_S for earlier, later in pairwise(last))
