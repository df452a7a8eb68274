"""Which gateway speaks for a cluster. Pure; the store calls it with each report, while it holds the cluster's row.

A gateway has a random *life*, new with each start. One life at a time speaks for a cluster: reports and answers of
another one are refused.

    no gateway speaks, or the last one has said that it ends      the new life speaks
    the one that speaks has been silent for SILENT_S              the new life speaks
    a process that has just started shows the same token          the new life speaks: one token is one gateway
    else                                                          refused; it stands by, and asks again

A name is that of one Ray cluster. A report from another one (each has an id, which a restarted head keeps if its tables
are on disk) counts only if its gateway shows the same token or was asked to take the name over, the gateway before is
silent, and so are the supervisors of the jobs there. So a Ray cluster that was made anew goes on under its name, and
two that were given one name by mistake do not take each other's jobs.

    another token, and not asked to take over                     barred; it ends, and says so
    the gateway before or a supervisor has reported lately        refused; it stands by, and asks again
    no Ray cluster is known yet, and one had this name            refused while the gateway before reports

Also whether a gateway that a server has started hangs (`hangs`): one that does not reports, or stands by for one that
reports.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

SILENT_S = 3.0
"""A gateway reports once a second."""
JOBS_SILENT_S = 5.0
"""A supervisor does so too."""


@dataclass(frozen=True, slots=True)
class Speaker:
    """The gateway that speaks for a cluster."""

    life: str
    """Life of the gateway; empty: no gateway speaks."""
    token_id: str
    number: int
    """Number of the gateway's newest report."""
    reported_at: float
    ray_cluster: str = ""
    """Id of the Ray cluster that has this name; empty: not known. It stays when no gateway speaks any more."""
    jobs_reported_at: float = 0.0
    """When a supervisor there has reported last. Only looked up if the report comes from another Ray cluster."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """What a report says about the one who sends it."""

    life: str
    token_id: str
    number: int
    takes_over: bool
    """Its process has just started."""
    ray_cluster: str = ""
    """Id of its Ray cluster; empty: Ray has not answered it yet."""
    replaces: bool = False
    """It was asked to take the name over from another Ray cluster."""


class Verdict(StrEnum):
    NEW_LIFE = "new_life"
    """Another gateway speaks from now on."""
    NEWER = "newer"
    """The next report of the same gateway."""
    REPEATED = "repeated"
    """A report that was stored before, or one that a later report has overtaken."""
    REFUSED = "refused"
    """It may ask again."""
    BARRED = "barred"
    """It never speaks for this cluster."""


@dataclass(frozen=True, slots=True)
class Admission:
    verdict: Verdict
    reason: str
    """Why, with the numbers; for people if it is refused."""


def admit(cluster: str, speaker: Speaker, incoming: Incoming, now: float) -> Admission:
    """What becomes of a report. `now` and `Speaker.reported_at` are wall-clock times of the service."""
    silent_s = now - speaker.reported_at
    is_repeated = incoming.life == speaker.life and incoming.number <= speaker.number
    if is_of_another(speaker, incoming) and not is_repeated:
        return _of_another(cluster, speaker, incoming, now)
    if not speaker.life:
        return Admission(Verdict.NEW_LIFE, "no gateway spoke for the cluster")
    if incoming.life == speaker.life:
        if incoming.number > speaker.number:
            return Admission(Verdict.NEWER, f"report {incoming.number} after {speaker.number}")
        return Admission(Verdict.REPEATED, f"report {incoming.number}, and {speaker.number} is stored")
    is_known = bool(incoming.ray_cluster) or not speaker.ray_cluster
    if incoming.takes_over and incoming.token_id == speaker.token_id and is_known:
        return Admission(Verdict.NEW_LIFE, "the gateway with this token has started again")
    if _is_silent(silent_s):
        return Admission(Verdict.NEW_LIFE, f"the gateway before it was silent for {silent_s:.1f} s")
    return Admission(
        Verdict.REFUSED,
        f"Another gateway speaks for the cluster {cluster!r}: it has reported {max(0.0, silent_s):.1f} s ago. This one "
        f"stands by until that one has been silent for {SILENT_S:g} s. If this is another cluster, give it another "
        "name (--name).",
    )


def is_of_another(speaker: Speaker, incoming: Incoming) -> bool:
    """The report comes from another Ray cluster than the one that has the name, or may do so."""
    if not speaker.ray_cluster or incoming.ray_cluster == speaker.ray_cluster:
        return False
    # A gateway whose Ray does not answer yet speaks with the token of the one before, which has reached this one.
    return bool(incoming.ray_cluster) or incoming.token_id != speaker.token_id


def _of_another(cluster: str, speaker: Speaker, incoming: Incoming, now: float) -> Admission:
    silent_s, jobs_silent_s = now - speaker.reported_at, now - speaker.jobs_reported_at
    if not incoming.ray_cluster:
        return Admission(
            Verdict.REFUSED,
            f"Another gateway has spoken for the cluster {cluster!r}. This one stands by until its Ray cluster answers "
            "it, and says which one it is.",
        )
    if incoming.token_id != speaker.token_id and not incoming.replaces:
        return Admission(
            Verdict.BARRED,
            f"The name {cluster!r} is that of another Ray cluster ({speaker.ray_cluster[:8]}, this one is "
            f"{incoming.ray_cluster[:8]}). Give this one a name of its own (--name), or, if that one is gone for good, "
            "let this one take its name over (--replace).",
        )
    stands_by = (
        f"This one is {incoming.ray_cluster[:8]} and stands by. If both shall run, give it another name (--name)."
    )
    if incoming.life != speaker.life and speaker.life and not _is_silent(silent_s):
        return Admission(
            Verdict.REFUSED,
            f"The gateway of another Ray cluster ({speaker.ray_cluster[:8]}) speaks for the cluster {cluster!r}: it "
            f"has reported {max(0.0, silent_s):.1f} s ago. {stands_by}",
        )
    if -JOBS_SILENT_S <= jobs_silent_s < JOBS_SILENT_S:
        return Admission(
            Verdict.REFUSED,
            f"Jobs train in the Ray cluster that has the name {cluster!r} ({speaker.ray_cluster[:8]}): the last one "
            f"has reported {max(0.0, jobs_silent_s):.1f} s ago. {stands_by}",
        )
    verdict = Verdict.NEWER if incoming.life == speaker.life else Verdict.NEW_LIFE
    return Admission(verdict, f"the Ray cluster {speaker.ray_cluster[:8]} is gone, and this one has its name")


def _is_silent(silent_s: float) -> bool:
    return silent_s >= SILENT_S or silent_s < -SILENT_S  # the second: the clock was set back


@dataclass(frozen=True, slots=True, kw_only=True)
class HangLimits:
    """When a gateway whose process lives is taken for one that hangs. Both are doubled with each one that was killed in
    vain."""

    silent_s: float = 15.0
    """No report of the cluster for this long."""
    start_s: float = 120.0
    """The same until the first report: Python, Ray's client and a head that does not answer take their time."""
    longest_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedGateway:
    """What a server knows of the gateway that it has started."""

    report: tuple[str, int] | None = None
    """Life and number of the newest report of the cluster, also of another gateway; None if it has not looked yet."""
    silent_s: float = 0.0
    """Since that report, or the start of the process, in time in which this server could have seen one."""
    has_reported: bool = False
    """A report has come since the start of the process."""
    num_killed: int = 0
    """Processes that were killed since a report has come."""


def watched(gateway: WatchedGateway, report: tuple[str, int], after_s: float) -> WatchedGateway:
    """The gateway as it is after a look at the newest report. `after_s`: seconds since the look before, and not more
    than this server was awake."""
    if gateway.report is None:
        return replace(gateway, report=report)
    if report == gateway.report:
        return replace(gateway, silent_s=gateway.silent_s + after_s)
    return WatchedGateway(report=report, has_reported=True)


def replaced(gateway: WatchedGateway) -> WatchedGateway:
    """It was killed, and another process is started."""
    return WatchedGateway(num_killed=gateway.num_killed + 1)


def hangs(gateway: WatchedGateway, limits: HangLimits) -> str:
    """Why the process, which lives, has to be killed; empty: it need not."""
    limit_s = limits.silent_s if gateway.has_reported else limits.start_s
    limit_s = min(limits.longest_s, limit_s * 2.0 ** min(gateway.num_killed, 10))
    if gateway.silent_s < limit_s:
        return ""
    since = "" if gateway.has_reported else " since its start"
    return f"its process lives and has not reported for {gateway.silent_s:.0f} s{since}: it hangs"
