"""The supervisor without its actor: lease epochs, restarts, and errors that end the attempt with a report."""

import pytest

from doubles.fake_catalog import FakeCatalog
from doubles.fake_clock import FakeClock
from doubles.fake_fleet import FakeFleet
from doubles.fake_journal import FakeJournal, JournalStorage
from doubles.fake_nodes import FakeHostWatch, FakeNodeWatch, FakeProbe
from doubles.fake_workers import FakeWorkers
from kit.contracts.journal import CONFIG, entry
from shoal_service.core.attempt.state.stages import Stage
from shoal_service.core.desired import Desired
from shoal_service.core.goodput import Goodput
from shoal_service.core.supervisor_starts import ProcessEnd
from shoal_service.reports import StacksAnswer
from shoal_service.supervisor.config import Directive, StacksRequest, StaleEpoch, SupervisorConfig
from shoal_service.supervisor.protocols import World
from shoal_service.supervisor.supervisor import MAX_SHORT_RUNS, Supervisor, new_attempt
from shoal_service.views import JobStatus
from shoal_workers.contract.job import EndReason
from shoal_workers.contract.spec import JobSpec


class Bench:
    def __init__(self, storage: JournalStorage) -> None:
        self.clock = FakeClock()
        self.journal = FakeJournal(storage)
        self.num_worlds = 0
        self.error: Exception | None = None
        self.ends: list[ProcessEnd] = []
        """How the processes before have ended."""

    def open(self) -> Supervisor:
        return Supervisor(CONFIG, self.journal, self.clock, self._make_world, lambda number: self.ends[-number:])

    def _make_world(self, life: int) -> World:
        self.num_worlds += 1
        if self.error is not None:
            raise self.error
        return World(
            fleet=FakeFleet(FakeWorkers(self.clock), life=life),
            journal=self.journal,
            catalog=FakeCatalog(),
            host_watch=FakeHostWatch(),
            node_watch=FakeNodeWatch(),
            clock=self.clock,
            until_gone=FakeProbe().until_gone,
        )


def directive(epoch: int) -> Directive:
    return Directive(
        epoch=epoch,
        granted=1,
        desired=Desired.RUN,
        elasticity=CONFIG.spec.elasticity,
        parallelism="auto",
        spec_version=1,
    )


def test_directives_of_an_older_control_plane_are_refused() -> None:
    supervisor = Bench(JournalStorage()).open()
    supervisor.direct(directive(1))
    supervisor.direct(directive(3))
    with pytest.raises(StaleEpoch) as error:
        supervisor.direct(directive(2))
    assert (error.value.epoch, error.value.current) == (2, 3)
    supervisor.direct(directive(3))


def test_the_lease_epoch_does_not_go_back_when_the_supervisor_is_restarted() -> None:
    storage = JournalStorage()
    Bench(storage).open().direct(directive(3))
    restarted = Bench(storage).open()  # Ray passes the configuration of the first start again, with epoch 1
    with pytest.raises(StaleEpoch) as error:
        restarted.direct(directive(2))
    assert (error.value.epoch, error.value.current) == (2, 3)
    restarted.direct(directive(3))
    assert storage.epoch == 3


def test_a_request_for_stacks_is_answered_once_also_by_a_supervisor_whose_attempt_is_over() -> None:
    supervisor = Bench(JournalStorage()).open()
    supervisor.outbox.set_status(JobStatus(), ())  # a pull waits for the first status
    asked = directive(1).model_copy(update={"stacks": StacksRequest(number=7, rank=None, native=False)})
    supervisor.direct(asked)
    reports = supervisor.outbox.pull(0, 30.0)
    while reports.stacks is None:
        reports = supervisor.outbox.pull(reports.seq, 30.0)
    assert reports.stacks == StacksAnswer(number=7, stacks=None)
    seq = supervisor.outbox.seq
    supervisor.direct(asked)
    assert supervisor.outbox.seq == seq and supervisor.outbox.pull(seq, 0.0).stacks is None


def test_a_damaged_journal_is_an_event_of_the_job() -> None:
    storage = JournalStorage()
    Bench(storage).open()
    assert Bench(storage).open().outbox.pull(0, 0.0).events == ()
    storage.num_lost = 2
    [event] = Bench(storage).open().outbox.pull(0, 0.0).events
    assert (event.type, event.data) == ("supervisor.journal_damaged", {"lost": 2})


