"""The calls to one worker: their answers and failures become events; reports are acknowledged once they are stored."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from doubles.event_loop import settle
from doubles.fake_clock import FakeClock
from doubles.fake_fleet import FakeFleet
from doubles.fake_nodes import FakeProbe
from doubles.fake_workers import FakeWorker, FakeWorkers
from kit.contracts.fleet import assignment
from kit.contracts.journal import CONFIG
from shoal_service.core.attempt import hangs
from shoal_service.core.attempt.messages import (
    DeathDated,
    DeathExplained,
    Event,
    Interrupt,
    InterruptAcknowledged,
    NoteCommit,
    ProgressReported,
    ReportArrived,
    RequestSnapshotParts,
    RequestYield,
    Run,
    RunReturned,
    SnapshotPartsReported,
    StartWorker,
    WorkerFailedToStart,
    WorkerLost,
    WorkerUnreachable,
    WorkerWarm,
)
from shoal_service.core.attempt.state import Worker
from shoal_service.supervisor.reporting.reporter import Outbox, Reporter
from shoal_service.supervisor.supervisor import new_attempt
from shoal_service.supervisor.workers.worker_client import SupervisorContext, WorkerClient
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.messages import ErrorReport, ExitKind, Phase, Progress
from shoal_workers.contract.worker_reports import PreemptionNotice

T = TypeVar("T")
NAME = "worker-0"
NOTICE = PreemptionNotice(generation=0, at=1.0, grace_s=30.0, reason="SIGTERM")


class Bench:
    """One client, its worker, and the events that it posts."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.workers = FakeWorkers(self.clock)
        self.fleet = FakeFleet(self.workers)
        self.outbox = Outbox(1)
        self.probe = FakeProbe()
        self.posted: list[Event] = []
        self.killed: list[int] = []
        self.raylets: dict[str, tuple[str, int]] = {}
        self._spawned: set[asyncio.Task[None]] = set()
        state, reporter = new_attempt(CONFIG, 1000.0), Reporter(self.outbox, CONFIG, self.clock)
        reporter.update_status(state)
        self.context = SupervisorContext(
            fleet=self.fleet,
            clock=self.clock,
            until_gone=self.probe.until_gone,
            outbox=self.outbox,
            reporter=reporter,
            post=self.posted.append,
            settled=lambda: asyncio.sleep(0),
            state=lambda: state,
            kill=self.killed.append,
            spawn=self._spawn,
            raylet=self.raylets.get,
        )
        self.client = WorkerClient(0, NAME, self.context)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._spawned.add(asyncio.ensure_future(work))

    async def start(self) -> FakeWorker:
        self.client.start(StartWorker(0, NAME))
        await settle()
        return self.worker

    @property
    def worker(self) -> FakeWorker:
        return self.workers.by_name[NAME]

    def of(self, kind: type[T]) -> list[T]:
        return [event for event in self.posted if isinstance(event, kind)]


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_a_started_worker_becomes_warm_is_polled_and_its_port_is_probed(bench: Bench) -> None:
    bench.client.start(StartWorker(0, NAME, ("bad-node",), "good-node"))
    await settle()
    [start] = bench.fleet.starts
    assert (start.avoid_nodes, start.only_on) == (("bad-node",), "good-node")
    assert bench.of(WorkerWarm) == [WorkerWarm(0, bench.worker.info)]
    assert bench.probe.watched == [("10.0.0.1", bench.worker.info.store_port)]
    assert bench.worker.polls == [1.0]


async def test_a_worker_that_cannot_load_the_task_has_failed_to_start(bench: Bench) -> None:
    error = ErrorReport(type="ImportError", message="no module", traceback="...", phase=Phase.PREPARING)
    bench.workers.start_error = error
    await bench.start()
    assert bench.of(WorkerFailedToStart) == [WorkerFailedToStart(0, error)]
    assert bench.of(WorkerWarm) == [] and bench.probe.watched == []


async def test_the_result_of_a_run_is_an_event(bench: Bench) -> None:
    worker = await bench.start()
    bench.client.perform(Run(0, assignment(1)))
    await settle()
    worker.leave(ExitKind.FINISHED)
    await settle()
    [returned] = bench.of(RunReturned)
    assert (returned.index, returned.exit.kind) == (0, ExitKind.FINISHED)


