"""Actors of attempts that are over are ended, and no others."""

from doubles.control_bench import ControlBench
from doubles.fake_cluster import FakeSupervisor
from shoal_service.core.endings import AttemptEnd
from shoal_service.reports import PendingEvent, SupervisorReports
from shoal_service.store import reporting
from shoal_service.store.store import Store
from shoal_service.supervisor.reporting.outbox import Outbox
from shoal_service.views import JobStatus
from shoal_workers.contract.job import EndReason, JobState


def leave(bench: ControlBench, source: FakeSupervisor, job_id: str, attempt: int) -> None:
    """A supervisor of that attempt is in the cluster, and nobody drives it."""
    config = source.config.model_copy(update={"job_id": job_id, "attempt": attempt})
    bench.cluster.supervisors[job_id, attempt] = FakeSupervisor(config, Outbox(attempt))


async def test_a_supervisor_that_a_killed_server_has_not_released_is_ended_by_the_next_one(store: Store) -> None:
    killed = ControlBench(store)
    job_id = killed.submit()
    async with killed.running():
        supervisor = killed.cluster.supervisors[job_id, 1]
    lease = store.acquire_lease("killed", ttl_s=1.0, now=killed.clock.time())
    assert lease is not None
    end = AttemptEnd(reason=EndReason.FINISHED, message="done", step=4)
    status = JobStatus(state=JobState.RUNNING, step=4)
    store.writing(reporting.apply, lease.epoch)(
        job_id, SupervisorReports(attempt=1, seq=1, status=status, end=end), now=lease.expires_at
    )
    store.release_lease("killed")
    assert killed.state(job_id) is JobState.SUCCEEDED

    following = ControlBench(store)
    leave(following, supervisor, job_id, 1)
    async with following.running():
        assert following.cluster.reaped == [(job_id, 1)]
        await following.clock.advance(5.0)
        assert following.cluster.reaped == [(job_id, 1)], "once"


async def test_other_attempts_stay(store: Store) -> None:
    bench = ControlBench(store)
    job_id = bench.submit()
    async with bench.running():
        mine = bench.cluster.supervisors[job_id, 1]
        leave(bench, mine, "of-another-control-plane", 1)
        leave(bench, mine, job_id, 2)
        await bench.clock.advance(5.0)
        assert bench.cluster.reaped == [], "one is driven, one is not of this store, one is newer than the store"


async def test_an_older_attempt_of_a_job_that_trains_is_ended(store: Store) -> None:
    bench = ControlBench(store)
    job_id = bench.submit()
    async with bench.running():
        first = bench.cluster.supervisors[job_id, 1]
        first.outbox.set_status(JobStatus(state=JobState.RUNNING, step=1), ())
        first.report(PendingEvent(at=1.0, type="said"))
        await bench.clock.advance(1.0)
        bench.cluster.kill_supervisor(job_id, 1)
        await bench.clock.advance(10.0)
        assert (job_id, 2) in bench.cluster.supervisors
        bench.cluster.reaped.clear()
        leave(bench, first, job_id, 1)
        await bench.clock.advance(5.0)
        assert bench.cluster.reaped == [(job_id, 1)]
