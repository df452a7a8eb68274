"""What a signal means to `shoal serve`, and what it says while jobs are saved. With a real store, the clock by hand."""

import asyncio

from shoal_api.stopping import SavingProgress, StopRequest
from shoal_service.core.endings import AttemptEnd
from shoal_service.reports import SupervisorReports
from shoal_service.store import driving, reporting, submissions
from shoal_service.store.driving import DriveRow
from shoal_service.store.store import Store
from shoal_service.views import JobStatus
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.job import EndReason, JobState


class Training:
    """A job with an attempt, in a store whose lease is held."""

    def __init__(self, store: Store) -> None:
        self.store = store
        lease = store.acquire_lease("me", ttl_s=100.0, now=0.0)
        assert lease is not None
        self.epoch = lease.epoch
        spec = parse_spec({"data": {"corpus": "python-stdlib"}, "stop": {"steps": 30}})
        self.id = store.writing(submissions.create)(spec, idempotency_key=None, now=0.0)[0].id
        store.writing(driving.begin_attempt, self.epoch)(self.id, workers=1, now=0.0)
        self.seq = 0

    def report(self, step: int, *, checkpoint: int, end: AttemptEnd | None = None) -> None:
        self.seq += 1
        status = JobStatus(
            state=JobState.RUNNING, attempt=1, step=step, total_steps=30, checkpoint_step=checkpoint, workers=1
        )
        reports = SupervisorReports(attempt=1, seq=self.seq, status=status, workers=(), end=end)
        self.store.writing(reporting.apply, self.epoch)(self.id, reports, now=1.0)

    def rows(self) -> list[DriveRow]:
        return self.store.reading(driving.to_drive)(max_queued=0)


def test_the_first_signal_saves_and_the_second_hurries() -> None:
    async def main() -> None:
        begun: list[int] = []
        stop = StopRequest(saves=True, begin=lambda: begun.append(1))
        stop.signal()
        assert begun == [1] and (stop.requested.is_set(), stop.now.is_set()) == (True, False)
        stop.signal()
        assert stop.now.is_set() and begun == [1]

    asyncio.run(main())


def test_a_server_that_has_nothing_to_save_stops_at_the_first_signal() -> None:
    async def main() -> None:
        stop = StopRequest(saves=False)
        stop.signal()
        assert stop.requested.is_set() and stop.now.is_set()

    asyncio.run(main())


def test_the_terminal_says_what_is_saved_and_repeats_it_while_nothing_changes(store: Store) -> None:
    job, said, clock = Training(store), [], [100.0]
    job.report(19, checkpoint=8)
    progress = SavingProgress(store, said.append, lambda: clock[0])
    progress.show(job.rows())
    progress.show(job.rows())
    assert said[0].startswith("Saving 1 job before the Ray cluster stops. Ctrl-C again: stop at once")
    doing = f"  {job.id}: step 19 of 30 is complete; saves after the one under way"
    assert said[1:] == [doing]
    clock[0] = 111.0
    progress.show(job.rows())
    assert said[2:] == [f"{doing} (for 11 s)"]
    job.report(20, checkpoint=20, end=AttemptEnd(reason=EndReason.SERVER_STOPPED, message="saved.", step=20))
    progress.show(job.rows())
    progress.close(())
    assert said[3:] == [
        f"  {job.id}: saved at step 20, continues there under the next server",
        "Stopping the Ray cluster.",
    ]


def test_what_is_not_saved_is_named_with_its_newest_checkpoint(store: Store) -> None:
    job, said = Training(store), []
    job.report(19, checkpoint=8)
    progress = SavingProgress(store, said.append, lambda: 0.0)
    progress.show(job.rows())
    store.writing(driving.requeue, job.epoch)(job.id, reason=EndReason.CLUSTER_LOST, message="hurried", now=2.0)
    progress.close((job.id,))
    assert said[2:] == [
        f"  {job.id}: not saved; step 19 was reached, the newest checkpoint is of step 8",
        "Stopping the Ray cluster.",
    ]


def test_an_orderly_end_that_could_not_save_the_newest_step_is_not_called_saved(store: Store) -> None:
    job, said = Training(store), []
    progress = SavingProgress(store, said.append, lambda: 0.0)
    progress.show(job.rows())
    job.report(19, checkpoint=8, end=AttemptEnd(reason=EndReason.SERVER_STOPPED, message="", step=19))
    progress.close(())
    assert "not saved; step 19 was reached" in said[2]


def test_a_job_that_had_not_trained_yet_has_nothing_to_save(store: Store) -> None:
    job, said = Training(store), []
    progress = SavingProgress(store, said.append, lambda: 0.0)
    progress.show(job.rows())
    job.report(0, checkpoint=0, end=AttemptEnd(reason=EndReason.SERVER_STOPPED, message="", step=0))
    progress.close(())
    assert said[2] == f"  {job.id}: had completed no step, begins under the next server"


def test_without_a_job_only_the_cluster_is_named(store: Store) -> None:
    said: list[str] = []
    progress = SavingProgress(store, said.append, lambda: 0.0)
    progress.show([])
    progress.close(())
    assert said == ["Stopping the Ray cluster."]