async def test_a_death_is_found_by_the_failing_run_call_once_and_is_dated(bench: Bench) -> None:
    worker = await bench.start()
    bench.client.perform(Run(0, assignment(1)))
    await settle()
    worker.die(IncidentCause.NODE_DIED)
    await settle()
    [lost] = bench.of(WorkerLost)
    assert (lost.cause, lost.message) == (IncidentCause.NODE_DIED, f"{NAME} was killed")
    assert lost.witness in ("run call", "poll call"), "the first call that fails counts"
    assert bench.killed == [0], "a worker that is wrongly called dead must not stay"
    assert bench.of(DeathDated) == [DeathDated(NAME, bench.clock.time())]


async def test_an_idle_worker_s_death_is_found_by_its_poll(bench: Bench) -> None:
    worker = await bench.start()
    worker.die()
    await settle()
    [lost] = bench.of(WorkerLost)
    assert (lost.witness, lost.cause) == ("poll call", IncidentCause.WORKER_DIED)


async def test_a_closed_port_is_a_death_and_the_calls_of_that_worker_end(bench: Bench) -> None:
    worker = await bench.start()
    bench.raylets[worker.info.node_id] = ("10.0.0.1", 99)
    bench.probe.close(("10.0.0.1", worker.info.store_port), at=1001.5)
    await settle()
    [lost] = bench.of(WorkerLost)
    assert (lost.witness, lost.cause) == ("port", IncidentCause.WORKER_DIED)
    assert bench.of(DeathDated) == [DeathDated(NAME, 1001.5)]
    assert bench.probe.raylets == {("10.0.0.1", worker.info.store_port): ("10.0.0.1", 99)}
    polls = len(worker.polls)
    await bench.clock.advance(5.0)
    assert len(worker.polls) == polls and bench.killed == [0]


async def test_a_port_that_closed_with_the_raylet_is_a_dead_node(bench: Bench) -> None:
    worker = await bench.start()
    bench.probe.close(("10.0.0.1", worker.info.store_port), at=1001.5, with_raylet=True)
    await settle()
    [lost] = bench.of(WorkerLost)
    assert lost.cause is IncidentCause.NODE_DIED and "raylet" in lost.message


async def test_a_port_that_cannot_be_reached_proves_nothing(bench: Bench) -> None:
    worker = await bench.start()
    bench.probe.give_up(("10.0.0.1", worker.info.store_port))
    await settle()
    assert bench.of(WorkerLost) == []


async def test_an_unavailable_worker_is_unreachable_and_its_run_is_joined_when_it_is_back(bench: Bench) -> None:
    worker = await bench.start()
    bench.client.perform(Run(0, assignment(1)))
    await settle()
    worker.cut_off()
    await bench.clock.advance(1.0)
    assert len(bench.of(WorkerUnreachable)) >= 4, "each refused call of poll and join"
    assert bench.of(WorkerLost) == [] and bench.of(RunReturned) == []
    worker.reconnect()
    await bench.clock.advance(0.5)
    num_unreachable = len(bench.of(WorkerUnreachable))
    worker.leave(ExitKind.YIELDED)
    await settle()
    [returned] = bench.of(RunReturned)
    assert returned.exit.kind is ExitKind.YIELDED
    assert len(bench.of(WorkerUnreachable)) == num_unreachable


async def test_an_unavailable_worker_that_turns_out_to_be_dead_is_lost_once(bench: Bench) -> None:
    worker = await bench.start()
    worker.cut_off()
    await bench.clock.advance(0.5)
    worker.die()
    await bench.clock.advance(0.5)
    assert len(bench.of(WorkerLost)) == 1


async def test_the_interrupt_is_repeated_until_it_is_acknowledged(bench: Bench) -> None:
    worker = await bench.start()
    worker.cut_off()
    bench.client.perform(Interrupt(0, 3))
    await bench.clock.advance(1.0)
    assert bench.of(InterruptAcknowledged) == []
    worker.reconnect()
    await bench.clock.advance(0.5)
    assert bench.of(InterruptAcknowledged) == [InterruptAcknowledged(0, 3)]
    assert worker.interrupts == [3]


async def test_an_interrupt_of_a_dead_worker_is_not_acknowledged(bench: Bench) -> None:
    worker = await bench.start()
    worker.die()
    bench.client.perform(Interrupt(0, 3))
    await settle()
    assert bench.of(InterruptAcknowledged) == [] and len(bench.of(WorkerLost)) == 1


