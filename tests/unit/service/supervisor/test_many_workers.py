"""What arrives together is one turn: the work for each event does not grow with the number of workers."""

from collections import Counter
from typing import Any

from doubles.fake_clock import FakeClock
from doubles.supervisor_bench import SPEC, SupervisorBench
from shoal_service.core.attempt import machine
from shoal_service.core.attempt.messages import InterruptAcknowledged, Run
from shoal_service.core.attempt.state.timeouts import later_s, poll_wait_s
from shoal_service.supervisor.executor import Pace
from shoal_service.supervisor.journal import UnansweredOrders
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.snapshots import SnapshotPart
from shoal_workers.contract.spec import JobSpec

NUM_WORKERS = 48


def many() -> SupervisorBench:
    values = SPEC.model_dump() | {
        "batch": {"global_size": NUM_WORKERS, "micro_size": 1},
        "elasticity": {"min_workers": 1, "max_workers": NUM_WORKERS},
    }
    bench = SupervisorBench(granted=NUM_WORKERS, spec=JobSpec.model_validate(values))
    bench.node_of.update({index: f"node-{index // 8}" for index in range(2 * NUM_WORKERS)})
    return bench


async def lose_one(bench: SupervisorBench) -> None:
    """All others have the snapshot of the step in memory, and leave the group."""
    group = bench.workers.group
    for rank, worker in enumerate(group):
        worker.parts = tuple(
            SnapshotPart(
                generation=1, rank=of, world_size=NUM_WORKERS, step=1, num_bytes=8, node_id=worker.info.node_id
            )
            for of in (rank, (rank - 8) % NUM_WORKERS)
        )
    group[1].die()
    await bench.advance_until(lambda: len(bench.workers.group) == NUM_WORKERS - 1)


async def test_the_loss_of_one_worker_of_many_takes_a_few_turns_and_a_few_journal_entries() -> None:
    turns: list[int] = []

    bench = many()
    await bench.start_and_train()
    turn, events = bench.executor._turn, Counter[str]()

    def counted(*happened: Any) -> None:
        turns.append(len(happened))
        events.update(type(one).__name__ for one in happened)
        turn(*happened)

    bench.executor._turn = counted  # type: ignore[method-assign]
    written = len(bench.journal.written)
    await lose_one(bench)
    assert events["RunReturned"] >= NUM_WORKERS - 1 and events["InterruptAcknowledged"] >= NUM_WORKERS - 1
    assert len(turns) <= 12, turns
    assert len(bench.journal.written) - written <= 12
    assert [worker.assignment.rank for worker in bench.workers.group if worker.assignment] == list(
        range(NUM_WORKERS - 1)
    )


async def test_more_events_than_a_turn_takes_are_several_turns_in_the_order_of_arrival() -> None:
    bench = many()
    await bench.start_and_train()
    turns: list[list[int]] = []
    turn = bench.executor._turn

    def noted(*happened: Any) -> None:
        turns.append([one.generation for one in happened if isinstance(one, InterruptAcknowledged)])
        turn(*happened)

    bench.executor._turn = noted  # type: ignore[method-assign]
    for number in range(1200):
        bench.executor._post(InterruptAcknowledged(0, 1_000 + number))  # of no generation: it changes nothing
    await bench.advance_until(lambda: sum(map(len, turns)) == 1200)
    assert len([numbers for numbers in turns if numbers]) == 3 and max(map(len, turns)) == 512
    assert [number for numbers in turns for number in numbers] == list(range(1_000, 2_200))


async def test_the_journal_has_the_source_of_a_generation_once_and_its_orders_come_back_whole() -> None:
    bench = many()
    await bench.start_and_train()
    await lose_one(bench)
    entries = reversed(bench.journal.written)
    entry = next(e for e in entries if any(isinstance(issued.order, Run) for issued in e.issued or ()))
    source = entry.state.group.source
    assert source is not None and len(source.parts) == NUM_WORKERS
    assert entry.model_dump_json().count('"parts":[{') == 1
    orders = [order for order in UnansweredOrders(entry).by_number.values() if isinstance(order, Run)]
    assert len(orders) == NUM_WORKERS - 1
    assert all(order.assignment.restore_snapshot == source for order in orders)


async def test_a_worker_that_leaves_in_the_turn_in_which_the_group_is_lost_is_not_interrupted() -> None:
    bench = SupervisorBench(granted=3, spec=SPEC.model_copy(update={"elasticity": many().config.spec.elasticity}))
    await bench.start_and_train()
    first, second, third = bench.workers.group
    first.leave(ExitKind.COLLECTIVE_FAILED)
    second.leave(ExitKind.COLLECTIVE_FAILED)
    await bench.advance_until(lambda: third.interrupts)
    assert first.interrupts == second.interrupts == []


async def test_an_event_of_an_ended_attempt_changes_nothing_in_the_same_turn(bench: SupervisorBench) -> None:
    await bench.start_and_train()
    bench.direct(desired="cancel")
    bench.workers.group[0].die()
    await bench.end()
    ended = bench.entry.state
    assert machine.step_all(ended, (), bench.clock.time(), lambda *_: None) == (ended, ())  # type: ignore[arg-type,return-value]


def test_what_takes_long_is_done_so_rarely_that_it_takes_a_tenth_of_the_time() -> None:
    clock = FakeClock()
    pace = Pace(clock)
    with pace.measured():
        clock.take(0.004)
    assert pace.is_due, "what is cheap is done each time"
    with pace.measured():
        clock.take(0.04)
    assert not pace.is_due
    clock.take(0.39)
    assert not pace.is_due
    clock.take(0.02)
    assert pace.is_due


def test_deadlines_and_polls_of_small_groups_are_those_of_the_settings() -> None:
    assert poll_wait_s(4) == poll_wait_s(512) == 1.0 and poll_wait_s(4096) == 8.0
    assert later_s(64) == 0.0 and later_s(1024) > 1.5
