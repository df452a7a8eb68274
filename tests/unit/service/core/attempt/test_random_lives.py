"""Attempts under random events from hypothesis. The world checks each command; this module checks the whole history.

The world (kit/worlds/attempt) checks at every moment: one generation at a time, equal assignments, the newest good
checkpoint, the newest snapshot that is complete in reachable memory (a rank keeps the last two, so while
all memory survives no more than one step is lost), buddies on other nodes, no call to dead workers, no worker left at
the end, no end for missing progress of a job that makes some. This module checks: a generation starts at a state that
existed, and from any state an attempt reaches RUNNING or its end, once all workers cooperate or by ticks alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import Phase as HypothesisPhase
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kit.worlds.attempt.code_rules import CodeRules
from kit.worlds.attempt.setback_rules import SetbackRules
from shoal_service.core.attempt import machine
from shoal_service.core.attempt.checkpoints import reads_storage
from shoal_service.core.attempt.messages import (
    NodesAvoided,
    NodesSilent,
    ReportArrived,
    RunReturned,
    StorageAway,
    Tick,
)
from shoal_service.core.attempt.state.parts import AvoidedNode, Stage
from shoal_service.core.desired import Desired
from shoal_service.planner import plan
from shoal_workers.contract.exception_causes import ErrorClass, Origin
from shoal_workers.contract.fault_tolerance import ElasticitySpec
from shoal_workers.contract.layout import ParallelismSpec
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.messages import ErrorReport, ExitKind, Phase
from shoal_workers.contract.worker_reports import PreemptionNotice, ReplayMismatch, ReplicaMismatch, ReplicasEqual

NewWorld = Callable[..., Any]
ERROR = ErrorReport(type="ValueError", message="boom", traceback="tb", phase=Phase.FORWARD)
TOTAL_STEPS = 40
_HANG_S = 5.0
_UNREADABLE_S = 100.0
"""Well below checkpoint.wait_s."""
_AROUND = (-1, 0, 1)
"""By how much a number that has a bound differs from it."""


def lives_of(
    new_world: NewWorld, *, fatal: bool, memory: bool, nodes: int | None = None, script: bool = False
) -> type[RuleBasedStateMachine]:
    """Without `fatal`, no event legitimately ends an attempt, so histories are long."""
    kind: dict[str, Any] = {"checkpoint": {"all_damaged": "stop" if fatal else "start_over"}}
    if script:
        kind = {"script": {"file": "train.py", "grace_s": 2.0}}

    class Life(CodeRules, SetbackRules):
        def __init__(self) -> None:
            super().__init__()
            health = {"hang_floor_s": _HANG_S, "non_finite": "roll_back" if memory else "stop"}
            self.world = new_world(
                workers=3,
                standby=1,
                memory=memory,
                nodes=nodes,
                health=health,
                retry={"max_recoveries": 1000},
                **kind,
            )
            self.world.total_steps = TOTAL_STEPS

        @initialize(steps=st.sampled_from([None, 0, 1, 5, 9, TOTAL_STEPS - 1]))
        def the_attempt_begins(self, steps: int | None) -> None:
            self.world.open(then=steps)

        @property
        def alive(self) -> list[int]:
            return [p.index for p in self.world.workers.values() if p.alive]

        @rule(data=st.data())
        def something_arrives(self, data: st.DataObject) -> None:
            if self.world.pending:
                self.world.deliver(data.draw(st.sampled_from(sorted(self.world.pending))))

        @rule()
        def everything_arrives(self) -> None:
            self.world.deliver_all()

        @rule(steps=st.integers(0, 2))
        def all_goes_well_for_a_while(self, steps: int) -> None:
            self.world.cooperate()
            if self.world.state.stage is Stage.RUNNING:
                self.world.run(steps)

        @rule()
        def workers_become_warm(self) -> None:
            for index in self.alive:
                self.world.start(index)

        @rule(data=st.data())
        def one_worker_becomes_warm(self, data: st.DataObject) -> None:
            if self.alive:
                self.world.start(data.draw(st.sampled_from(self.alive)))

        @rule()
        def the_group_forms(self) -> None:
            if self.world.state.stage is Stage.FORMING and not any(
                key.startswith(("reports", "exit")) for key in self.world.pending
            ):
                self.world.form()

        @precondition(lambda self: self.world.state.stage in (Stage.RUNNING, Stage.SWITCHING))
        @rule(
            save_every=st.sampled_from([1, 2, 4]),
            more=st.sampled_from(_AROUND),
            late=st.sampled_from([None, 0, 1]),
        )
        def the_group_trains(self, save_every: int, more: int, late: int | None) -> None:
            """Around the step of the next checkpoint."""
            self.world.train(max(0, save_every + more - 1), save_every=save_every)
            self.world.train(1, save_every=save_every, late=late)

        @rule()
        def searches_are_answered(self) -> None:
            self.world.answer_finds()

        @precondition(lambda self: self.world.finds)
        @rule()
        def the_storage_is_away_for_a_moment(self) -> None:
            self.world.finds = []
            self.world.post("find", StorageAway("TimeoutError: no answer"))

        @precondition(lambda self: self.world.finds)
        @rule()
        def the_directory_is_empty_for_a_moment(self) -> None:
            self.world.is_storage_empty = True
            self.world.answer_finds()
            self.world.is_storage_empty = False

        @precondition(lambda self: self.world.state.stage is Stage.FORMING and reads_storage(self.world.state))
        @rule(data=st.data())
        def a_node_does_not_see_the_storage(self, data: st.DataObject) -> None:
            since = self.world.state.checkpoints.unreadable_since
            workers = self.world.group()
            if workers and not script and self.world.now - (since or self.world.now) < _UNREADABLE_S:
                self.world.leave(data.draw(st.sampled_from(workers)), ExitKind.STORAGE_FAILED, ERROR)

        @rule()
        def commits_are_answered(self) -> None:
            self.world.answer_commits()

        @precondition(lambda self: self.world.state.stage is not Stage.COMMITTING or fatal)
        @rule()
        def commits_fail(self) -> None:
            self.world.answer_commits(ok=False)

        @rule(data=st.data())
        def a_worker_dies(self, data: st.DataObject) -> None:
            if self.alive:
                self.world.die(data.draw(st.sampled_from(self.alive)))

        @rule(data=st.data())
        def a_worker_gets_stuck(self, data: st.DataObject) -> None:
            if self.world.group():
                data.draw(st.sampled_from(self.world.group())).is_stuck = True

        @rule(data=st.data(), unreachable=st.booleans())
        def a_worker_stops(self, data: st.DataObject, unreachable: bool) -> None:
            if self.alive:
                self.world.stop(data.draw(st.sampled_from(self.alive)), unreachable=unreachable)

        @rule(data=st.data())
        def nodes_are_silent(self, data: st.DataObject) -> None:
            """For a moment or for long, rightly or not; none: all answer again."""
            there = sorted({p.node_id for p in self.world.workers.values() if p.alive and p.node_id})
            chosen = data.draw(st.lists(st.sampled_from(there), unique=True, max_size=2)) if there else []
            self.world.feed(NodesSilent(dict.fromkeys(chosen, "no answer")))

        @precondition(lambda self: memory)
        @rule(data=st.data())
        def a_node_dies(self, data: st.DataObject) -> None:
            if self.alive:
                self.world.die_node(self.world.workers[data.draw(st.sampled_from(self.alive))].node_id)

        @precondition(lambda self: memory and self.world.states)
        @rule()
        def the_newest_snapshot_cannot_be_read(self) -> None:
            self.world.lost_memory.add(max(self.world.states, key=lambda state: state[::-1]))

        @precondition(lambda self: memory)
        @rule(data=st.data())
        def nodes_are_suspected(self, data: st.DataObject) -> None:
            """Also those on which every worker has died, which the others only reach to read their memory."""
            there = sorted({p.node_id for p in self.world.workers.values() if p.node_id})
            chosen = data.draw(st.lists(st.sampled_from(there), unique=True, max_size=2)) if there else []
            avoided = [AvoidedNode(node_id=n, reason="3 workers lost", is_suspected=True) for n in chosen]
            self.world.feed(NodesAvoided(tuple(avoided)))

        @precondition(lambda self: memory)
        @rule(data=st.data(), seconds=st.sampled_from([None, 2.0, 20.0]))
        def nodes_are_drained(self, data: st.DataObject, seconds: float | None) -> None:
            there = sorted({p.node_id for p in self.world.workers.values() if p.alive and p.node_id})
            chosen = data.draw(st.lists(st.sampled_from(there), unique=True, max_size=2)) if there else []
            deadline = None if seconds is None else self.world.now + seconds
            self.world.feed(
                NodesAvoided(tuple(AvoidedNode(node_id=n, reason="requested", deadline=deadline) for n in chosen))
            )

        @precondition(lambda self: memory and self.alive)
        @rule(data=st.data(), grace_s=st.sampled_from([1.0, 10.0]))
        def a_worker_gives_notice(self, data: st.DataObject, grace_s: float) -> None:
            index = data.draw(st.sampled_from(self.alive))
            notice = PreemptionNotice(
                generation=self.world.state.group.generation, at=self.world.now, grace_s=grace_s, reason="SIGTERM"
            )
            self.world.post(f"reports-{index}", ReportArrived(index, notice))

        @precondition(lambda self: memory and len(self.world.group()) > 1 and self.world.state.stage is Stage.RUNNING)
        @rule(rank=st.integers(0, 1))
        def a_rank_computes_wrong(self, rank: int) -> None:
            first = self.world.group()[0]
            named = ReplayMismatch(
                generation=first.run.generation, step=first.step, at=self.world.now, rank=rank, message="other bits"
            )
            self.world.send(first, named)

        @precondition(lambda self: memory and self.world.is_whole and self.world.state.stage is Stage.RUNNING)
        @rule(compute_s=st.lists(st.sampled_from([0.1, 0.9]), min_size=1, max_size=4), more=st.sampled_from(_AROUND))
        def a_rank_is_slow_for_long(self, compute_s: list[float], more: int) -> None:
            """For about as many steps as make it a straggler."""
            steps = self.world.state.target.spec.health.straggler_steps + more
            if not self.world.pending and self.world.group()[0].step < TOTAL_STEPS - steps - 1:
                seconds = (compute_s * 4)[: self.world.world_size]
                for _ in range(steps):
                    if self.world.state.stage is Stage.RUNNING and self.world.is_whole:
                        self.world.report(*seconds)

        @precondition(lambda self: memory and self.world.is_whole)
        @rule()
        def a_step_is_not_finite(self) -> None:
            if self.world.state.stage is Stage.RUNNING and self.world.state.budgets.rollbacks < 3:
                for worker in self.world.group():
                    self.world.leave(worker, ExitKind.NON_FINITE, ERROR)

        @precondition(lambda self: self.world.group())
        @rule()
        def collectives_break(self) -> None:
            if not self.world.is_whole:
                self.world.break_collectives()

        @precondition(lambda self: script and self.world.is_whole)
        @rule(data=st.data(), others=st.sampled_from([None, ExitKind.USER_ERROR, ExitKind.COLLECTIVE_FAILED]))
        def a_process_of_the_script_is_killed(self, data: st.DataObject, others: ExitKind | None) -> None:
            """The processes of the other ranks notice it, each in its own way, or not at all."""
            killed, *rest = data.draw(st.permutations(self.world.group()))
            self.world.kill_script(killed)
            for worker in rest if others is not None else ():
                self.world.leave(worker, others, ERROR)

        @precondition(lambda self: script)
        @rule(reports=st.booleans())
        def the_script_reports_its_steps_or_not(self, reports: bool) -> None:
            self.world.reports_steps = reports

        @rule()
        def interrupts_are_obeyed(self) -> None:
            self.world.obey_interrupts()

        @precondition(lambda self: self.world.committed)
        @rule()
        def a_checkpoint_rots(self) -> None:
            self.world.damage_newest()

        @rule(seconds=st.sampled_from([0.0, 0.25, 1.0, 3.0, 6.0, *(_HANG_S + more / 100 for more in _AROUND)]))
        def time_passes(self, seconds: float) -> None:
            self.world.pass_time(seconds)

        @rule(workers=st.integers(1, 4))
        def the_grant_changes(self, workers: int) -> None:
            self.world.direct(granted=workers)

        @rule(minimum=st.integers(1, 3), standby=st.integers(0, 2))
        def elasticity_changes(self, minimum: int, standby: int) -> None:
            spec = ElasticitySpec(min_workers=minimum, max_workers=4, standby=standby, wait_s=30.0)
            self.world.direct(elasticity=spec)

        @precondition(lambda self: not script)
        @rule(replicas=st.integers(1, 2), otherwise=st.sampled_from(["replan", "idle"]))
        def the_layout_is_to_be_another(self, replicas: int, otherwise: Any) -> None:
            self.world.direct(parallelism=ParallelismSpec(dp_replicate=replicas, otherwise=otherwise))

        @precondition(lambda self: self.world.history)
        @rule(data=st.data())
        def an_old_answer_comes_again(self, data: st.DataObject) -> None:
            state = self.world.state
            old = [
                event
                for event in self.world.history[-40:]
                if isinstance(event, RunReturned) and event.exit.generation != state.group.generation
            ]
            if old:
                before = self.world.state
                self.world.feed(data.draw(st.sampled_from(old)))
                assert self.world.state.group.exits == before.group.exits or self.world.state.stage is not before.stage

        @precondition(lambda self: fatal)
        @rule(desired=st.sampled_from(list(Desired)))
        def the_user_wants(self, desired: Desired) -> None:
            self.world.direct(desired=desired)

        @precondition(lambda self: fatal and self.world.group())
        @rule(data=st.data(), kind=st.sampled_from([ExitKind.USER_ERROR, ExitKind.NON_FINITE, ExitKind.STORAGE_FAILED]))
        def a_rank_fails(self, data: st.DataObject, kind: ExitKind) -> None:
            self.world.leave(data.draw(st.sampled_from(self.world.group())), kind, ERROR)

        @precondition(lambda self: fatal and self.world.group())
        @rule(data=st.data(), kind=st.sampled_from([ExitKind.WORKER_FAULT, ExitKind.ENGINE_ERROR]))
        def a_rank_fails_as_its_node_does(self, data: st.DataObject, kind: ExitKind) -> None:
            error = ERROR.model_copy(
                update={
                    "error_class": data.draw(st.sampled_from(list(ErrorClass))),
                    "origin": data.draw(st.sampled_from(list(Origin))),
                }
            )
            self.world.leave(data.draw(st.sampled_from(self.world.group())), kind, error)

        @precondition(lambda self: fatal and self.world.group())
        @rule(data=st.data())
        def replicas_are_compared(self, data: st.DataObject) -> None:
            world, group = self.world, self.world.group()
            named = {"generation": group[0].run.generation, "step": group[0].step, "at": world.now}
            if data.draw(st.booleans()):
                world.send(group[0], ReplicasEqual(**named, cpu_s=0.0))
            else:
                ranks = (data.draw(st.sampled_from(range(group[0].run.world_size))),)
                is_certain = data.draw(st.booleans())
                world.send(group[0], ReplicaMismatch(**named, ranks=ranks, is_certain=is_certain, message="other bits"))

        @precondition(lambda self: fatal and self.alive)
        @rule(data=st.data())
        def a_worker_cannot_load_the_task(self, data: st.DataObject) -> None:
            starting = [i for i in self.alive if not self.world.workers[i].is_warm]
            if starting:
                self.world.fail_to_start(data.draw(st.sampled_from(starting)))

        @invariant()
        def no_group_restores_what_is_not_trusted(self) -> None:
            state = self.world.state
            known, restored = state.checkpoints, state.group.restored
            if known.distrusted is not None and restored and state.group.generation > known.distrusted[0]:
                assert not known.is_distrusted(restored)

        @invariant()
        def a_generation_starts_at_its_source(self) -> None:
            state = self.world.state
            if state.stage is Stage.RUNNING and not script:
                restored = CheckpointName.parse(state.group.restored) if state.group.restored else None
                durable = restored.step if restored else 0
                assert state.group.start_step == (state.group.source.step if state.group.source else durable)
                assert state.progress.step >= state.group.start_step >= durable

        @invariant()
        def incidents_are_counted_and_reported(self) -> None:
            opened = [e["id"] for e in self.world.events("incident.opened")]
            closed = [e["id"] for e in self.world.events("incident.closed")]
            assert opened == list(range(1, self.world.state.history.num_incidents + 1))
            assert len(set(closed)) == len(closed) and set(closed) <= set(opened)
            still_open = self.world.state.incident
            assert len(opened) - len(closed) == (still_open is not None), "one at a time, each comes to an end"

        @invariant()
        def commits_in_flight_are_remembered(self) -> None:
            assert set(self.world.state.checkpoints.committing) <= set(self.world.state.checkpoints.parts)

        def teardown(self) -> None:
            self.ticks_alone_lead_to_an_end()
            self.everybody_cooperates_and_it_finishes()

        def ticks_alone_lead_to_an_end(self) -> None:
            """No worker answers. A supervisor that handles an event a second is late each time, so timeouts.absence_s
            (0.5 s) of each second count: 500 s, and the longest wait of this spec is checkpoint.wait_s, 300 s."""
            state, now = self.world.state, self.world.now
            for _ in range(1000):
                if state.stage is Stage.ENDED:
                    return
                now += 1.0
                state, _ = machine.step(state, Tick(), now, plan)
            raise AssertionError(f"{self.world.state.stage} gets stuck in {state.stage}")

        def everybody_cooperates_and_it_finishes(self) -> None:
            world = self.world
            world.feed(NodesAvoided(()))
            world.until(Stage.RUNNING, Stage.ENDED)
            if not fatal:
                world.direct(desired=Desired.RUN)
            for _ in range(200):
                if world.state.stage is Stage.ENDED:
                    break
                world.advance()
                if not world.is_whole and world.state.stage is Stage.RUNNING:
                    for worker in world.group():
                        worker.is_stuck = worker.is_stopped
                    world.break_collectives()  # its own timeout wakes the waiting ranks
                world.cooperate()
            assert world.end is not None, f"still {world.state.stage} at step {world.state.progress.step}"

    return Life


COMMON = {
    "phases": [HypothesisPhase.explicit, HypothesisPhase.generate],  # hypothesis shrinks histories too slowly
    "max_examples": 4,
    "stateful_step_count": 50,
    "deadline": None,
    "database": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
}

VARIANTS: dict[str, dict[str, Any]] = {
    "lost workers and failing storage": {"fatal": False, "memory": False},
    "may end at any moment": {"fatal": True, "memory": True, "nodes": 1},
    "snapshots, a node per worker": {"fatal": False, "memory": True},
    "snapshots, two nodes": {"fatal": False, "memory": True, "nodes": 2},
    "snapshots, three nodes": {"fatal": False, "memory": True, "nodes": 3},
    "a script": {"fatal": False, "memory": False, "script": True},
    "a script that may end at any moment": {"fatal": True, "memory": False, "nodes": 2, "script": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_random_histories(new_world: NewWorld, variant: str) -> None:
    run_state_machine_as_test(lives_of(new_world, **VARIANTS[variant]), settings=settings(**COMMON))


@pytest.mark.matrix
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("variant", VARIANTS)
def test_many_random_histories(new_world: NewWorld, variant: str) -> None:
    """Seven variants of 120 examples: 840, and others in every run."""
    many = settings(**{**COMMON, "max_examples": 120}, derandomize=False)
    run_state_machine_as_test(lives_of(new_world, **VARIANTS[variant]), settings=many)