def test_a_released_supervisor_deletes_its_journal() -> None:
    storage = JournalStorage()
    supervisor = Bench(storage).open()
    assert storage.starts == [1000.0]
    supervisor.release()
    assert storage == JournalStorage()


def test_a_restarted_supervisor_reports_again_what_was_not_acknowledged() -> None:
    storage = JournalStorage(entries={1: entry(7).model_copy(update={"end": None}).model_dump_json()}, starts=[900.0])
    supervisor = Bench(storage).open()
    supervisor.outbox.set_status(supervisor.outbox.pull(0, 0.0).status, ())
    reports = supervisor.outbox.pull(0, 0.0)
    assert [event.data for event in reports.events] == [{"pid": 7}]
    assert reports.seq > 1 << 32, "numbers that the predecessor may have used are skipped"
    assert storage.starts == [900.0, 1000.0]


def test_a_supervisor_that_dies_again_and_again_ends_the_attempt() -> None:
    storage = JournalStorage(
        entries={1: entry(7).model_dump_json()}, starts=[1000.0 - number for number in range(MAX_SHORT_RUNS, 0, -1)]
    )
    bench = Bench(storage)
    reports = bench.open().outbox.pull(0, 0.0)
    assert reports.end is not None and reports.end.reason is EndReason.INTERNAL
    assert f"died {MAX_SHORT_RUNS} times in a row" in reports.end.message
    assert bench.num_worlds == 0, "nothing is started any more"


def test_a_supervisor_that_dies_for_lack_of_memory_says_so() -> None:
    bench = Bench(JournalStorage(starts=[1000.0 - number for number in range(MAX_SHORT_RUNS, 0, -1)]))
    bench.ends = [ProcessEnd(True, "Memory on the node (IP: 10.0.0.7, ID: fa53) was ...")] * 10
    end = bench.open().outbox.pull(0, 0.0).end
    assert end is not None and end.reason is EndReason.WORKERS_FAILED
    assert f"killed {MAX_SHORT_RUNS} of its last {MAX_SHORT_RUNS} processes" in end.message
    assert "10.0.0.7" in end.message


def test_an_error_while_it_is_made_ends_the_attempt_with_its_traceback() -> None:
    bench = Bench(JournalStorage())
    bench.error = RuntimeError("no such node")
    supervisor = bench.open()
    supervisor.start()
    supervisor.direct(directive(1))
    end = supervisor.outbox.pull(0, 0.0).end
    assert end is not None and end.failure is not None
    assert end.message == "supervisor: RuntimeError: no such node"
    assert "_make_world" in end.failure.traceback and end.failure.phase == "supervising"


@pytest.mark.timeout(120)
def test_an_error_of_the_executor_ends_the_attempt_with_its_traceback() -> None:
    bench = Bench(JournalStorage())

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a fault of our own")

    bench.journal.write = fail  # type: ignore[method-assign]
    supervisor = bench.open()
    supervisor.start()
    end = None
    while end is None:
        end = supervisor.outbox.pull(0, 1.0).end
    assert end.message == "supervisor: RuntimeError: a fault of our own"


def test_log_events_carry_job_attempt_and_generation() -> None:
    assert Bench(JournalStorage()).open().log_fields() == {"job": "j1", "attempt": 1, "generation": 0}


def test_an_attempt_of_a_script_looks_for_no_checkpoint_and_keeps_the_step_of_the_attempts_before() -> None:
    script = JobSpec.model_validate({"script": {"file": "train.py"}})
    config = SupervisorConfig(
        job_id="j",
        attempt=2,
        spec=script,
        checkpoint_root="/c",
        granted=2,
        epoch=1,
        spec_version=1,
        goodput=Goodput(at=1.0, max_step=40),
    )
    state = new_attempt(config, 5.0)
    assert state.stage is Stage.STARTING and state.progress.step == 40
    task = config.model_copy(update={"spec": JobSpec.model_validate({"stop": {"steps": 80}})})
    state = new_attempt(task, 5.0)
    assert state.stage is Stage.OPENING and state.progress.step == 0, "its checkpoint says where it is"
