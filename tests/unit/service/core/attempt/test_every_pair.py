"""Every stage with every event: no exception, no forbidden transition, and ticks alone end every wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kit.worlds.attempt.new_world import make_world
from kit.worlds.attempt.parts import copy_of, directed, error_of, from_journal
from shoal_service.core.attempt import machine
from shoal_service.core.attempt.messages import (
    CheckpointCommitted,
    CheckpointFound,
    ClockJumped,
    CommitFailed,
    DeathDated,
    DeathExplained,
    End,
    Event,
    InterruptAcknowledged,
    ModelsCompared,
    NodesAvoided,
    NodesSilent,
    ProgressReported,
    Reopened,
    ReportArrived,
    RunReturned,
    SnapshotPartsReported,
    StorageAway,
    StorageUnusable,
    Tick,
    WorkerFailedToStart,
    WorkerLost,
    WorkerUnreachable,
    WorkerWarm,
)
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.parts import AvoidedNode, Stage
from shoal_service.core.desired import Desired
from shoal_service.planner import plan
from shoal_workers.contract.fault_tolerance import ElasticitySpec
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.layout import ParallelismSpec
from shoal_workers.contract.messages import ErrorReport, ExitKind, Phase, Progress, WorkerExit, WorkerInfo
from shoal_workers.contract.snapshots import SnapshotPart
from shoal_workers.contract.worker_reports import (
    GroupFormed,
    PreemptionNotice,
    ReplayMismatch,
    SavedPart,
    SaveFailed,
    SnapshotCost,
    SnapshotsStopped,
    StepReport,
    StepSkipped,
    ValidationReport,
    WorkerReport,
)

NewWorld = Callable[..., Any]
Moments = list[tuple[Attempt, float]]
HEALTH = {"hang_floor_s": 5.0}


def worlds(new_world: NewWorld) -> Iterator[Any]:
    """At least one world in each stage, with and without workers that have left, an open incident, a pause; with and
    without snapshots in memory."""
    for memory in (False, True):
        yield from _worlds(lambda memory=memory, **more: new_world(memory=memory, **{"health": HEALTH, **more}))
    yield from _sick_worlds(new_world)
    yield from _updated_worlds(new_world)
    yield from _silent_worlds(new_world)


def _sick_worlds(new_world: NewWorld) -> Iterator[Any]:
    """Stopped workers, drained nodes, workers with notice, a straggler, a rank that computes wrong, a lost source."""
    world = new_world(workers=3, standby=1, memory=True, health=HEALTH).open(then=6)
    world.stop(1)
    world.stop(3, unreachable=True)
    world.deliver_all()
    yield world
    world = new_world(workers=3, memory=True, nodes=3, health=HEALTH).open(then=6)
    world.feed(NodesAvoided((AvoidedNode(node_id="n1", reason="drain", deadline=world.now + 60.0),)))
    world.feed(ReportArrived(0, PreemptionNotice(generation=1, at=0, grace_s=60.0, reason="SIGTERM")))
    yield world
    world = new_world(workers=3, memory=True, health={"straggler_steps": 1, **HEALTH}).open(then=6)
    world.report(0.1, 0.9, 0.1)
    yield world
    world = new_world(workers=3, standby=1, memory=True, health=HEALTH).open(then=6)
    world.feed(ReportArrived(0, ReplayMismatch(generation=1, step=6, at=0, rank=1, message="other bits")))
    yield world
    world = new_world(workers=3, memory=True, health=HEALTH).open(then=6)
    world.lost_memory = {(1, 6)}
    world.lose(1)
    yield world


def _updated_worlds(new_world: NewWorld) -> Iterator[Any]:
    """New code: its workers start; they are warm; it is on trial; it is to be rolled back; it was rolled back."""
    for until in ("started", "warm", "trial", "fault", "rolled back"):
        world = new_world(workers=2, memory=True, health=HEALTH).open(then=6)
        world.direct(code="a" * 64)
        if until != "started":
            world.start_all()
        if until in ("trial", "fault", "rolled back"):
            world.run(1)
            world.join()
        if until == "fault":
            skipped = StepSkipped(generation=2, step=8, at=0, loss=None, grad_norm=None)
            world.feed(ReportArrived(world.group()[0].index, skipped))
        if until == "rolled back":
            for worker in world.group():
                world.leave(worker, ExitKind.USER_ERROR, error_of("ValueError", "no"))
            world.deliver_all()
        yield world


def _silent_worlds(new_world: NewWorld) -> Iterator[Any]:
    """A node is silent; it answers again; its worker has not left its old generation."""
    for answers in (False, True):
        world = new_world(workers=3, memory=True, health=HEALTH).open(then=6)
        world.stop(2)
        world.pass_time(2.0)
        world.feed(NodesSilent({"n2": "no answer"}))
        yield world
        world.recover()
        world.run(1)
        if answers:
            world.feed(NodesSilent({}))
        yield world


def _worlds(new_world: NewWorld) -> Iterator[Any]:
    yield new_world(workers=3, standby=1)
    yield new_world(workers=3, standby=1).open()
    for steps in (0, 6, 12):
        yield new_world(workers=3, standby=1).open(then=steps)
    world = new_world(workers=3).open()
    world.start_all()
    yield world
    for desired in (Desired.RUN, Desired.PAUSE):
        world = new_world(workers=3).open(then=6)
        world.direct(desired=desired)
        world.die(1)
        world.deliver_all()
        yield world
    world = new_world(workers=3, min_workers=3).open(then=6)
    world.lose(1)
    yield world
    world = new_world(workers=3).open(then=6)
    world.lose(1)
    yield world
    for reported in ("nothing", "one exit", "exits", "exits and parts"):
        world = new_world(workers=3).open(then=6)
        world.direct(granted=2)
        world.train(1)
        if reported == "one exit":
            world.deliver("exit-0")
        elif reported != "nothing":
            for channel in ("exit-0", "exit-1", "exit-2"):
                world.deliver(channel)
        if reported == "exits and parts":
            world.deliver_all()
        yield world
    world = new_world(workers=3)
    world.committed["step-000000000004-a0-g1"] = False
    world.open()
    world.start_all()
    world.join()
    yield world


def events(state: Attempt) -> Iterator[Event]:
    """Events of every kind, about workers that are there and that are not, of this generation and the one before."""
    error = ErrorReport(type="E", message="m", traceback="", phase=Phase.FORWARD)
    step = state.progress.step
    name = f"step-{step:012d}-a1-g{state.group.generation}"
    yield Tick()
    yield Reopened()
    for jump_s in (86400.0, -86400.0):
        yield ClockJumped(jump_s)
    for found in (None, "step-000000000002-a0-g1", name, *state.checkpoints.damaged):
        yield CheckpointFound(found)
    yield CheckpointFound(None, (("step-000000000004-a0-g1", "COMMIT.json has another crc32"),))
    yield StorageUnusable("read-only")
    yield StorageAway("TimeoutError: no answer")
    for grant in (0, 1, 2, 3, 5):
        yield directed(state.target, granted=grant)
    for desired in Desired:
        yield directed(state.target, desired=desired)
    for stops in (True, False):
        yield directed(state.target, server_stops=stops)
        yield directed(state.target, is_preempted=stops)
    for version in ("", "a" * 64, "b" * 64):
        yield directed(state.target, code=version)
    yield directed(state.target, pinned=("step-000000000002-a0-g1",))
    for minimum in (1, 4):
        yield directed(state.target, elasticity=ElasticitySpec(min_workers=minimum, max_workers=8))
    yield directed(
        state.target,
        granted=1,
        desired=Desired.PAUSE,
        elasticity=ElasticitySpec(min_workers=1, max_workers=2),
        code="b" * 64,
        server_stops=True,
        is_preempted=True,
    )
    for tp in (1, 2):
        yield directed(state.target, parallelism=ParallelismSpec(tp=tp))
    for generation in (state.group.generation, max(0, state.group.generation - 1)):
        yield CheckpointCommitted(name, generation, step)
        yield CommitFailed(name, generation, "disk full")
    for worker_id in ("nobody", *(worker.worker_id for worker in state.pool.workers)):
        yield DeathDated(worker_id, 1.0)
        yield DeathExplained(worker_id, "exited with 3")
    for silent in ((), ("n0",), ("n0", "n1", "n2", "n3")):
        yield NodesSilent(dict.fromkeys(silent, "no answer"))
    for avoided in ((), ("n0",), ("n0", "n1", "n2", "n3")):
        for deadline in (None, 0.0, 1e9):
            yield NodesAvoided(tuple(AvoidedNode(node_id=n, reason="drain", deadline=deadline) for n in avoided))
    yield NodesAvoided((AvoidedNode(node_id="n0", reason="cordoned", keeps_workers=True),))
    for index in range(5):
        yield WorkerUnreachable(index)
        for difference in ("", "weight is new"):
            yield ModelsCompared(index, difference)
        yield SnapshotPartsReported(index, ())
        held = SnapshotPart(
            generation=state.group.generation, rank=0, world_size=1, step=step, num_bytes=1, node_id=f"n{index}"
        )
        yield SnapshotPartsReported(index, (held,))
        for generation in (state.group.generation, state.group.generation - 1):
            yield InterruptAcknowledged(index, generation)
            yield ProgressReported(
                index, Progress(generation=generation, phase=Phase.FORWARD, step=step, at=0, counter=1)
            )
        yield WorkerWarm(
            index, WorkerInfo(worker_id="s", node_id="n", node_ip="10.0.0.1", pid=1, store_port=2, device="cpu")
        )
        yield WorkerFailedToStart(index, error)
        for cause in (IncidentCause.WORKER_DIED, IncidentCause.NODE_DIED):
            yield WorkerLost(index, cause, "run call", "gone")
        for generation in (state.group.generation, state.group.generation - 1):
            for kind in ExitKind:
                exit_error = error if kind is not ExitKind.FINISHED else None
                yield RunReturned(
                    index, WorkerExit(generation=generation, rank=index, kind=kind, step=step, error=exit_error)
                )
            for item in _reports(generation, step):
                yield ReportArrived(index, item)


def _reports(generation: int, step: int) -> list[WorkerReport]:
    where = f"/checkpoints/j1/step-{step:012d}-a1-g{generation}"
    return [
        GroupFormed(
            generation=generation,
            at=0,
            start_step=step,
            total_steps=12,
            form_s=0,
            build_s=0,
            restore_s=0,
            num_parameters=1,
        ),
        StepReport(
            generation=generation, step=step + 1, at=0, loss=1, grad_norm=1, lr=1, tokens=1, step_s=1, world_size=3
        ),
        ValidationReport(generation=generation, step=step, at=0, loss=1, bits_per_byte=None, samples=1),
        SavedPart(
            generation=generation, step=step, rank=0, world_size=1, directory=where, files=(), stall_s=0, write_s=0
        ),
        SaveFailed(generation=generation, step=step, rank=0, directory=where, error="disk full"),
        StepSkipped(generation=generation, step=step + 1, at=0, loss=None, grad_norm=None),
        PreemptionNotice(generation=generation, at=0, grace_s=1, reason="SIGTERM"),
        SnapshotCost(
            generation=generation,
            step=step,
            every_steps=1,
            buddy_every_steps=1,
            copy_s=0,
            buddy_s=0,
            share=0,
            num_bytes=1,
        ),
        SnapshotsStopped(generation=generation, step=step, at=0, rank=0, only_copies=True, message="full"),
        *(ReplayMismatch(generation=generation, step=step, at=0, rank=rank, message="m") for rank in (0, 7)),
    ]


@pytest.fixture(scope="module")
def moments() -> Moments:
    """The state of each world, which is frozen, and its time."""
    return [(world.state, world.now) for world in worlds(make_world)]


def test_every_stage_is_among_the_worlds(moments: Moments) -> None:
    assert {state.stage for state, _ in moments} == set(Stage)


def test_no_pair_raises_or_breaks_a_rule(moments: Moments) -> None:
    """No event changes the state that it is given, and the same event has the same result."""
    pairs = 0
    for state, now in moments:
        copy = copy_of(state)
        for event in events(state):
            after, commands = machine.step(state, event, now + 0.5, plan)
            if pairs % 5 == 0:
                assert machine.step(state, event, now + 0.5, plan) == (after, commands)
            if after.stage is not state.stage or pairs % 37 == 0:
                assert from_journal(after) == after
            assert sum(isinstance(c, End) for c in commands) == (
                after.stage is Stage.ENDED and state.stage is not Stage.ENDED
            )
            assert after.group.generation in (state.group.generation, state.group.generation + 1)
            pairs += 1
        assert state == copy, f"an event has changed the state at {state.stage}"
    assert pairs > 2000


@pytest.mark.parametrize(
    "changes", [{"desired": Desired.RUN}, {"desired": Desired.PAUSE}, {"server_stops": True}, {"is_preempted": True}]
)
def test_ticks_alone_lead_out_of_every_wait(moments: Moments, changes: dict[str, Any]) -> None:
    """No worker ever answers: every stage ends."""
    for first, since in moments:
        state, now = first, since
        if state.stage is not Stage.ENDED:
            state, _ = machine.step(state, directed(state.target, **changes), now, plan)
        for _ in range(800):
            if state.stage is Stage.ENDED:
                break
            now += 0.5
            state, _ = machine.step(state, Tick(), now, plan)
        assert state.stage is Stage.ENDED, f"{first.stage} gets stuck in {state.stage}"
        assert state.stage is Stage.ENDED or not state.group.exits
