"""Utilisation: model FLOPs utilisation of a job, measured. The planner counts the FLOPs of a token, the profile of the
node gives the peak; the job's throughput and world size are those of its status.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from shoal_service.planner import HardwareProfile
from shoal_service.planner.shape import shape_of
from shoal_service.telemetry.metric import LiveJob
from shoal_workers.contract.spec import JobSpec

ProfileOf = Callable[[JobSpec], HardwareProfile]
"""The profile with which the planner plans the job."""


class Utilisation:
    """Remembers the FLOPs of each job's model. One thread at a time."""

    def __init__(self, profile_of: ProfileOf) -> None:
        self._profile_of = profile_of
        self._known: dict[str, tuple[JobSpec, float, HardwareProfile] | None] = {}

    def of(self, job: LiveJob) -> float | None:
        """None: the model is unknown to the planner, or nothing was measured yet."""
        status = job.status
        known = self._known.get(job.job_id)
        if job.job_id not in self._known or (known is not None and known[0] is not job.spec):
            known = self._known[job.job_id] = self._learn(job.spec)
        if known is None or not status.tokens_per_s or not status.workers:
            return None
        spec, flops_per_token, profile = known
        peak = profile.peak_flops[spec.precision] * status.workers / profile.sharing(status.workers)
        return flops_per_token * status.tokens_per_s / peak

    def forget_all_but(self, job_ids: Collection[str]) -> None:
        self._known = {job_id: known for job_id, known in self._known.items() if job_id in job_ids}

    def _learn(self, spec: JobSpec) -> tuple[JobSpec, float, HardwareProfile] | None:
        shape = shape_of(spec)
        profile = self._profile_of(spec)
        if shape is None or not profile.peak_flops.get(spec.precision):
            return None
        return spec, shape.flops_per_token, profile
