"""Which gateway speaks for a cluster. Pure; the store calls it with each report, while it holds the cluster's row.

A gateway has a random *life*, new with each start. One life at a time speaks for a cluster: reports and answers of
another one are refused.

    nobody speaks, or the last one has said that it ends          the new life speaks
    the one that speaks has been silent for SILENT_S              the new life speaks
    a process that has just started shows the same token          the new life speaks: one token is one gateway
    else                                                          refused; it stands by, and asks again
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

SILENT_S = 3.0
"""A gateway reports once a second."""


@dataclass(frozen=True, slots=True)
class Speaker:
    """The gateway that speaks for a cluster."""

    life: str
    """Empty: nobody speaks."""
    token_id: str
    number: int
    """Of its newest report."""
    reported_at: float


@dataclass(frozen=True, slots=True)
class Incoming:
    """What a report says about the one who sends it."""

    life: str
    token_id: str
    number: int
    takes_over: bool
    """Its process has just started."""


class Verdict(StrEnum):
    NEW_LIFE = "new_life"
    """Another gateway speaks from now on."""
    NEWER = "newer"
    """The next report of the same gateway."""
    REPEATED = "repeated"
    """A report that was stored before, or one that a later report has overtaken."""
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Admission:
    verdict: Verdict
    reason: str
    """With the numbers; for people if it is refused."""


def admit(cluster: str, speaker: Speaker, incoming: Incoming, now: float) -> Admission:
    """What becomes of a report. `now` and `Speaker.reported_at` are wall-clock times of the service."""
    silent_s = now - speaker.reported_at
    if not speaker.life:
        return Admission(Verdict.NEW_LIFE, "nobody spoke for the cluster")
    if incoming.life == speaker.life:
        if incoming.number > speaker.number:
            return Admission(Verdict.NEWER, f"report {incoming.number} after {speaker.number}")
        return Admission(Verdict.REPEATED, f"report {incoming.number}, and {speaker.number} is stored")
    if incoming.takes_over and incoming.token_id == speaker.token_id:
        return Admission(Verdict.NEW_LIFE, "the gateway with this token has started again")
    if silent_s >= SILENT_S or silent_s < -SILENT_S:  # the second: the clock was set back
        return Admission(Verdict.NEW_LIFE, f"the gateway before it was silent for {silent_s:.1f} s")
    return Admission(
        Verdict.REFUSED,
        f"Another gateway speaks for the cluster {cluster!r}: it has reported {max(0.0, silent_s):.1f} s ago. This one "
        f"stands by until that one has been silent for {SILENT_S:g} s. If this is another cluster, give it another "
        "name (--name).",
    )
