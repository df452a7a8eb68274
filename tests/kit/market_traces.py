"""Small jobs, clusters and policies for the tests of the simulator."""

from collections.abc import Mapping, Sequence

from schedulers import decisions
from shoal_service.core.scheduling.market import Decision, MarketState, Policy, ThroughputCurve
from shoal_service.simulator.engine import Costs, Market
from shoal_service.simulator.traces import Capacity, TraceJob

FREE = Costs(switch_s=0.0, start_s=0.0)


def trace_job(
    name: str,
    *,
    submit_s: float = 0.0,
    work: float = 100.0,
    workers: tuple[int, int] = (1, 4),
    asked: int | None = None,
) -> TraceJob:
    """A job that does one sample per second and worker."""
    least, most = workers
    return TraceJob(
        job_id=name,
        submit_s=submit_s,
        work=work,
        min_workers=least,
        max_workers=most,
        asked_workers=asked or most,
        curve=ThroughputCurve.linear(1.0, most),
    )


def market(workers: int, costs: Costs = FREE, *, every_s: float | None = None) -> Market:
    return Market(capacity=Capacity.constant(workers, 1), costs=costs, every_s=every_s)


def scripted(script: Mapping[float, Mapping[str, int]]) -> Policy:
    """Gives the workers of the newest entry of the script that is not in the future; others keep what they have."""

    def policy(state: MarketState, now: float) -> Sequence[Decision]:
        newest = max((at for at in script if at <= now), default=None)
        wanted = {job.job_id: job.granted for job in state.jobs}
        if newest is not None:
            wanted |= script[newest]
        return decisions(state, wanted)

    return policy
