"""The end of an attempt: what is kept, what is removed, and in which order."""

from doubles.event_loop import until
from doubles.supervisor_bench import SupervisorBench
from shoal_service.core.desired import Desired
from shoal_workers.contract.job import EndReason
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import ValidationReport


async def test_at_the_end_snapshots_are_removed_and_idle_workers_are_killed_together() -> None:
    bench = SupervisorBench()
    bench.fleet.node_of = {0: "shared", 1: "shared"}
    await bench.start_and_train()
    bench.workers.train(3)
    first, second = bench.workers.group
    first.print("last words")
    bench.workers.finish()
    await bench.end()
    assert sorted(bench.fleet.killed) == [0, 1] and bench.workers.by_name == {}
    assert first.num_forgotten + second.num_forgotten == 1, "by one worker of the node"
    assert _ending(bench) == ["forget_memory", "kill", "kill"]
    assert "last words" in [line.text for line in bench.reports.logs]
    assert not bench.nodes.is_started


async def test_workers_that_train_are_killed_before_the_last_one_of_their_node_removes_the_snapshots_again() -> None:
    bench = SupervisorBench()
    bench.fleet.node_of = {0: "shared", 1: "shared"}
    await bench.start_and_train()
    first, second = bench.workers.group
    bench.direct(desired=Desired.CANCEL)
    await bench.end()
    assert sorted(bench.fleet.killed) == [0, 1] and bench.workers.by_name == {}
    assert first.num_forgotten + second.num_forgotten == 2, "once before the other worker ends, once after"
    assert _ending(bench) == ["forget_memory", "kill", "forget_memory", "kill"]


async def test_a_validation_report_that_the_end_of_run_overtakes_is_in_the_last_status() -> None:
    bench = SupervisorBench()
    await bench.start_and_train()
    bench.workers.train(3)
    group = bench.workers.group
    for worker in group:
        worker.save()
    await until(lambda: bench.catalog.markers)
    for worker in group:
        worker.holds_long_polls = True
    group[0].report(ValidationReport(generation=1, step=4, loss=1.25, bits_per_byte=None, samples=4, at=0.0))
    for worker in group:
        worker.leave(ExitKind.FINISHED, is_durable=True)
    await bench.end()
    assert bench.status.val_loss == 1.25
    assert [point.val_loss for point in bench.reports.series][-1] == 1.25


async def test_torn_checkpoints_are_removed_at_the_end() -> None:
    bench = SupervisorBench()
    await bench.start_and_train()
    bench.catalog.files[CheckpointName(2, 1, 1)] = {"shard-00000.bin": 1}
    bench.direct(desired=Desired.CANCEL)
    end = await bench.end()
    assert end.reason is EndReason.CANCELLED
    assert bench.catalog.files == {}


async def test_a_storage_that_does_not_answer_at_the_end_does_not_keep_the_attempt() -> None:
    bench = SupervisorBench()
    await bench.start_and_train()
    bench.catalog.is_away = True
    bench.direct(desired=Desired.CANCEL)
    assert (await bench.end()).reason is EndReason.CANCELLED


def _ending(bench: SupervisorBench) -> list[str]:
    return [call for call in bench.log if call in ("forget_memory", "kill")]
