"""The cheapest complete source: snapshots in the memory of live nodes are preferred to checkpoints in storage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shoal_service.core.attempt.memory_snapshots import newest_reported_step
from shoal_service.core.attempt.messages import (
    KillWorker,
    ProgressReported,
    RequestSnapshotParts,
    RequestYield,
    Run,
    WorkerUnreachable,
)
from shoal_service.core.attempt.state.attempt import Discarded, SnapshotIndex
from shoal_service.core.attempt.state.parts import Stage
from shoal_service.core.desired import Desired
from shoal_service.core.persistent import IntMap
from shoal_workers.contract.job import EndReason, IncidentCause
from shoal_workers.contract.messages import ExitKind, Phase, Progress
from shoal_workers.contract.snapshots import SnapshotPart

NewWorld = Callable[..., Any]


def last_runs(world: Any) -> list[Any]:
    runs = [c.assignment for c in world.commands if isinstance(c, Run)]
    return [run for run in runs if run.generation == world.state.group.generation]


def test_a_death_loses_no_completed_step_where_a_buddy_has_the_part(new_world: NewWorld) -> None:
    world = new_world(workers=3, memory=True).open(then=6)
    world.lose(1)
    source = last_runs(world)[0].restore_snapshot
    assert (source.generation, source.step, source.world_size) == (1, 6, 3)
    assert [endpoint.node_id for endpoint in source.parts] == ["n0", "n2", "n2"], "rank 1's buddy is on n2"
    assert last_runs(world)[0].restore_from.endswith("step-000000000004-a1-g1"), "in case that memory fails"
    world.run(1)
    [incident] = world.incidents()
    assert (incident.state_source, incident.steps_lost, incident.bytes_moved) == ("memory", 0, 40)
    assert (incident.from_layout, incident.to_layout) == ("fsdp3", "fsdp2")
    assert world.state.progress.step == 7 and world.num_steps == 7


def test_the_memory_of_a_dead_worker_is_served_by_another_on_its_node(new_world: NewWorld) -> None:
    world = new_world(workers=3, memory=True, nodes=1).open(then=6)
    world.lose(1)
    assert world.state.progress.step == 6 and world.state.group.source is not None
    assert {endpoint.port for endpoint in world.state.group.source.parts} == {7000}, "one that stays in the group"


def test_a_standby_reports_the_snapshots_of_a_node_that_lost_its_worker(new_world: NewWorld) -> None:
    """Two nodes of two workers each; rank 1 is alone with the spare on its node, and its buddy dies with it."""
    world = new_world(workers=3, standby=1, memory=True, nodes=2).open(then=6)
    world.die(1)
    world.deliver("lost-1")
    assert [c.index for c in world.commands if isinstance(c, RequestSnapshotParts)] == [3]
    world.obey_interrupts()
    held = world.pending.pop("held-3")
    world.memory["n0"] = [(i, h) for i, h in world.memory["n0"] if h.rank != 1]
    for channel in ("exit-0", "exit-2"):
        sent = world.pending.pop(channel)[0]
        still = tuple(h for h in sent.exit.snapshot_parts if h.rank != 1)
        world.post(channel, type(sent)(sent.index, sent.exit.model_copy(update={"snapshot_parts": still})))
    world.deliver_all()
    assert world.state.stage is Stage.QUIESCING, "the spare may know of rank 1's part"
    world.pending["held-3"] = held
    world.deliver_all()
    assert world.state.stage is Stage.FORMING and world.state.group.source.step == 6


def test_a_spare_that_does_not_answer_is_not_waited_for_beyond_the_deadline(new_world: NewWorld) -> None:
    world = new_world(workers=2, standby=1, memory=True).open(then=6)
    world.stop(2)
    world.die(1, IncidentCause.NODE_DIED)
    for node in world.memory:
        world.memory[node] = [(i, h) for i, h in world.memory[node] if h.rank != 1]
    world.recover()
    assert world.state.stage is Stage.QUIESCING
    world.pass_time(5.1)
    assert world.state.stage is Stage.FORMING and world.state.group.source is None


def test_there_is_no_wait_for_a_standby_once_the_newest_step_is_complete(new_world: NewWorld) -> None:
    world = new_world(workers=3, standby=1, memory=True).open(then=6)
    world.stop(3)
    world.lose(1)
    assert world.state.group.generation == 2 and world.state.progress.step == 6


def test_an_older_complete_snapshot_is_preferred_to_the_checkpoint(new_world: NewWorld) -> None:
    """A rank dies after the others have taken the snapshot of step 7, and before it has taken its own."""
    world = new_world(workers=3, memory=True).open(then=7)
    for node in world.memory:
        world.memory[node] = [(i, h) for i, h in world.memory[node] if (h.rank, h.step) != (1, 7)]
    world.lose(1)
    world.run(1)
    assert world.incidents()[0].steps_lost == 1 and world.incidents()[0].state_source == "memory"


def test_a_newer_checkpoint_is_preferred_to_a_snapshot(new_world: NewWorld) -> None:
    world = new_world(workers=2, memory=True).open(then=4)
    for node in world.memory:
        world.memory[node] = [(i, h) for i, h in world.memory[node] if h.step == 3]
    world.lose(1)
    assert world.state.group.source is None and world.state.progress.step == 4


def test_a_snapshot_that_cannot_be_read_is_not_chosen_again(new_world: NewWorld) -> None:
    world = new_world(workers=3, memory=True).open(then=6)
    world.lost_memory = {(1, 6)}
    world.lose(1)
    assert world.state.stage is Stage.FORMING and world.state.snapshots.unreadable == ((1, 6),)
    assert world.state.group.source.step == 5, "the one before it is whole as well"
    world.lost_memory.add((1, 5))
    world.join()
    world.pass_time(3.0)  # the third attempt backs off
    assert world.state.stage is Stage.FORMING and world.state.group.source is None
    world.join()
    world.run(1)
    [incident] = world.incidents()
    assert (incident.state_source, incident.steps_lost) == ("checkpoint", 2)


def test_the_newest_kept_step_is_one_of_a_snapshot_that_may_be_used(new_world: NewWorld) -> None:
    state = new_world(workers=2, memory=True).open().state
    steps = ((1, 20), (2, 30), (3, 10))
    parts = [
        SnapshotPart(generation=generation, rank=0, world_size=2, step=step, num_bytes=1, node_id="n0")
        for generation, step in steps
    ]
    reported = IntMap({0: tuple(parts)})
    cases = {
        30: SnapshotIndex(reported=reported),
        20: SnapshotIndex(reported=reported, unreadable=((2, 30),)),
        10: SnapshotIndex(reported=reported, discarded=Discarded(1, 2)),
        None: SnapshotIndex(reported=reported, oldest_generation=4),
    }
    newest = {expected: newest_reported_step(replace(state, snapshots=index)) for expected, index in cases.items()}
    assert newest == {expected: expected for expected in cases}


def test_a_snapshot_whose_server_died_is_read_from_another(new_world: NewWorld) -> None:
    world = new_world(workers=4, memory=True).open(then=6)
    world.die(1)
    world.quiesce()
    assert {e.node_id for e in world.state.group.source.parts} == {"n0", "n2", "n3"}
    world.die(3)
    for worker in world.group():
        world.leave(worker, ExitKind.SNAPSHOT_LOST)
    world.deliver_all()
    assert world.state.snapshots.unreadable == ()
    assert world.state.group.source.step == 6, "rank 3's part lies with its buddy"
    world.join()
    world.run(1)
    assert world.state.history.steps_lost == 0


def test_those_that_leave_serve_their_parts_until_the_next_group_has_made_a_step(new_world: NewWorld) -> None:
    world = new_world(workers=4, memory=True).open(then=5)
    world.direct(granted=2)
    world.advance()
    world.join()
    assert world.state.stage is Stage.RUNNING and world.count(KillWorker) == 0
    world.run(1)
    assert sorted(c.index for c in world.commands if isinstance(c, KillWorker)) == [2, 3]
    assert world.state.progress.step == 7 and world.state.history.steps_lost == 0


def test_a_switch_with_an_incomplete_snapshot_reports_that(new_world: NewWorld) -> None:
    world = new_world(workers=2, memory=True, nodes=1).open(then=6)
    world.direct(granted=1)
    world.train(1)
    world.pending.pop("exit-1")
    run = next(run for run in last_runs(world) if run.rank == 1)
    world.workers[1].run = run
    world.memory.clear()
    world.leave(world.workers[1], ExitKind.YIELDED)
    sent = world.pending.pop("exit-0")[0]
    world.post("exit-0", type(sent)(0, sent.exit.model_copy(update={"snapshot_parts": ()})))
    world.deliver_all()
    assert world.events("generation.switch_lossy")[0]["step"] == 4
    world.join()
    assert world.state.history.steps_lost == 3


def test_a_pause_during_a_switch_loses_no_step(new_world: NewWorld) -> None:
    """The boundary's snapshot is only in memory, which ends with the workers. One more step makes it durable."""
    world = new_world(workers=2, memory=True).open(then=5)
    world.direct(granted=1)
    world.direct(desired=Desired.PAUSE)
    world.advance()
    assert world.state.stage is Stage.FORMING
    world.join()
    world.run(1)
    assert world.end.reason is EndReason.PAUSED and world.state.checkpoints.newest == "step-000000000007-a1-g2"


