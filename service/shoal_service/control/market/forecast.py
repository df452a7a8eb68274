"""What the scheduler would do with a job that is not submitted: start it now, or let it wait, and until when.

The present market with one job more, and the same policy that decides about real jobs. Called by the control loop for
`submit --dry-run`; nothing is stored or carried out.
"""

from __future__ import annotations

from dataclasses import replace

from shoal_service.control.market.build import MarketBuilder
from shoal_service.core.desired import Desired
from shoal_service.core.scheduling.market import MarketState, Policy, Start, Wait
from shoal_service.fleet_views import StartForecast
from shoal_service.planner import HardwareProfile
from shoal_service.store.driving import DriveRow
from shoal_service.views import JobStatus
from shoal_workers.contract.job import JobState
from shoal_workers.contract.spec import JobSpec

THIS_JOB = "this job"
"""Its id in the words of the decision."""


def forecast(
    market: MarketState, spec: JobSpec, profiles: tuple[HardwareProfile, ...], policy: Policy, now: float
) -> StartForecast:
    """Blocks for a decision, and for the prediction of the job's throughput."""
    row = DriveRow(
        id=THIS_JOB,
        spec=spec,
        spec_version=1,
        state=JobState.QUEUED,
        desired=Desired.RUN,
        attempt=0,
        granted_workers=0,
        pulled_seq=0,
        created_at=now,
        priority=spec.priority,
        status=JobStatus(),
    )
    [job] = MarketBuilder(profiles).build([row], (), {}, {}, {}, {}, now).jobs
    for one in policy(replace(market, jobs=[*market.jobs, job]), now):
        if isinstance(one, Start) and one.job_id == THIS_JOB:
            return StartForecast(workers=one.workers, reason=one.reason, expected_at=now)
        if isinstance(one, Wait) and one.job_id == THIS_JOB:
            return StartForecast(
                position=one.position, reason=one.reason, holders=one.holders, expected_at=one.expected_at
            )
    raise AssertionError("the policy decides about each queued job")
