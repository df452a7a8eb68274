"""When a failed delivery is tried again, and when it is given up. Pure; `now` is passed in.

A lane is one hook for one job. Its events are delivered in order: while one fails, the later ones wait.

    event 7   x  1 s  x  2 s  x  4 s  x ... 600 s  x ... 600 s  x     24 h after its first failure: given up,
    event 8   waits                                                   and with it all that have waited as long
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Durations in seconds."""

    first_s: float = 1.0
    """Pause before the second attempt; it doubles with each failure, up to `longest_s`."""
    longest_s: float = 600.0
    """Longest pause between two attempts."""
    give_up_s: float = 86_400.0
    """An event is given up after it has waited this long for a receiver that fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """What is known of the failures of a lane since its last success."""

    num_failed: int = 0
    failing_since: float | None = None
    """Wall-clock time of the first failure."""
    next_at: float | None = None
    """Wall-clock time of the next attempt; None: at once."""

    def is_due(self, now: float) -> bool:
        return self.next_at is None or self.next_at <= now


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What follows from a failed attempt."""

    retries: Retries
    num_given_up: int
    """Events at the head of the lane that are not tried any more."""
    reason: str


def after_failure(
    before: Retries, waiting: Sequence[float], *, now: float, spread: float, policy: RetryPolicy
) -> Verdict:
    """The attempt to deliver the first of the waiting events has failed at `now`.

    Args:
        waiting: wall-clock times of the waiting events, in their order; the first one has failed.
        spread: 0 to 1, different for each lane, so that lanes that failed together are not tried together.
    """
    assert waiting, "an attempt delivers an event"
    num_failed = before.num_failed + 1
    since = now if before.failing_since is None else min(before.failing_since, now)
    pause_s = min(policy.longest_s, policy.first_s * 2.0 ** min(num_failed - 1, 60)) * (0.75 + spread / 2)
    expired = 0
    for at in waiting:
        if now - max(at, since) < policy.give_up_s:
            break
        expired += 1
    return Verdict(
        retries=Retries(num_failed=num_failed, failing_since=since, next_at=now + pause_s),
        num_given_up=expired,
        reason=f"failure {num_failed} in {now - since:.0f} s, next attempt in {pause_s:.1f} s"
        + (f", {expired} of {len(waiting)} given up after {policy.give_up_s:.0f} s" if expired else ""),
    )
