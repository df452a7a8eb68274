"""LostAttempt: what a job had when its attempt was lost with the Ray cluster, or failed and was retried, kept until the
job trains again.

Pure. The store calls `after_end` when an attempt is over; the next attempt opens an incident from the result
(core/attempt/incidents.py), so that lost steps and the time without training have a cause.
"""

from __future__ import annotations

from shoal_workers.contract.base import Frozen
from shoal_workers.contract.job import EndReason, IncidentCause

_LOSSES = (EndReason.SUPERVISOR_LOST, EndReason.CLUSTER_LOST)
_SAVING = (EndReason.SERVER_STOPPED, EndReason.PREEMPTED, EndReason.MOVED)
"""Nothing is lost, unless the storage could not be written."""


class LostAttempt(Frozen):
    """An attempt whose supervisor and workers are gone, and with them the steps since its newest checkpoint."""

    attempt: int
    generation: int
    workers: int
    layout: str
    step: int
    """Its newest completed step that was reported."""
    at: float
    """When the control plane noticed, or ended the cluster itself."""
    last_report_at: float | None
    """Wall-clock time of its last stored report."""
    message: str
    cause: IncidentCause = IncidentCause.CLUSTER_LOST


def after_end(
    known: LostAttempt | None, ended: LostAttempt, reason: EndReason, *, saved_step: int, is_retried: bool = False
) -> LostAttempt | None:
    """What the job has lost by now; None means nothing.

    Args:
        known: lost before, if no step was completed since.
        ended: the attempt that is over.
        saved_step: step of its newest checkpoint.
        is_retried: it has failed, and another one follows.
    """
    if is_retried:
        ended = ended.model_copy(update={"cause": IncidentCause.RETRIED})
    is_lost = is_retried or reason in _LOSSES or (reason in _SAVING and saved_step < ended.step)
    if known is None:
        return ended if is_lost else None
    return ended.model_copy(update={"step": max(known.step, ended.step)}) if is_lost else known
