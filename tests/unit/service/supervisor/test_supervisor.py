"""The supervisor without its actor: epochs, restarts and their limit, errors, an older release, code."""

import json
from pathlib import Path
from typing import Any

import pytest

from doubles.event_loop import until
from doubles.fake_catalog import FakeCatalog
from doubles.fake_clock import FakeClock
from doubles.fake_fleet import FakeFleet
from doubles.fake_journal import FakeJournal, JournalStorage
from doubles.fake_key_values import FakeKeyValueStore
from doubles.fake_nodes import FakeHostWatch, FakeNodeWatch, FakeProbe
from doubles.fake_workers import FakeWorkers
from doubles.supervisor_bench import SupervisorBench
from kit.contracts.journal import CONFIG, entry
from shoal_service.core.attempt.state.parts import Stage
from shoal_service.core.desired import Desired
from shoal_service.core.goodput import Goodput
from shoal_service.core.supervisor_starts import ProcessEnd
from shoal_service.reports import StacksAnswer
from shoal_service.supervisor.checkpoints import why_unreadable
from shoal_service.supervisor.config import Directive, StacksRequest, StaleEpoch, SupervisorConfig
from shoal_service.supervisor.copies import CodePackage, drop_unheld, hash_archive
from shoal_service.supervisor.journal import GcsJournal, JournalEntry, NewerJournal, parse_entry
from shoal_service.supervisor.protocols import World
from shoal_service.supervisor.supervisor import MAX_SHORT_RUNS, SHORT_RUN_S, Supervisor, is_crash_loop, new_attempt
from shoal_service.views import JobStatus
from shoal_workers.checkpoint.storage import open_job_directory
from shoal_workers.contract.base import WIRE_VERSION
from shoal_workers.contract.job import EndReason
from shoal_workers.contract.marker import MARKER_NAME, CheckpointName
from shoal_workers.contract.spec import JobSpec
from shoal_workers.ray_internals import package_uri


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


def starts(*durations_s: float) -> list[float]:
    """When each run began, given how long each of the earlier ones lasted; the last one has just begun."""
    return [1000.0 + sum(durations_s[:n]) for n in range(len(durations_s) + 1)]


def test_a_first_start_is_not_a_crash_loop() -> None:
    assert not is_crash_loop(starts())


def test_many_short_runs_in_a_row_are_a_crash_loop() -> None:
    assert not is_crash_loop(starts(*[2.0] * (MAX_SHORT_RUNS - 1)))
    assert is_crash_loop(starts(*[2.0] * MAX_SHORT_RUNS))


def test_one_long_run_resets_the_count_of_short_ones() -> None:
    assert not is_crash_loop(starts(*[2.0] * 50, SHORT_RUN_S, *[2.0] * (MAX_SHORT_RUNS - 1)))


def test_a_supervisor_that_is_killed_from_time_to_time_is_restarted_without_limit() -> None:
    assert not is_crash_loop(starts(*[SHORT_RUN_S + 5] * 1000))


GOLDEN = Path(__file__).resolve().parents[3] / "golden" / f"wire-{WIRE_VERSION}"
OLDER = WIRE_VERSION - 1


def journal(stage: str, **changes: Any) -> str:
    document: dict[str, Any] = json.loads((GOLDEN / f"journal_{stage}.json").read_text("utf-8"))
    return json.dumps(document["json"] | changes)


def older_journal(stage: str) -> str:
    entry = json.loads(journal(stage, version=OLDER))
    for worker in entry["state"]["pool"]["workers"]:
        if worker["info"] is not None:
            worker["info"]["version"] = OLDER
    return json.dumps(entry)


@pytest.mark.parametrize("stage", ["opening", "starting", "forming", "running", "quiescing", "re_forming"])
async def test_a_restarted_supervisor_goes_on_from_the_journal_of_the_release_before(
    stage: str, bench: SupervisorBench
) -> None:
    """Its workers speak the older version: they are replaced, and the attempt finishes."""

    entry = older_journal(stage)
    for known in json.loads(entry)["state"]["pool"]["workers"]:
        old = bench.workers.create(known["worker_id"], node_id=f"n{known['index']}")
        old.info = old.info.model_copy(update={"version": OLDER})
    olds = list(bench.workers.by_name.values())
    bench.storage.entries = {1: entry}
    bench.storage.starts = [900.0]
    bench._open()
    bench.start()
    bench.direct(granted=2)
    await bench.advance_until(lambda: len(bench.workers.group) == 2, limit_s=120.0)
    assert {worker.assignment.life for worker in bench.workers.group if worker.assignment} == {2}
    assert all(worker not in olds for worker in bench.workers.group)
    assert not any(old.is_alive for old in olds), "none is left over"
    bench.workers.total_steps = 12
    bench.workers.form()
    bench.workers.train(12)
    await until(lambda: bench.status.step == 12)
    bench.workers.finish()
    assert (await bench.end()).reason is EndReason.FINISHED


