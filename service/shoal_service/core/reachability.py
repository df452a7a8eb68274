"""Decide which hosts answer no connects. Pure: `supervisor/workers/probes.py` connects and calls `silent_nodes`.

The kernel of a host answers a connect: it accepts if a process listens at the port, and refuses if none does. No
process has to run for that. So a host that is short of CPU answers within milliseconds although its processes answer
nothing, and a host that is cut off, frozen or without power answers nothing at all. This is what distinguishes the two
(an unreliable failure detector after Chandra and Toueg, JACM 1996: it may be wrong for a while, and it takes back what
was wrong).

    probe        x   x   x   x  x  x  x  x  x        every PERIOD_S; every HURRIED_S once one is late
    answers      .   .   .
    verdict                              silent      the oldest one is THRESHOLD_S old, and MIN_UNANSWERED are late

Lateness of the prober itself counts for nothing: connects that were answered meanwhile are seen before the verdict, and
a prober that is late has made fewer connects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shoal_service.core.attempt.turn import Decision

PERIOD_S = 0.5
"""Pause between two connects to a host that answers."""
HURRIED_S = 0.2
"""Pause between two connects to a host of which one is late."""
LATE_S = 0.2
"""A connect without an answer for this long is late, if answers do not take longer anyway."""
THRESHOLD_S = 1.5
"""A host is silent if it has answered no connect for this long. A lost packet delays a connect by a second (the
kernel's first retransmission), but not the connects after it."""
MIN_UNANSWERED = 5
_LATE_FACTOR = 4.0
"""A connect is late after this many times the usual answer time, and a host silent after ten times as many."""
_KEPT = 15
_GAIN = 0.125
"""Weight of a new answer time in the moving averages, as in TCP (RFC 6298)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What is known of one host."""

    has_answered: bool = False
    answer_s: float = 0.0
    """Moving average of the seconds between a connect and its answer."""
    deviation_s: float = 0.0
    unanswered: tuple[float, ...] = ()
    """When the connects since the last answer were made, oldest first."""
    probed_at: float | None = None
    silent_because: str = ""
    """Set while the host counts as silent."""

    @property
    def late_s(self) -> float:
        return max(LATE_S, _LATE_FACTOR * self._slow_s)

    @property
    def threshold_s(self) -> float:
        return max(THRESHOLD_S, 10 * _LATE_FACTOR * self._slow_s)

    @property
    def _slow_s(self) -> float:
        """An answer that takes longer is unusual."""
        return self.answer_s + 4 * self.deviation_s


def probed(reach: Reach, now: float) -> Reach:
    """A connect was made. Of a long silence only the oldest connects are kept, and the newest one."""
    return replace(reach, unanswered=(*reach.unanswered[:_KEPT], now), probed_at=now)


def answered(reach: Reach, made_at: float, seen_at: float) -> Reach:
    """The connect that was made at `made_at` was accepted or refused. Older ones are not waited for any longer."""
    took_s = max(0.0, seen_at - made_at)
    has_average = reach.has_answered and reach.answer_s > 0
    return replace(
        reach,
        has_answered=True,
        answer_s=reach.answer_s + _GAIN * (took_s - reach.answer_s) if has_average else took_s,
        deviation_s=reach.deviation_s + _GAIN * (abs(took_s - reach.answer_s) - reach.deviation_s)
        if has_average
        else 0.0,
        unanswered=tuple(at for at in reach.unanswered if at > made_at),
        silent_because="",
    )


def next_probe_at(reach: Reach, now: float) -> float:
    """When the next connect is due."""
    if reach.probed_at is None:
        return now
    is_late = any(now - at >= reach.late_s for at in reach.unanswered)
    return reach.probed_at + (HURRIED_S if is_late and not reach.silent_because else PERIOD_S)


def is_silent(reach: Reach, now: float) -> Decision:
    """Tell whether the host is silent by now. A host that has never answered is not judged: a firewall may be
    between."""
    if not reach.has_answered:
        return Decision(False, "the host has never answered a connect")
    if reach.silent_because:
        return Decision(True, reach.silent_because)
    late = [at for at in reach.unanswered if now - at >= reach.late_s]
    if not late:
        return Decision(False, "the host answers connects")
    waited_s = now - late[0]
    reason = (
        f"no answer to {len(late)} connects in {waited_s:.1f} s, and a silent host counts as such after "
        f"{reach.threshold_s:.1f} s"
    )
    return Decision(len(late) >= MIN_UNANSWERED and waited_s >= reach.threshold_s, reason)


def silent_nodes(hosts: Mapping[str, Reach], now: float, *, own: str, head: str) -> dict[str, str]:
    """The silent nodes, with the reason. If this process's own host may be the one that is cut off, no further node is
    found silent: all other hosts are silent then, and the part of the cluster that has Ray's head goes on without it.

    Args:
        hosts: by node; `own` is not among them.
        own: the node of this process.
        head: the node of Ray's head.
    """
    decisions = {node_id: is_silent(reach, now) for node_id, reach in hosts.items() if reach.has_answered}
    silent_so_far = {node_id: reach.silent_because for node_id, reach in hosts.items() if reach.silent_because}
    if all(decisions.values()) and head != own:
        return silent_so_far
    return {node_id: decision.reason for node_id, decision in decisions.items() if decision}
