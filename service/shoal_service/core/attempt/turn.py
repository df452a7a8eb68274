"""Hold the changes of one step of the attempt machine: the replaced parts of the state, and the commands.

    turn.group = replace(turn.group, exits=...)      mypy refuses a part or a field that does not exist

A turn exists only inside `machine.step`. A predicate of the machine returns a Decision; its caller acts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal_service.core.attempt.messages import (
    Command,
    Emit,
    End,
    FindCheckpoint,
    KillWorker,
    ShowIncident,
    StartWorker,
)
from shoal_service.core.attempt.scripts import find_rules
from shoal_service.core.attempt.state import TRANSITIONS, Attempt, CurrentStage, Ended, Stage, Worker, WorkerPool
from shoal_service.core.desired import Desired
from shoal_service.core.endings import AttemptEnd
from shoal_service.core.events import JobEvent, WorkerReleased
from shoal_service.core.layout_plan import PlanLayout
from shoal_workers.contract import EndReason, UserFailure, worker_name


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer of a predicate, true or false as a condition. `reason` contains the numbers that were used."""

    yes: bool
    reason: str

    def __bool__(self) -> bool:
        return self.yes


class Turn:
    """The state during one step. Its parts are replaced, never mutated. `commands` are performed in their order."""

    def __init__(self, state: Attempt, now: float, plan: PlanLayout) -> None:
        self.now = now
        self.plan = plan
        self.commands: list[Command] = []
        self.config = state.config
        self.target = state.target
        self._current = state.current
        self.life = state.life
        self.group = state.group
        self.pool = state.pool
        self.snapshots = state.snapshots
        self.checkpoints = state.checkpoints
        self.budgets = state.budgets
        self.health = state.health
        self.history = state.history
        self.incident = state.incident
        self.progress = state.progress
        self.code = state.code
        self.ledger = state.ledger

    @property
    def state(self) -> Attempt:
        """The state with the changes so far, for functions that only read it."""
        return Attempt(
            config=self.config,
            target=self.target,
            current=self._current,
            life=self.life,
            group=self.group,
            pool=self.pool,
            snapshots=self.snapshots,
            checkpoints=self.checkpoints,
            budgets=self.budgets,
            health=self.health,
            history=self.history,
            incident=self.incident,
            progress=self.progress,
            code=self.code,
            ledger=self.ledger,
        )

    @property
    def current(self) -> CurrentStage:
        return self._current

    @property
    def stage(self) -> Stage:
        return self._current.stage

    def enter(self, entered: CurrentStage) -> None:
        """Enter another stage, which the table of transitions has to allow."""
        assert entered.stage in TRANSITIONS[self.stage], f"{self.stage} -> {entered.stage}"
        self._current = entered

    def set_stage(self, changed: CurrentStage) -> None:
        """Replace the fields of the current stage, without leaving it."""
        assert changed.stage is self.stage, f"{self.stage} -> {changed.stage}"
        self._current = changed

    def do(self, *commands: Command) -> None:
        self.commands.extend(commands)

    def find_checkpoint(self) -> None:
        """Command the search for the newest checkpoint that is not known to be damaged."""
        self.do(FindCheckpoint(excluding=self.checkpoints.damaged, expected=self.checkpoints.expected))

    def emit(self, event: JobEvent) -> None:
        self.do(Emit(event))

    def drop_worker(self, index: int) -> Worker:
        """Remove a worker from the pool, where it has to be, and return it."""
        worker = self.pool.worker(index)
        assert worker is not None
        self.pool = self.pool.without(index)
        answered_at = dict(self.progress.answered_at)
        answered_at.pop(index, None)
        self.progress = replace(self.progress, answered_at=answered_at)
        return worker

    def start_worker(
        self,
        code: str,
        *,
        only_on: str = "",
        avoids: tuple[str, ...] = (),
        is_beside: bool = False,
        touches_memory: bool = False,
        num_missing: int = 1,
        tp: int = 1,
    ) -> None:
        """Add a new worker to the pool and start it. See StartWorker for the arguments."""
        index = self.pool.next_index
        worker_id = worker_name(self.config.job_id, self.config.attempt, index)
        worker = Worker(
            index=index, worker_id=worker_id, avoids=avoids, code=code, is_beside=is_beside, only_on=only_on
        )
        self.pool = self.pool.with_new(worker)
        self.do(
            StartWorker(
                index,
                worker_id,
                avoid_nodes=avoids,
                only_on=only_on,
                touches_memory=touches_memory,
                code=code,
                is_beside=is_beside,
                num_missing=num_missing,
                tp=tp,
            )
        )

    def release(self, worker: Worker, reason: str) -> None:
        """Kill a worker that is not needed any longer, and report it."""
        self.emit(WorkerReleased(worker_id=worker.worker_id, reason=reason))
        self.kill(worker.index, reason)

    def kill(self, index: int, reason: str) -> None:
        """Kill a worker that is not needed any longer; its loss opens no incident."""
        self.drop_worker(index)
        self.do(KillWorker(index, reason))

    def show_incident(self, *, closed: bool = False) -> None:
        if self.incident is not None:
            self.do(ShowIncident(self.incident, self.now if closed else None))

    def end_after_save(self) -> None:
        """End the attempt for the reason of `target.saves_and_ends`, after its state was saved."""
        if self.target.desired is Desired.PAUSE:
            self.end(EndReason.PAUSED, "paused on request")
        else:
            lost_workers = EndReason.MOVED if self.target.moves_to else EndReason.PREEMPTED
            reason = EndReason.SERVER_STOPPED if self.target.server_stops else lost_workers
            message = find_rules(self.state).describe_save(self.state)
            self.end(reason, message if self.history.has_formed else "it had not begun to train.")

    def end(self, reason: EndReason, message: str, failure: UserFailure | None = None) -> None:
        """Stop everything that the attempt started, then report how it ended."""
        for worker in self.pool.workers:
            self.do(KillWorker(worker.index, f"attempt ended: {reason}"))
        self.pool = WorkerPool(next_index=self.pool.next_index)
        self.show_incident()
        self.enter(Ended(since=self.now))
        step, has_run_long = self.progress.step, self.history.has_run_long
        end = AttemptEnd(reason=reason, message=message, step=step, failure=failure, has_run_long=has_run_long)
        self.do(End(end))
