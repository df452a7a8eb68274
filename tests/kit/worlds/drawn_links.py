"""A supervisor, two control planes and what lies between them, under a drawn schedule of faults.

    supervisor   Outbox, life, what is acknowledged      adds steps and events, dies, starts again from its journal
    transport    requests and answers                    lost, delayed, twice, in another order, half open
    service      supervisor_links on a real store        away, at another control plane, with another wall clock

The outbox and the store are the real ones; `Dialer` keeps one request open at a time, so this world does too. Each
arrival is checked: the stored events are a beginning of those that happened, each once and in their order, and every
stored step was trained. `settle` heals everything and checks that nothing is missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from shoal_service.core.access import hash_secret
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.endings import AttemptEnd
from shoal_service.home import AttemptCaller, HomeReport, ReportReceipt
from shoal_service.reports import PendingEvent
from shoal_service.store import Store, driving, histories, submissions, supervisor_links
from shoal_service.store.supervisor_links import ReceivedReport
from shoal_service.supervisor.reporting.reporter import Outbox
from shoal_service.views import JobStatus
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.job import EndReason, JobState

_DAY_S = 86_400.0
_MOST_SENDS = 60


@dataclass
class DrawnLink:
    """One schedule. `stores`: those of the control planes, on one database."""

    stores: tuple[Store, ...]
    epoch: int
    draw: Random
    now: float = 1e9
    life: int = 1
    acknowledged: int = 0
    step: int = 0
    happened: list[str] = field(default_factory=list)
    """Events, in their order."""
    lost_steps: set[int] = field(default_factory=set)
    """Steps that were not acknowledged when the supervisor died: the series is not in its journal."""
    late: list[HomeReport] = field(default_factory=list)
    """Requests that are still on their way."""
    directed: int = 0
    obeyed: int = 0
    """Workers of the newest directive, written and received."""
    directive_number: int = 0
    is_away: bool = False
    is_released: bool = False
    faults: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        spec = parse_spec({"data": {"corpus": "python-stdlib"}, "stop": {"steps": 1_000}})
        store = self.stores[0]
        self.job_id = store.writing(submissions.create)(spec, idempotency_key=None, now=self.now)[0].id
        store.writing(driving.begin_attempt, self.epoch)(self.job_id, workers=1, now=self.now)
        store.writing(supervisor_links.keep_token, self.epoch)(self.job_id, 1, self.job_id)
        self.outbox = Outbox(1)

    def play(self, turns: int) -> None:
        """Draws what happens, turn after turn, and heals at the end."""
        acts: tuple[Callable[[], None], ...] = (
            self.train,
            self.train,
            self.send,
            self.send,
            self.arrive_late,
            self.restart,
            self.jump,
            self.fall_away,
            self.direct,
            self.ask,
        )
        for _ in range(turns):
            self.draw.choice(acts)()
        self.settle()

    def train(self) -> None:
        for _ in range(self.draw.randint(1, 4)):
            self.step += 1
            self.outbox.add(_point(self.step))
        if self.draw.random() < 0.5:
            self.happened.append(f"event-{len(self.happened)}")
            self.outbox.add(PendingEvent(at=self.now, type=self.happened[-1]))
        self.outbox.set_status(JobStatus(state=JobState.RUNNING, attempt=1, generation=1, step=self.step), ())

    def send(self, *, is_healed: bool = False) -> None:
        """Sends one report, as `Dialer` does."""
        reports = self.outbox.pull(self.acknowledged, 0.0)
        report = HomeReport(
            life=self.life, after=self.acknowledged, reports=reports if self.outbox.has_status else None
        )
        fault = "" if is_healed else self.draw.choice(("", "", "lost", "delayed", "twice", "half_open"))
        self._count(fault)
        if fault in ("delayed", "twice"):
            self.late.insert(self.draw.randint(0, len(self.late)), report)
        if fault not in ("lost", "delayed") and not self.is_away:
            receipt = self._arrive(report)
            if fault != "half_open" and receipt is not None:
                self.acknowledged = receipt.acknowledged
                self.outbox.pull(self.acknowledged, 0.0)
                self.is_released = receipt.released

    def arrive_late(self) -> None:
        """A request of before arrives; nobody waits for its answer."""
        if self.late and not self.is_away:
            self._count("late")
            self._arrive(self.late.pop())

    def restart(self) -> None:
        """The supervisor dies, and the next life begins with what the journal has."""
        self._count("restart")
        seq, unacknowledged, end = self.outbox.unacknowledged()
        stored = {point.step for point in self._stored_steps()}
        self.lost_steps |= set(range(1, self.step + 1)) - stored
        self.outbox = Outbox(1, seq=seq, unacknowledged=unacknowledged, end=end)
        self.life, self.acknowledged = self.life + 1, 0
        self.outbox.set_status(JobStatus(state=JobState.RUNNING, attempt=1, generation=1, step=self.step), ())

    def jump(self) -> None:
        """The wall clock of the control plane is set, also back."""
        self._count("jump")
        self.now += self.draw.choice((-_DAY_S, -1.0, 1.0, _DAY_S))

    def fall_away(self) -> None:
        """The service goes away, or comes back."""
        self._count("away")
        self.is_away = not self.is_away

    def direct(self) -> None:
        self.directed += 1
        body = json.dumps({"granted": self.directed})
        self.stores[0].writing(supervisor_links.put_directive, self.epoch)(self.job_id, 1, body)

    def ask(self, *, is_healed: bool = False) -> None:
        """The supervisor asks for a directive; the answer may be lost."""
        if self.is_away or (not is_healed and self.draw.random() < 0.3):
            return
        found = self._store().reading(supervisor_links.read_directive)(self.job_id, 1)
        if found is not None and found.number != self.directive_number:
            assert found.directive is not None
            self.directive_number, self.obeyed = found.number, found.directive["granted"]
            assert self.obeyed <= self.directed

    def settle(self) -> None:
        """Everything heals: what happened is stored, each item once, and the attempt ends."""
        self.is_away = False
        self.train()
        while self.late:
            self.arrive_late()
        self._send_until(lambda: self.acknowledged >= self.outbox.seq)
        self.ask(is_healed=True)
        assert self.obeyed == self.directed
        self.outbox.add_end(AttemptEnd(reason=EndReason.FINISHED, message="", step=self.step))
        self._send_until(lambda: self.is_released)
        assert self._stored_events() == self.happened
        stored = {point.step for point in self._stored_steps()}
        assert stored >= set(range(1, self.step + 1)) - self.lost_steps
        status = self.stores[-1].get_job(self.job_id).status
        assert (status.state, status.step) == (JobState.SUCCEEDED, self.step)

    def _send_until(self, is_done: Callable[[], bool]) -> None:
        for _ in range(_MOST_SENDS):
            if is_done():
                return
            self.send(is_healed=True)
        raise AssertionError(f"not stored after {_MOST_SENDS} reports")

    def _arrive(self, report: HomeReport) -> ReportReceipt | None:
        """Stores a report at one of the control planes; None if it is refused."""
        document = HomeReport.model_validate_json(report.model_dump_json())
        caller = AttemptCaller(self.job_id, 1, hash_secret(self.job_id))
        take = self._store().writing(supervisor_links.take_reports)
        [outcome] = take([ReceivedReport(caller, document, self.now)])
        assert self._stored_events() == self.happened[: len(self._stored_events())]
        steps = [point.step for point in self._stored_steps()]
        assert steps == sorted(set(steps)) and all(step <= self.step for step in steps)
        if isinstance(outcome, ReportReceipt):
            return outcome
        assert report.life < self.life or self.is_released, outcome
        return None

    def _store(self) -> Store:
        return self.draw.choice(self.stores)

    def _stored_events(self) -> list[str]:
        events = self.stores[0].reading(histories.read_events)(self.job_id, limit=10_000)
        return [event.type for event in events if event.type.startswith("event-")]

    def _stored_steps(self) -> list[SeriesPoint]:
        return self.stores[0].reading(histories.read_series)(self.job_id)

    def _count(self, fault: str) -> None:
        self.faults[fault] = self.faults.get(fault, 0) + 1


def _point(step: int) -> SeriesPoint:
    return SeriesPoint(
        step=step, at=1.0, loss=1.0, grad_norm=1.0, lr=0.1, tokens_per_s=1.0, step_s=1.0, world_size=1, generation=1
    )
