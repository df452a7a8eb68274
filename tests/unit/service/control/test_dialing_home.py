"""A supervisor that dials home, with a real store on the other side of a link that fails when a test says so."""

import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest

from doubles.driver_bench import DriverBench
from doubles.fake_journal import FakeJournal, JournalStorage
from shoal_service.core.access import hash_secret
from shoal_service.home import (
    AttemptCaller,
    DirectiveAnswer,
    HomeReport,
    ReportReceipt,
    Superseded,
    Unavailable,
)
from shoal_service.store import supervisor_links
from shoal_service.store.errors import SupervisorReplaced
from shoal_service.store.store import Store
from shoal_service.store.supervisor_links import ReceivedReport
from shoal_service.supervisor.config import Directive, StaleEpoch
from shoal_service.supervisor.dialer import Dialer
from shoal_service.supervisor.reporting.reporter import Outbox
from shoal_service.views import JobStatus
from shoal_workers.contract.job import JobState

pytestmark = pytest.mark.timeout(120)
TOKEN = "of the attempt"


class Link:
    """A HomeLink to a store. `faults`: what happens to the next reports."""

    def __init__(self, store: Store, job_id: str) -> None:
        self._store = store
        self.caller = AttemptCaller(job_id, 1, hash_secret(TOKEN))
        self.faults: list[str] = []
        self.answers: queue.SimpleQueue[DirectiveAnswer] = queue.SimpleQueue()
        self.asked: list[int] = []
        self.num_reports = 0
        self.failed = threading.Event()

    def report(self, report: HomeReport) -> ReportReceipt:
        self.num_reports += 1
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "away":
            raise Unavailable("no connection")
        [outcome] = self._store.writing(supervisor_links.take_reports)([ReceivedReport(self.caller, report, 2.0)])
        if fault == "answer lost":
            raise Unavailable("reset")
        if isinstance(outcome, SupervisorReplaced):
            raise Superseded(str(outcome))
        assert isinstance(outcome, ReportReceipt), outcome
        return outcome

    def directive(self, after: int, wait_s: float) -> DirectiveAnswer:
        self.asked.append(after)
        return self.answers.get()

    def retry_now(self) -> None:
        self.answers.put(DirectiveAnswer(number=self.asked[-1] if self.asked else 0))


class Bench:
    def __init__(self, store: Store) -> None:
        self.driver = DriverBench(store)
        self.job_id = self.driver.job_id
        store.writing(supervisor_links.keep_token, self.driver.epoch)(self.job_id, 1, TOKEN)
        self.link = Link(store, self.job_id)
        self.outbox = Outbox(1)
        self.storage = JournalStorage()
        self.released, self.replaced = threading.Event(), threading.Event()
        self.directives: list[Directive] = []

    def dial(self, *, direct: Callable[[Directive], Any] | None = None, outbox: Outbox | None = None) -> None:
        journal = FakeJournal(self.storage)
        journal.begin(1.0)
        obey = direct or self.directives.append
        dialer = Dialer(
            self.link,
            outbox or self.outbox,
            journal,
            obey,
            self.released.set,
            on_replaced=self.replaced.set,
        )
        dialer.start()

    def run(self) -> None:
        self.outbox.set_status(JobStatus(state=JobState.RUNNING, step=1), ())


def test_a_directive_is_obeyed_and_one_of_an_older_lease_changes_nothing(store: Store) -> None:
    bench = Bench(store)
    seen: queue.SimpleQueue[int] = queue.SimpleQueue()

    def direct(directive: Directive) -> None:
        seen.put(directive.epoch)
        if directive.epoch == 1:
            raise StaleEpoch(1, 2)

    bench.dial(direct=direct)
    document = bench.driver.driver._directive(bench.driver.row).model_dump(mode="json")
    for number, epoch in ((1, 2), (2, 1), (3, 3)):
        changed = {**document, "epoch": epoch, "of_a_newer_release": True}
        bench.link.answers.put(DirectiveAnswer(number=number, directive=changed))
        assert seen.get(timeout=60) == epoch
    bench.link.answers.put(DirectiveAnswer(number=4, directive={"granted": "many"}))
    bench.link.answers.put(DirectiveAnswer(number=5, directive={**document, "epoch": 4}))
    assert seen.get(timeout=60) == 4, "one that cannot be read is passed over"
    assert bench.link.asked[:5] == [0, 1, 2, 3, 4]


def test_without_a_status_a_supervisor_only_says_that_it_lives(store: Store) -> None:
    bench = Bench(store)
    bench.dial()
    while bench.link.num_reports < 2:
        bench.outbox.pull(bench.outbox.seq, 0.05)
    [link] = store.reading(supervisor_links.read_links)().values()
    assert link.life == 1 and link.reported_at == 2.0
    assert store.get_job(bench.job_id).status.state is JobState.STARTING
