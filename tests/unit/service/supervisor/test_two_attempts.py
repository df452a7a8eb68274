"""Two attempts of one job: the first one is cut off with its cluster, was given up, and trains on."""

from doubles.event_loop import until
from doubles.fake_journal import JournalStorage
from doubles.supervisor_bench import SupervisorBench
from shoal_service.supervisor.reporting.outbox import Outbox
from shoal_workers.contract.marker import CheckpointName


def next_attempt(cut_off: SupervisorBench) -> SupervisorBench:
    """In another cluster, with the same storage of checkpoints."""
    bench = SupervisorBench(granted=1)
    bench.config = bench.config.model_copy(update={"attempt": 2})
    bench.catalog, bench.storage, bench.outbox = cut_off.catalog, JournalStorage(), Outbox(2)
    bench._open()
    return bench


async def saved(bench: SupervisorBench) -> None:
    committed = len(bench.catalog.markers)
    [worker] = bench.workers.group
    worker.save()
    await until(lambda: len(bench.catalog.markers) > committed, "it is committed")


async def test_what_the_first_one_saves_afterwards_is_refused_and_the_second_one_never_restores_it() -> None:
    first = SupervisorBench(granted=1)
    await first.start_and_train()
    await saved(first)
    second = next_attempt(first)
    second.start()
    await until(lambda: second.workers.group, "it forms a group")
    [worker] = second.workers.group
    assert worker.assignment is not None
    assert worker.assignment.restore_from == f"/checkpoints/j1/{CheckpointName(1, 1, 1)}"

    first.workers.train()
    await until(lambda: first.status.step == 2, "it trains on behind the cut")
    first.workers.group[0].save()
    await until(lambda: "checkpoint.failed" in first.events(), "its commit is refused")
    assert "attempt 2 of the job has begun, so attempt 1 is over" in first.reports.events[-1].data["message"]
    assert list(second.catalog.markers) == [CheckpointName(1, 1, 1)]
