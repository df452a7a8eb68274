"""The executor while it looks for the checkpoint to start from: a storage that is away, and damaged markers."""

from doubles.supervisor_bench import SupervisorBench
from shoal_workers.contract.job import EndReason
from shoal_workers.contract.marker import CheckpointName


async def test_a_storage_outage_of_seconds_at_the_start_is_waited_for_and_shown() -> None:
    bench = SupervisorBench()
    bench.catalog.is_away = True
    bench.start()
    await bench.clock.advance(6.0)
    assert "does not answer and is asked again: OSError: the storage does not answer" in bench.status.message
    assert bench.status.deadline == 1000.0 + bench.config.spec.checkpoint.wait_s
    assert bench.events() == ["checkpoint.storage_away"] and bench.fleet.starts == []
    bench.catalog.is_away = False
    await bench.advance_until(lambda: len(bench.workers.group) == 2)
    assert bench.status.note.startswith("waits for the group to form")


async def test_nothing_is_written_into_a_directory_that_lacks_what_the_job_has_committed() -> None:
    bench = SupervisorBench()
    bench.config = bench.config.model_copy(update={"newest": str(CheckpointName(8, 0, 1))})
    bench._open()
    bench.start()
    await bench.clock.advance(6.0)
    assert bench.catalog.begun == {} and bench.fleet.starts == []
    assert "is asked again: it has no checkpoint, and the job has committed step-0" in bench.status.message
    assert bench.status.checkpoint_step == 8
    bench.catalog.damaged = {CheckpointName(9, 0, 1)}  # the mount is back
    end = await bench.end()
    assert end.reason is EndReason.DAMAGED_CHECKPOINT and [*bench.catalog.begun] == [1]


async def test_a_damaged_only_marker_is_shown_and_ends_the_attempt() -> None:
    bench = SupervisorBench()
    bench.catalog.damaged = {CheckpointName(8, 0, 1)}
    bench.start()
    end = await bench.end()
    assert end.reason is EndReason.DAMAGED_CHECKPOINT and "step-000000000008-a0-g1" in end.message
    assert [(view.step, view.state) for view in bench.reports.checkpoints] == [(8, "damaged")]
