"""The booking of an attempt's worker-seconds, by the machine's own turns. Each job here desires 8 workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kit.worlds.attempt.parts import from_journal
from shoal_service.core import goodput
from shoal_service.core.attempt.messages import ReportArrived
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.parts import Stage
from shoal_service.core.desired import Desired
from shoal_workers.contract.worker_reports import SnapshotCost

NewWorld = Callable[..., Any]
ASKED = 8


def seconds(world: Any) -> dict[str, float]:
    """By category, those that are not empty."""
    shown = goodput.show(world.state.ledger)
    return {name: pytest.approx(amount) for name, amount in shown.seconds.items() if amount > 1e-9}


def since(world: Any, before: Attempt) -> dict[str, float]:
    """What was booked since then, by category."""
    now, then = goodput.show(world.state.ledger).seconds, goodput.show(before.ledger).seconds
    changes = {name: amount - then[name] for name, amount in now.items()}
    return {name: pytest.approx(change) for name, change in changes.items() if abs(change) > 1e-9}


def steps(world: Any, count: int) -> None:
    """Steps of half a second each, with no checkpoint on the way."""
    for _ in range(count):
        world.pass_time(0.5)
        world.train(1, save_every=1000)
        world.deliver_all()


def test_until_the_first_group_runs_all_workers_are_starting(new_world: NewWorld) -> None:
    world = new_world(workers=8).open()
    world.pass_time(2.0)
    world.start_all()
    world.pass_time(1.0)
    world.join()
    assert seconds(world) == {"starting": 24.0}


def test_a_death_costs_the_step_that_it_undid_and_all_until_the_next_group_runs(new_world: NewWorld) -> None:
    world = new_world(workers=8).open(then=0)
    steps(world, 2)
    before = world.state
    world.pass_time(0.25)
    world.die(3)
    world.deliver_all()
    world.pass_time(1.0)
    world.recover()
    assert world.state.stage is Stage.RUNNING
    assert since(world, before) == {"recovering": 8 * 1.25}
    assert goodput.show(world.state.ledger).recovering == {"worker_died": pytest.approx(10.0)}


def test_steps_that_were_lost_are_recomputed_afterwards(new_world: NewWorld) -> None:
    world = new_world(workers=8).open(then=0)
    steps(world, 3)  # no checkpoint: from the seed again
    world.lose(3)
    before = world.state
    steps(world, 4)
    assert since(world, before) == {"recomputed": 3 * 3.5, "productive": 3.5, "degraded": 2.0}


def test_a_planned_change_costs_no_step_and_is_resizing_until_the_next_group_runs(new_world: NewWorld) -> None:
    world = new_world(workers=8).open(then=0)
    steps(world, 2)
    before = world.state
    world.direct(granted=6)
    steps(world, 1)  # the group still trains, up to the boundary
    assert world.state.stage is not Stage.SWITCHING
    assert since(world, before) == {"productive": 4.0}
    before = world.state
    world.pass_time(1.0)
    world.until(Stage.RUNNING)
    assert set(since(world, before)) <= {"resizing", "degraded", "productive", "checkpoint_stall"}
    assert since(world, before)["resizing"] == 8 * (1.0 + 2.0)  # a round of cooperation takes 2 s


def test_an_incident_stays_open_below_min_workers(new_world: NewWorld) -> None:
    world = new_world(workers=2, min_workers=2).open(then=1)
    world.lose(0)
    before = world.state
    assert before.stage is Stage.WAITING
    world.pass_time(10.0)
    assert since(world, before) == {"recovering": 80.0}


def test_a_checkpoint_costs_what_its_slowest_rank_stood_still(new_world: NewWorld) -> None:
    world = new_world(workers=8).open(then=0)
    steps(world, 1)
    before = world.state
    world.pass_time(0.5)
    world.save()  # 0.1 s on each rank
    world.deliver_all()
    assert since(world, before) == {"productive": 3.2, "checkpoint_stall": 0.8}


def test_each_step_pays_for_its_share_of_the_snapshots(new_world: NewWorld) -> None:
    world = new_world(workers=8).open(then=0)
    cost = SnapshotCost(
        generation=1, step=0, every_steps=2, buddy_every_steps=2, copy_s=0.1, buddy_s=0.0, share=0.1, num_bytes=9
    )
    world.feed(ReportArrived(0, cost))
    before = world.state
    steps(world, 4)
    assert since(world, before) == {"productive": 14.4, "checkpoint_stall": 1.6}


def test_the_commit_after_the_last_step_is_a_stall(new_world: NewWorld) -> None:
    world = new_world(workers=8)
    world.total_steps = 2
    world.open(then=0)
    steps(world, 2)
    assert world.state.stage is Stage.COMMITTING
    before = world.state
    world.pass_time(1.0)
    world.until(Stage.ENDED)
    assert since(world, before) == {"checkpoint_stall": 8.0}


def test_a_cancelled_attempt_books_its_unfinished_step_as_idle_and_nothing_after_it(new_world: NewWorld) -> None:
    world = new_world(workers=8).open(then=0)
    steps(world, 1)
    before = world.state
    world.pass_time(0.25)
    world.direct(desired=Desired.CANCEL)
    assert since(world, before) == {"idle": 2.0}
    assert world.state.ledger.at == world.now
    world.pass_time(5.0)
    assert since(world, before) == {"idle": 2.0}


def test_time_without_changes_is_booked_only_every_few_seconds(new_world: NewWorld) -> None:
    world = new_world(workers=8).open()
    ledgers = []
    for _ in range(40):
        world.pass_time(0.25)
        ledgers.append(world.state.ledger)
    assert len({ledger.at for ledger in ledgers}) <= 3
    assert goodput.show(world.state.ledger).seconds["starting"] >= 5 * ASKED


def test_a_restarted_supervisor_books_repeated_reports_once(new_world: NewWorld) -> None:
    world = new_world(workers=8).open(then=0)
    steps(world, 1)
    journal = from_journal(world.state)
    reported = [event for event in world.history if isinstance(event, ReportArrived)]
    steps(world, 1)
    reported_since = [event for event in world.history if isinstance(event, ReportArrived)][len(reported) :]
    world.state = journal
    world.now += 4.0
    for event in [*reported, *reported_since, *reported, *reported_since]:
        world.feed(event)
    assert seconds(world)["productive"] == 8 * 5.0
    assert "recomputed" not in seconds(world)
    assert world.state.ledger.max_step == 2


KINDS = ("train", "die", "recover", "pass", "grant", "elastic", "break", "commit", "restart", "pause", "cooperate")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 7), st.floats(0, 8)), max_size=40))
def test_the_booked_seconds_are_the_integral_of_the_desired_workers(
    new_world: NewWorld, life: list[tuple[str, int, float]]
) -> None:
    world = new_world(workers=4, standby=1).open()
    for kind, number, elapsed_s in life:
        before, asked = world.state.ledger, world.state.target.spec.elasticity.max_workers
        act(world, kind, number, elapsed_s)
        ledger = world.state.ledger
        assert ledger.at is not None and ledger.at <= world.now
        if world.state.stage is not Stage.ENDED:
            assert world.now - ledger.at <= 5.25
        then, now = goodput.show(before), goodput.show(ledger)
        assert now.total - then.total == pytest.approx(asked * (ledger.at - before.at), abs=1e-6)
        assert min(now.seconds.values()) >= 0 and min(now.recovering.values(), default=0) >= 0
        assert sum(now.recovering.values()) == pytest.approx(now.seconds["recovering"])


def act(world: Any, kind: str, number: int, elapsed_s: float) -> None:
    match kind:
        case "train":
            steps(world, number % 3)
        case "die":
            alive = [worker.index for worker in world.workers.values() if worker.alive]
            if alive:
                world.die(alive[number % len(alive)])
        case "recover":
            world.recover()
        case "pass":
            world.pass_time(elapsed_s)
        case "grant":
            world.direct(granted=1 + number % 6)
        case "elastic":
            change = {"max_workers": 6 + number % 3}
            world.direct(elasticity=world.state.target.spec.elasticity.model_copy(update=change))
        case "break" if not world.is_whole:
            world.break_collectives()
        case "commit":
            world.answer_storage()
        case "restart":
            world.state = from_journal(world.state)
        case "pause" if number == 0:
            world.direct(desired=Desired.PAUSE)
        case "cooperate":
            world.cooperate()
        case _:
            pass
