"""How long the control loop pauses after a pass. Called by the control loop."""

from __future__ import annotations

_MIN_S = 0.2
"""A burst of changes causes one pass, not one pass each."""
_MAX_S = 1.0
"""An urgent job must not wait longer for its decision, also if passes are slow because the machine is busy."""
_IDLE_SHARE = 9.0
"""A pause is at least this many times as long as the pass before it: a long queue must not take the time of the HTTP
edge."""
_REQUEST_SHARE = 1.0
"""The same factor if a user has asked for something, or workers are free. Training jobs report all the time, and an
urgent job must not wait for the end of a pause that protects from those reports."""


def pauses_after(pass_s: float) -> tuple[float, float]:
    """Seconds until the next pass if a user has asked for something or workers are free, and if only jobs reported."""
    return _within(_REQUEST_SHARE * pass_s), _within(_IDLE_SHARE * pass_s)


def _within(wanted_s: float) -> float:
    return min(_MAX_S, max(_MIN_S, wanted_s))
