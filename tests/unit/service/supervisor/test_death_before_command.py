"""The supervisor dies between the journal write and a command, for every command of a life with a lost worker.

A cooperating set of workers trains, loses a worker, grows back, saves, shrinks and finishes. That life is lived once
undisturbed; then once for each of its commands, with a supervisor that dies just before that command and is started
again. Nothing else may differ: no other incident, no suspected node, no lost step, no state from storage.
"""

import asyncio

import pytest

from doubles.event_loop import run, settle
from doubles.supervisor_bench import SPEC, SupervisorBench
from shoal_service.core.attempt.messages import Command, Emit, End, ShowIncident, SuspectNode
from shoal_service.supervisor.executor import TICK_S
from shoal_workers.contract.job import EndReason
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.snapshots import SnapshotPart

NODE = "shared"
TOTAL_STEPS = 14
REPORTED = (Emit, ShowIncident, SuspectNode, End)
"""Commands that are in the outbox before the journal is written."""


class Died(BaseException):
    """The supervisor's process has ended."""


class Life:
    """One attempt from its start to its end. `dies_before`: the number of the command, from 0, before which the
    supervisor dies once."""

    def __init__(self, dies_before: int | None) -> None:
        self.dies_before = dies_before
        self.kinds: list[str] = []
        """The commands that were about to be performed, until the death."""
        self.bench = SupervisorBench(
            spec=SPEC.model_copy(update={"stop": SPEC.stop.model_copy(update={"steps": TOTAL_STEPS})})
        )
        self.bench.workers.total_steps = TOTAL_STEPS
        self.bench.before_command = self._before
        self.has_died = False
        self.trained: list[int] = []
        """Steps, in the order in which they were done."""
        self.has_lost_a_worker = False
        self.has_shrunk = False

    def _before(self, command: Command) -> None:
        if isinstance(command, REPORTED) or self.has_died:
            return
        self.kinds.append(type(command).__name__)
        if len(self.kinds) - 1 == self.dies_before:
            self.has_died = True
            raise Died

    async def live(self) -> None:
        bench = self.bench
        bench.node_of.update(dict.fromkeys(range(20), NODE))
        bench.start()
        for _ in range(4000):
            await settle()
            if bench.running.done() and isinstance(_error_of(bench.running), Died):
                await bench.restart()
                bench.direct(granted=1 if self.has_shrunk else 2)
                continue
            if bench.running.done():
                bench.running.result()
                return
            self._cooperate()
            await bench.clock.advance(TICK_S)
        raise AssertionError(f"no end; stage {bench.stage}, events {bench.events()}")

    def _cooperate(self) -> None:
        """What the workers do in a quarter of a second."""
        workers = self.bench.workers
        group = workers.group
        if not group or len(group) < group[0].assignment.world_size or any(w.is_stuck for w in group):
            return
        if not group[0].is_formed:
            source = group[0].assignment.restore_snapshot
            workers.form(start_step=source.step if source is not None else 0)
            for worker in group:
                worker.is_formed = True
            return
        if any(w.yields for w in group):
            for worker in group:
                worker.yields.clear()
                worker.leave(ExitKind.YIELDED)
            return
        workers.train()
        self.trained.append(group[0].step)
        self._keep_snapshots()
        step = group[0].step
        if step == TOTAL_STEPS:
            workers.finish()
        elif step == 3:
            for worker in group:
                worker.save()
        elif step == 5 and not self.has_lost_a_worker:
            self.has_lost_a_worker = True
            group[1].die()  # the other one leaves when it is interrupted
        elif step == 11 and not self.has_shrunk:
            self.has_shrunk = True
            self.bench.direct(granted=1)

    def _keep_snapshots(self) -> None:
        """Every rank's part of this step is in the memory of the one node, whichever worker is asked."""
        group = self.bench.workers.group
        parts = tuple(
            SnapshotPart(
                generation=worker.assignment.generation,
                rank=worker.assignment.rank,
                world_size=worker.assignment.world_size,
                step=worker.step,
                num_bytes=10,
                node_id=NODE,
            )
            for worker in group
        )
        for worker in self.bench.workers.by_name.values():
            worker.parts = parts

    def outcome(self) -> dict[str, object]:
        """What must be the same whether a supervisor died or not."""
        reports = self.bench.reports
        assert reports.end is not None
        forming = [event.data for event in reports.events if str(event.type) == "generation.forming"]
        return {
            "end": (reports.end.reason, reports.end.step),
            "incidents": [(i.cause, i.steps_lost, i.from_workers, i.to_workers) for i in reports.incidents],
            "suspects": reports.suspects,
            "steps_lost": reports.status.steps_lost,
            "groups": [(f["workers"], f["source"], f["step"]) for f in forming],
            "steps": self.trained,
            "checkpoints": [(view.step, view.state) for view in reports.checkpoints],
            "left over": sorted(self.bench.workers.by_name),
        }


def _error_of(task: asyncio.Task[None]) -> BaseException | None:
    return None if task.cancelled() else task.exception()


def lived(dies_before: int | None) -> Life:
    life = Life(dies_before)
    run(life.live())
    return life


UNDISTURBED = lived(None)
KINDS = UNDISTURBED.kinds


def test_the_undisturbed_life_has_every_kind_of_command() -> None:
    assert UNDISTURBED.outcome()["end"] == (EndReason.FINISHED, TOTAL_STEPS)
    wanted = {"FindCheckpoint", "StartWorker", "Run", "Commit", "Interrupt", "RequestYield", "KillWorker"}
    assert wanted <= set(KINDS)


@pytest.mark.parametrize("number", range(len(KINDS)), ids=[f"{n}-{kind}" for n, kind in enumerate(KINDS)])
def test_a_supervisor_that_dies_before_a_command_changes_nothing(number: int) -> None:
    life = lived(number)
    assert life.has_died
    assert life.outcome() == UNDISTURBED.outcome()
