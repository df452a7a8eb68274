"""Storage that hangs at a commit: the checkpoint counts as not saved, training goes on, one thread waits for it."""

from doubles.event_loop import until
from doubles.supervisor_bench import SupervisorBench
from shoal_workers.contract.worker_reports import SaveFailed


def _reason(bench: SupervisorBench) -> str:
    [condition] = [c for c in bench.status.conditions if c.type == "CheckpointHealthy"]
    return str(condition.reason)


async def test_a_commit_that_hangs_is_given_up_and_no_second_thread_is_lost_to_it() -> None:
    bench = SupervisorBench(granted=1)
    await bench.start_and_train()
    bench.catalog.hangs = True
    [worker] = bench.workers.group
    worker.save()
    await until(lambda: len(bench.catalog.hanging) == 1, "the commit hangs")
    limit_s = bench.config.spec.timeouts.commit_s
    await bench.advance_until(lambda: "checkpoint.failed" in bench.events(), limit_s + 1)
    assert "did not answer within 120 s (timeouts.commit_s)" in bench.reports.events[-1].data["message"]
    assert _reason(bench) == "SaveFailed"

    bench.workers.train()
    await until(lambda: bench.status.step == 2, "training goes on")
    worker.save()
    await until(lambda: bench.events().count("checkpoint.failed") == 2, "the next commit fails at once")
    [hanging] = bench.catalog.hanging

    bench.catalog.hangs = False
    hanging.answer(OSError("an answer that comes too late"))
    bench.workers.train()
    await until(lambda: bench.status.step == 3, "training goes on")
    worker.save()
    await until(lambda: "checkpoint.committed" in bench.events(), "storage that answers again is used")
    assert _reason(bench) == "Saving"


async def test_a_part_that_stalls_is_a_condition_of_its_own() -> None:
    bench = SupervisorBench(granted=1)
    await bench.start_and_train()
    [worker] = bench.workers.group
    error = "the storage accepted nothing for 120 s (timeouts.save_s)"
    worker.report(SaveFailed(generation=1, step=1, rank=0, directory="/d", error=error, is_stalled=True))
    await until(lambda: "checkpoint.failed" in bench.events(), "it is reported")
    assert _reason(bench) == "StorageStalled"
