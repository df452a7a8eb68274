"""What is said at submit about `finish_by`: a time that has passed is refused; one that cannot be met is said.

The planner predicts how long the job takes with all of its workers, from the measured hardware profile if there is one.
Called by the submission. A prediction may be wrong, so it never refuses a job.
"""

from __future__ import annotations

from collections.abc import Iterable

from shoal_service.control.market.build import curve_of, sizes_of
from shoal_service.control.profile_store import measured_profile
from shoal_service.core.scheduling.facts import duration, verdict
from shoal_service.core.scheduling.market import MarketJob, WorkerNeed
from shoal_service.planner import HardwareProfile, rank
from shoal_workers.contract.checks.spec_errors import SpecError, SpecProblem
from shoal_workers.contract.spec import JobSpec


def check_deadline(spec: JobSpec, profiles: Iterable[HardwareProfile], now: float) -> str:
    """Why the deadline will probably be missed, for people; empty: it will not, or that is not known.

    Raises:
        SpecError: finish_by has passed.
    """
    if spec.finish_by is None:
        return ""
    if spec.finish_by <= now:
        message = f"finish_by was {duration(now - spec.finish_by)} ago. Set a later time, or leave it out."
        raise SpecError((SpecProblem(path="finish_by", message=message),))
    profile = measured_profile(profiles, has_gpu=spec.worker.gpus > 0)
    samples, rates = spec.batch.global_size, {}
    for size in sizes_of(spec.elasticity.max_workers):
        if best := rank(spec, size, profile, 1).predictions:
            rates[size] = samples / best[0].step_s
    if not rates or spec.stop.steps is None:
        return ""  # a task of unknown sizes, or an end that only the data decides
    why = verdict(
        MarketJob(
            job_id="",
            submitted_at=now,
            min_workers=spec.elasticity.min_workers,
            max_workers=spec.elasticity.max_workers,
            need=WorkerNeed(),
            curve=curve_of(rates),
            left=float(spec.stop.steps * samples),
            finish_by=spec.finish_by,
        ),
        now,
    )
    return "" if why is None else f"The deadline will probably be missed: {why}"
