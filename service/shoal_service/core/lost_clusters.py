"""Decides when a job leaves a cluster that does not answer. Pure: seconds without an answer in, verdict out.

    neither the cluster (its gateway or its Ray) nor the job's supervisor has answered for elasticity.wait_s
        another cluster may run the job, has room for its minimum, and reads its checkpoints   -> requeue
        another cluster may run the job, but has not yet said if it can                        -> wait
        no other cluster can run the job                                                       -> stay, with the reason

A job stays while its supervisor reports: then it still trains, although its cluster does not answer. The old attempt
may train on behind a network that is cut; its storage fences it (`shoal_workers/checkpoint/beginnings.py`).
`control/moving.py` measures the seconds.
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
    named_cluster: str
    """The only cluster in which its spec lets it run; empty if any."""
    cluster_s: float
    """Seconds in which the cluster did not answer, while this control plane was awake."""
    supervisor_s: float
    """Seconds in which the supervisor did not report, while this control plane was awake."""
    wait_s: float
    """`elasticity.wait_s`."""
    saved_step: int | None
    """Step of the job's newest checkpoint; None if it has none."""
    is_leaving: bool = False
    """A user has asked to pause or to cancel it."""


@dataclass(frozen=True, slots=True)
class OtherCluster:
    """A cluster that answers, and is not that of the job."""

    name: str
    why_not: str | None
    """Why the job cannot go on there; empty if it can, None if that is not known yet."""


@dataclass(frozen=True, slots=True)
class LostDecision:
    verdict: Verdict
    reason: str
    """Why, with the numbers."""
    obstacle: str = ""
    """The part of the reason of a `STAY` that has no seconds in it, so it changes only with the facts."""


def decide(job: SilentJob, others: Sequence[OtherCluster]) -> LostDecision:
    """Decide about one job; the order of `others` does not matter."""
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
    allowed = [other for other in others if other.name != job.cluster and job.named_cluster in ("", other.name)]
    if any(cluster.why_not == "" for cluster in allowed):
        from_step = "from the start" if job.saved_step is None else f"from the checkpoint of step {job.saved_step}"
        return LostDecision(Verdict.REQUEUE, f"{lost}; it goes on in another cluster {from_step}")
    if any(cluster.why_not is None for cluster in allowed):
        return LostDecision(Verdict.WAIT, f"{lost}; the job waits until another cluster says if it can run it")
    obstacle = _describe_obstacle(job, allowed)
    return LostDecision(Verdict.STAY, f"{lost}, and the job stays there: {obstacle}", obstacle)


def _describe_obstacle(job: SilentJob, allowed: Sequence[OtherCluster]) -> str:
    if job.named_cluster == job.cluster:
        return (
            f"worker.cluster is {job.named_cluster}. `shoal move JOB --to any` lets it go on in another cluster, from "
            "its newest checkpoint"
        )
    if not allowed:
        missing = f"the cluster {job.named_cluster!r}, which worker.cluster names, does not answer"
        return f"{missing if job.named_cluster else 'no other cluster answers'}. `shoal clusters` lists them"
    return "; ".join(
        f"in {cluster.name!r}: {cluster.why_not}" for cluster in sorted(allowed, key=lambda cluster: cluster.name)
    )
