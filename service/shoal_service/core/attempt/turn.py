"""One turn of the machine: the state being rewritten and the commands being collected. Lives only inside `step`."""

from __future__ import annotations

from typing import Any

from shoal_service.core.attempt.commands import Command, Emit, End, KillWorker, ShowIncident
from shoal_service.core.attempt.plan_layout import PlanLayout
from shoal_service.core.attempt.state.attempt import TRANSITIONS, Attempt, Stage, Worker
from shoal_service.core.endings import AttemptEnd
from shoal_workers.contract.job import EndReason, UserFailure


class Turn:
    """`state` is replaced, never mutated; `commands` are in the order in which they are to be performed."""

    def __init__(self, state: Attempt, now: float, plan: PlanLayout) -> None:
        self.state = state
        self.plan = plan
        self.now = now
        self.commands: list[Command] = []

    def set(self, **changes: Any) -> None:
        self.state = self.state.model_copy(update=changes)

    def do(self, *commands: Command) -> None:
        self.commands.extend(commands)

    def emit(self, type_: str, **data: Any) -> None:
        self.do(Emit(type_, data))

    def enter(self, stage: Stage) -> None:
        assert stage in TRANSITIONS[self.state.stage], f"{self.state.stage} -> {stage}"
        self.set(stage=stage, since=self.now)

    def update_worker(self, index: int, **changes: Any) -> None:
        self.set(workers=tuple(p.model_copy(update=changes) if p.index == index else p for p in self.state.workers))

    def drop_worker(self, index: int) -> Worker:
        worker = self.state.worker(index)
        assert worker is not None
        self.set(
            workers=tuple(p for p in self.state.workers if p.index != index),
            answered={i: at for i, at in self.state.answered.items() if i != index},
        )
        return worker

    def kill(self, index: int, reason: str) -> None:
        """Kill a worker that the machine does not want any longer; its loss will be nobody's incident."""
        self.drop_worker(index)
        self.do(KillWorker(index, reason))

    def show_incident(self, *, closed: bool = False) -> None:
        incident = self.state.incident
        if incident is not None:
            self.do(ShowIncident(incident, self.now if closed else None))

    def end(self, reason: EndReason, message: str, failure: UserFailure | None = None) -> None:
        """Stop everything that the attempt started, then say how it ended."""
        for worker in self.state.workers:
            self.do(KillWorker(worker.index, f"attempt ended: {reason}"))
        self.set(workers=())
        self.show_incident()
        self.enter(Stage.ENDED)
        self.do(End(AttemptEnd(reason=reason, message=message, step=self.state.step, failure=failure)))
