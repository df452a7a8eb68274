"""Whether a supervisor that Ray restarts again and again shall go on. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

MAX_SHORT_LIVES = 8
SHORT_LIFE_S = 15.0


def is_crash_loop(births: Sequence[float]) -> bool:
    """`births`: when each life of one attempt's supervisor began, wall-clock seconds, oldest first, this one included.

    One that dies now and then is restarted for ever: a machine may be lost every minute. One whose last lives were all
    short dies of something that another life will not cure.
    """
    last = births[-MAX_SHORT_LIVES - 1 :]
    return len(last) > MAX_SHORT_LIVES and all(later - earlier < SHORT_LIFE_S for earlier, later in pairwise(last))