def test_a_death_during_a_pause_uses_the_snapshots_in_memory(new_world: NewWorld) -> None:
    world = new_world(workers=3, memory=True).open(then=6)
    world.direct(desired=Desired.PAUSE)
    world.lose(1)
    world.run(1)
    assert world.end.reason is EndReason.PAUSED and world.state.checkpoints.newest == "step-000000000007-a1-g2"


def test_a_grant_below_min_workers_is_left_with_a_checkpoint(new_world: NewWorld) -> None:
    world = new_world(workers=3, min_workers=2, memory=True).open(then=5)
    world.direct(granted=1)
    assert {c.durable for c in world.commands if isinstance(c, RequestYield)} == {True}
    world.run(1)
    assert world.state.stage is Stage.WAITING and world.state.checkpoints.newest == "step-000000000006-a1-g1"


def test_a_new_worker_reports_the_snapshots_that_dead_workers_left_on_its_node(new_world: NewWorld) -> None:
    """The last worker of the only node dies; its snapshots outlive it."""
    world = new_world(workers=1, memory=True, nodes=1).open(then=6)
    world.die(0)
    world.deliver_all()
    assert world.state.stage is Stage.WAITING
    world.start(1)
    world.deliver("warm-1")
    assert world.state.stage is Stage.WAITING
    world.deliver_all()
    assert world.state.stage is Stage.FORMING and world.state.group.source.step == 6