def test_a_journal_of_a_newer_release_is_refused_with_the_way_out() -> None:
    with pytest.raises(NewerJournal, match="Install the same release on every node"):
        parse_entry(journal("running", version=WIRE_VERSION + 1, something="new"))
    assert isinstance(parse_entry(journal("running")), JournalEntry)


ARCHIVE = b"a zip archive"
URI = package_uri(hash_archive(ARCHIVE))


class Head:
    def __init__(self) -> None:
        self.packages, self.copies = FakeKeyValueStore(), FakeKeyValueStore()

    def package(self, job_id: str = "job", attempt: int = 1) -> CodePackage:
        return CodePackage(self.packages, self.copies, job_id, attempt, URI)

    def end(self, job_id: str) -> None:
        GcsJournal(self.copies, job_id, 1).delete()
        drop_unheld(self.copies)


def test_a_package_that_ray_has_deleted_is_there_again_before_the_next_worker() -> None:
    head = Head()
    head.package().store(ARCHIVE)
    head.packages.delete(URI.encode())
    head.package().restore()  # by a later supervisor
    assert head.packages.get(URI.encode()) == ARCHIVE


def test_equal_code_is_there_once_and_goes_with_the_last_attempt_that_has_it() -> None:
    """The head kept a copy for each attempt: forty jobs of one sweep with 16 MiB were 640 MiB of its memory."""
    head = Head()
    jobs = [f"job-{number}" for number in range(40)]
    for job_id in jobs:
        head.package(job_id).store(ARCHIVE)
    assert list(head.copies.values.values()).count(ARCHIVE) == 1
    for job_id in jobs[1:]:
        head.end(job_id)
    head.packages.delete(URI.encode())
    head.package(jobs[0]).restore()
    assert head.packages.get(URI.encode()) == ARCHIVE, "another job still has it"
    head.end(jobs[0])
    assert head.copies.values == {}


def test_an_attempt_whose_supervisor_has_deleted_its_journal_holds_no_code() -> None:
    head = Head()
    head.package("gone").store(ARCHIVE)
    GcsJournal(head.copies, "gone", 1).delete()  # by its supervisor; its cluster was away when it was to be ended
    head.end("other")
    assert head.copies.values == {}


def test_code_that_the_head_has_is_not_uploaded_again() -> None:
    head = Head()
    assert not head.package().hold()
    head.package().store(ARCHIVE)
    head.packages.delete(URI.encode())
    assert head.package("other").hold() and head.packages.get(URI.encode()) == ARCHIVE
    head.end("job")
    assert head.package("third").hold(), "the other one keeps it"


def test_an_attempt_that_has_not_begun_keeps_code_that_is_on_its_way() -> None:
    head = Head()
    assert not head.package("slow").hold()
    head.end("other")
    head.package("slow").store(ARCHIVE)
    head.end("other")
    assert head.package("slow").hold()


def test_while_the_head_is_away_nothing_is_raised() -> None:
    head = Head()
    head.package().store(ARCHIVE)
    head.packages.is_away = head.copies.is_away = True
    head.package().restore()
    drop_unheld(head.copies)


def test_a_node_says_why_it_cannot_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    root, name = str(tmp_path / "ckpt" / "job-1"), str(CheckpointName(7, 1, 1))
    assert why_unreadable(root, name) == f"{root}: it has no checkpoint, and the job has committed {name}"
    assert why_unreadable(root, "") == f"{root} is not there"
    place = open_job_directory(root).child(name)
    place.create()
    assert "it has no checkpoint" in why_unreadable(root, name), "it was never committed"
    assert why_unreadable(root, "") == ""
    place.write(MARKER_NAME, [b"{}"])
    assert why_unreadable(root, name) == ""
    assert "no-such-protocol" in why_unreadable("no-such-protocol://bucket/job-1", name)
    assert "is not the name of a checkpoint" in why_unreadable(root, "../../etc")
