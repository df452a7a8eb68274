"""One turn of the machine: the state being rewritten and the commands being collected. Lives only inside `step`."""

from __future__ import annotations

from typing import Any

from shoal_service.core.attempt.commands import Command, Emit, End, KillProcess, ShowIncident
from shoal_service.core.attempt.incident import view_of
from shoal_service.core.attempt.state import TRANSITIONS, Attempt, Process, Stage
from shoal_service.news import AttemptEnd
from shoal_service.views import UserFailure
from shoal_workers.contract.job import EndReason


class Turn:
    """`state` is replaced, never mutated; `commands` are in the order in which they are to be performed."""

    def __init__(self, state: Attempt, now: float) -> None:
        self.state = state
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

    def update_process(self, index: int, **changes: Any) -> None:
        self.set(processes=tuple(p.model_copy(update=changes) if p.index == index else p for p in self.state.processes))

    def drop_process(self, index: int) -> Process:
        process = self.state.process(index)
        assert process is not None
        self.set(
            processes=tuple(p for p in self.state.processes if p.index != index),
            answered={i: at for i, at in self.state.answered.items() if i != index},
        )
        return process

    def kill(self, index: int, reason: str) -> None:
        """Kill a process that the machine does not want any longer; its loss will be nobody's incident."""
        self.drop_process(index)
        self.do(KillProcess(index, reason))

    def show_incident(self, *, closed: bool = False) -> None:
        incident = self.state.incident
        if incident is not None:
            self.do(ShowIncident(view_of(incident, now=self.now if closed else None)))

    def end(self, reason: EndReason, message: str, failure: UserFailure | None = None) -> None:
        """Stop everything that the attempt started, then say how it ended."""
        for process in self.state.processes:
            self.do(KillProcess(process.index, f"attempt ended: {reason}"))
        self.set(processes=())
        self.show_incident()
        self.enter(Stage.ENDED)
        self.do(End(AttemptEnd(reason=reason, message=message, step=self.state.step, failure=failure)))