def test_a_spare_that_could_not_be_asked_is_asked_when_it_answers_again(new_world: NewWorld) -> None:
    """Calls to it failed while the group was lost, and nobody else can serve what lies on its node."""
    world = new_world(workers=2, standby=1, memory=True, nodes=2).open(then=1)
    world.start_all()
    world.feed(WorkerUnreachable(2))
    world.die(0)
    world.die(1)
    world.deliver_all()
    assert world.state.stage is Stage.WAITING and world.count(RequestSnapshotParts) == 0
    idle = Progress(generation=0, phase=Phase.IDLE, step=0, at=world.now, counter=1)
    world.feed(ProgressReported(2, idle))
    assert world.count(RequestSnapshotParts) == 1
    world.until(Stage.FORMING)
    assert world.state.group.source.step == 1 and world.state.group.source.generation == 1


def test_without_snapshots_no_worker_is_asked_for_them(new_world: NewWorld) -> None:
    world = new_world(workers=2, standby=1).open(then=5)
    world.lose(1)
    assert world.count(RequestSnapshotParts) == 0 and world.state.group.source is None
    assert all(run.buddy is None for run in last_runs(world))


def test_a_lost_source_without_a_dead_worker_is_an_incident_of_its_own(new_world: NewWorld) -> None:
    world = new_world(workers=2, memory=True).open(then=5)
    world.direct(granted=1)
    world.advance()
    world.lost_memory = {(1, 6)}
    world.join()
    assert world.state.incident.cause is IncidentCause.SNAPSHOT_LOST
