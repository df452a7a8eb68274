"""Two supervisors of one attempt, and two attempts of one job: the first one is cut off and goes on."""

from doubles.event_loop import settle, until
from doubles.fake_journal import JournalStorage
from doubles.supervisor_bench import SupervisorBench
from shoal_service.core.attempt.state.parts import Stage
from shoal_service.core.desired import Desired
from shoal_service.supervisor.reporting.reporter import Outbox
from shoal_workers.contract.ids import life_of
from shoal_workers.contract.job import EndReason
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.messages import ExitKind


async def two() -> tuple[SupervisorBench, SupervisorBench]:
    """The cut-off one, and its successor, which has found both workers in their first group."""
    zombie = SupervisorBench()
    await zombie.start_and_train()
    successor = zombie.successor()
    successor.start()
    await until(lambda: all(worker.life == 2 for worker in zombie.workers.group), "the workers are adopted")
    return zombie, successor


async def test_the_older_one_ends_once_a_worker_has_refused_it() -> None:
    zombie, successor = await two()
    first, second = zombie.workers.group
    zombie.workers.train()
    await zombie.clock.advance(2.0)  # its polls return, and it polls again
    assert zombie.is_replaced and not successor.is_replaced
    assert first.num_refused + second.num_refused >= 1
    assert first.assignment is not None and second.assignment is not None, "training goes on"
    zombie.workers.train(2)
    zombie.workers.finish()
    assert (await successor.end()).reason is EndReason.FINISHED


async def test_the_refused_calls_are_counted_and_reported_to_the_newer_one() -> None:
    zombie, successor = await two()
    zombie.workers.train()
    await zombie.clock.advance(2.0)
    assert zombie.is_replaced
    zombie.workers.train()
    await successor.advance_until(lambda: successor.status.refused_calls >= 1)


async def test_the_older_one_ends_no_worker_of_the_newer_one() -> None:
    zombie, successor = await two()
    zombie.direct(desired=Desired.CANCEL)
    await zombie.clock.advance(3.0)
    assert zombie.is_replaced
    assert [worker.is_alive for worker in zombie.workers.by_name.values()] == [True, True]
    assert successor.stage is Stage.RUNNING and successor.reports.incidents == ()


async def test_after_a_lost_worker_only_the_newer_one_forms_a_group() -> None:
    zombie, successor = await two()
    survivor, lost = zombie.workers.group
    lost.die()
    survivor.leave(ExitKind.COLLECTIVE_FAILED)
    await successor.advance_until(lambda: survivor.assignment is not None)
    assert survivor.assignment is not None and survivor.assignment.life == 2
    assert life_of(survivor.assignment.generation) == 2
    assert zombie.is_replaced


async def test_a_group_that_the_older_one_formed_without_the_journal_is_left_and_shares_no_number() -> None:
    """The head was away for the older one. Its successor reads an entry from before that."""

    zombie = SupervisorBench()
    await zombie.start_and_train()
    zombie.journal.is_away = True
    survivor, lost = zombie.workers.group
    lost.die()
    await zombie.advance_until(lambda: survivor.assignment is not None and survivor.assignment.generation == 2)
    zombie.workers.form()
    await settle()
    successor = zombie.successor()
    successor.start()
    await successor.advance_until(lambda: survivor.assignment is not None and survivor.assignment.life == 2)
    assert survivor.interrupts == [1, 2, 1], "by the older one; as unknown to the newer one; for the lost worker"
    assert survivor.assignment is not None and survivor.assignment.generation == 1_000_001
    assert zombie.is_replaced and not successor.is_replaced
    successor.workers.form()
    successor.workers.train()
    await until(lambda: successor.status.step == 1)
    assert {str(event.type) for event in successor.reports.events}.isdisjoint({"node.suspected"})


async def test_the_older_one_commits_and_deletes_nothing() -> None:
    zombie, successor = await two()
    for worker in zombie.workers.group:
        worker.save()
    await settle()
    await successor.clock.advance(1.0)
    [marker] = zombie.catalog.markers.values()
    assert marker.generation == 1, "committed once, by the newer one"
    assert [view.state for view in successor.reports.checkpoints] == ["committed"]
    assert zombie.reports.checkpoints == ()


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
