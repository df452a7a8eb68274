"""When a job is given up in a cluster that does not answer, and goes on in another one. Pure: silences in, verdict out.

    the gateway is silent, or Ray is, and so is the job's supervisor, both for longer than elasticity.wait_s
        another cluster may have the job, has room for its minimum, and reads its checkpoints    -> requeue
        that is not known yet                                                                    -> wait
        none                                                                                     -> stay, and say why

A supervisor that reports is never given up: it dials the service by itself, and its job trains. The old attempt may
train on behind a network that is cut; its storage fences it (`shoal_workers/checkpoint/beginnings.py`). Called by
`control/moving.py`, which measures the silences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from shoal_service.core.quantities import duration_text


class Verdict(StrEnum):
    WAIT = "wait"
    STAY = "stay"
    REQUEUE = "requeue"


@dataclass(frozen=True, slots=True, kw_only=True)
class SilentJob:
    """A job with an attempt in a cluster that does not answer."""

    cluster: str
    named: str
    """The only cluster in which its spec lets it run; empty: any."""
    cluster_s: float
    """Seconds in which the cluster did not answer, while this control plane was awake."""
    supervisor_s: float
    """The same, in which its supervisor did not report."""
    wait_s: float
    """`elasticity.wait_s`."""
    saved_step: int | None
    """Step of the job's newest checkpoint; None if it has none."""
    is_leaving: bool = False
    """A user has asked to pause or to cancel it."""


@dataclass(frozen=True, slots=True)
class OtherCluster:
    """Another one that answers."""

    name: str
    why_not: str | None
    """Why the job cannot go on there; empty: it can; None if that is not known yet."""


@dataclass(frozen=True, slots=True)
class LostDecision:
    verdict: Verdict
    reason: str
    """Why, with the numbers."""
    words: str = ""
    """The part of a `STAY` that stays the same while the silence goes on."""


def decide(job: SilentJob, others: Sequence[OtherCluster]) -> LostDecision:
    """`others`: in any order."""
    silent_s = min(job.cluster_s, job.supervisor_s)
    if silent_s <= job.wait_s:
        return LostDecision(
            Verdict.WAIT,
            f"the cluster {job.cluster!r} and the job's supervisor are silent for {duration_text(silent_s)}; the job "
            f"waits for {job.wait_s:g} s (elasticity.wait_s)",
        )
    lost = (
        f"the cluster {job.cluster!r} and the job's supervisor have been silent for {duration_text(silent_s)}, longer "
        f"than elasticity.wait_s ({job.wait_s:g} s)"
    )
    if job.is_leaving:
        return LostDecision(Verdict.REQUEUE, lost)
    allowed = [other for other in others if other.name != job.cluster and job.named in ("", other.name)]
    if any(cluster.why_not == "" for cluster in allowed):
        from_step = "from the start" if job.saved_step is None else f"from the checkpoint of step {job.saved_step}"
        return LostDecision(Verdict.REQUEUE, f"{lost}; it goes on in another cluster {from_step}")
    if any(cluster.why_not is None for cluster in allowed):
        return LostDecision(Verdict.WAIT, f"{lost}; whether it can go on in another one is being found out")
    message = _why_it_stays(job, allowed)
    return LostDecision(Verdict.STAY, f"{lost}, and the job stays there: {message}", message)


def _why_it_stays(job: SilentJob, allowed: Sequence[OtherCluster]) -> str:
    if job.named == job.cluster:
        return (
            f"worker.cluster is {job.named}. `shoal move JOB --to any` lets it go on in another cluster, from its "
            "newest checkpoint"
        )
    if not allowed:
        which = f"the cluster {job.named!r}, which worker.cluster names, does not answer"
        return f"{which if job.named else 'no other cluster answers'}. `shoal clusters` lists them"
    return "; ".join(
        f"in {cluster.name!r}: {cluster.why_not}" for cluster in sorted(allowed, key=lambda cluster: cluster.name)
    )