async def test_requests_are_passed_on(bench: Bench) -> None:
    worker = await bench.start()
    bench.client.perform(RequestYield(0, 1, True))
    bench.client.perform(NoteCommit(0, 1, 20, "disk full"))
    bench.client.perform(RequestSnapshotParts(0))
    await settle()
    assert worker.yields == [True]
    assert worker.commits == [(1, 20, "disk full")]
    assert bench.of(SnapshotPartsReported) == [SnapshotPartsReported(0, ())]


async def test_reports_are_acknowledged_to_the_worker_only_after_the_control_plane_has_stored_them(
    bench: Bench,
) -> None:
    worker = await bench.start()
    worker.print("hello")
    worker.report(NOTICE)
    await settle()
    assert bench.of(ReportArrived) == [ReportArrived(0, NOTICE)]
    await bench.clock.advance(3.0)
    assert worker.acknowledged == 0, "the control plane has not pulled"

    stored = bench.outbox.pull(0, 0.0)
    assert [line.text for line in stored.logs] == ["hello"]
    await bench.clock.advance(3.0)
    assert worker.acknowledged == 0, "pulled, and perhaps not stored"

    bench.outbox.pull(stored.seq, 0.0)
    await bench.clock.advance(3.0)
    assert worker.acknowledged == 2


async def test_each_report_is_received_once_although_it_is_not_acknowledged(bench: Bench) -> None:
    worker = await bench.start()
    for number in range(3):
        worker.print(f"line {number}")
        worker.report(NOTICE)
        await bench.clock.advance(1.5)
    assert len(bench.of(ReportArrived)) == 3
    assert [line.text for line in bench.outbox.pull(0, 0.0).logs] == ["line 0", "line 1", "line 2"]


async def test_each_poll_reports_progress_and_a_stalled_worker_is_polled_more_often(bench: Bench) -> None:
    worker = await bench.start()
    await bench.clock.advance(2.5)
    assert worker.polls == [1.0, 1.0, 1.0] and len(bench.of(ProgressReported)) == 2
    limit_s = hangs.threshold_s(bench.client._context.state())
    worker.progress = Progress(generation=1, phase=Phase.BACKWARD, step=3, at=1.0, stalled_s=limit_s / 2)
    await bench.clock.advance(1.0)
    assert worker.polls[-1] == 0.25
    worker.progress = Progress(generation=1, phase=Phase.IDLE, step=3, at=1.0, stalled_s=limit_s)
    await bench.clock.advance(1.0)
    assert worker.polls[-1] == 1.0, "an idle worker does not hang"


async def test_a_closed_client_posts_nothing_more(bench: Bench) -> None:
    worker = await bench.start()
    bench.client.perform(Run(0, assignment(1)))
    await settle()
    bench.client.close()
    posted = list(bench.posted)
    worker.leave(ExitKind.FINISHED)
    worker.die()
    await bench.clock.advance(5.0)
    assert bench.posted == posted


async def test_the_last_output_is_collected_after_the_client_was_closed(bench: Bench) -> None:
    worker = await bench.start()
    bench.client.close()
    worker.print("bye")
    await bench.client.collect_last_reports(5.0)
    assert [line.text for line in bench.outbox.pull(0, 0.0).logs] == ["bye"]
    worker.die()
    await bench.client.collect_last_reports(5.0)  # nothing to collect, and no error


async def test_a_restarted_supervisor_joins_the_run_of_its_predecessor(bench: Bench) -> None:
    worker = await bench.start()
    running = asyncio.ensure_future(worker.run(assignment(2)))
    await settle()
    bench.client.close()
    successor = WorkerClient(0, NAME, bench.context)
    successor.take_over(Worker(index=0, worker_id=NAME, info=worker.info, in_run=True), 2, is_to_run=False)
    await settle()
    worker.leave(ExitKind.FINISHED)
    await settle()
    [returned] = bench.of(RunReturned)
    assert (returned.exit.generation, returned.exit.kind) == (2, ExitKind.FINISHED)
    await running


async def test_the_exit_status_of_a_lost_worker_follows_its_loss(bench: Bench) -> None:
    """Its message was "The actor died unexpectedly before finishing this task"."""

    worker = await bench.start()
    worker.die()
    await settle()
    assert bench.of(DeathExplained) == []
    await bench.clock.advance(1.0)
    message = f"process {worker.info.pid} on 10.0.0.1 was killed by signal 9 (SIGKILL)"
    assert bench.of(DeathExplained) == [DeathExplained(NAME, message)]
    await bench.clock.advance(30.0)
    assert len(bench.of(DeathExplained)) == 1
