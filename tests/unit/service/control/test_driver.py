"""One attempt, driven with a real store and a fake cluster, up to its end; and actors that are left are ended."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from sqlalchemy import delete

from doubles.control_bench import ControlBench
from doubles.driver_bench import END, LOGS, DriverBench, event
from doubles.event_loop import settle, until
from doubles.fake_clock import FakeClock
from doubles.fake_cluster import FakeSupervisor
from kit.store_calls import replace_call
from shoal_service.cluster.errors import OrderUnanswered, RayCallFailed, SupervisorGone
from shoal_service.control.code_archive import pack
from shoal_service.control.driver import to_its_end
from shoal_service.core.attempt.state.parts import AvoidedNode
from shoal_service.core.endings import AttemptEnd
from shoal_service.core.supervisor_starts import MAX_UNRECORDED_STARTS, ProcessEnd
from shoal_service.home import Home
from shoal_service.reports import PendingEvent, SupervisorReports
from shoal_service.store import archives, checkpoint_rows, driving, histories, reporting, submissions, supervisor_links
from shoal_service.store.database import attempt_tokens
from shoal_service.store.errors import LeaseLost
from shoal_service.store.store import Store
from shoal_service.supervisor.reporting.reporter import Outbox
from shoal_service.views import CheckpointView, JobPatch, JobStatus
from shoal_workers.contract.job import EndReason, JobState
from shoal_workers.contract.marker import CheckpointName


@pytest.fixture
def bench(store: Store) -> DriverBench:
    return DriverBench(store)


async def test_a_supervisor_is_started_with_what_the_job_and_the_control_plane_say(bench: DriverBench) -> None:
    bench.driver.update(bench.row, (AvoidedNode(node_id="bad", reason="drain requested"),))
    supervisor = await bench.started()
    config = supervisor.config
    assert (config.job_id, config.attempt, config.granted, config.epoch) == (bench.job_id, 1, 2, bench.epoch)
    assert config.checkpoint_root == f"/checkpoints/{bench.job_id}"
    assert config.logs == LOGS and len(config.snapshot_key) == 32 and config.code_uri is None
    assert bench.cluster.avoided == [frozenset({"bad"})]
    await settle()
    [directive] = supervisor.directives
    assert directive.granted == 2 and [node.node_id for node in directive.avoid] == ["bad"]


async def test_the_job_s_own_checkpoint_url_wins_and_its_code_is_uploaded(store: Store, tmp_path: Path) -> None:
    archive = pack(tmp_path)
    store.writing(archives.put)(archives.check(archive.sha256, archive.data), now=1.0)
    bench = DriverBench(store, checkpoint={"url": "s3://bucket/run"}, code={"archive": archive.sha256})
    config = (await bench.started()).config
    assert config.checkpoint_root == f"s3://bucket/run/{bench.job_id}"
    assert bench.cluster.uploads == [archive.sha256] and config.code_uri == "gcs://code-1.zip"


async def test_a_supervisor_is_told_the_newest_good_checkpoint_that_the_store_knows(
    store: Store, bench: DriverBench
) -> None:
    supervisor = await bench.started()
    assert supervisor.config.newest is None
    for step, state in ((4, "committed"), (12, "committed"), (16, "damaged"), (20, "committed")):
        supervisor.report(CheckpointView(step=step, url="u", state=state, attempt=1, generation=1))
    await bench.clock.advance(1.0)
    deleted = CheckpointName(20, 1, 1)
    store.writing(checkpoint_rows.note_deletion)(bench.job_id, deleted, now=2.0)
    await bench.stop()
    config = bench.make_driver()._supervisor_config(Home(token="t"), None)
    assert config.newest == str(CheckpointName(12, 1, 1))


async def test_reports_are_stored_once_and_each_report_says_what_the_one_before_has_acknowledged(
    bench: DriverBench,
) -> None:
    supervisor = await bench.started()
    supervisor.report(event(1), event(2))
    await bench.stored(1, 2)
    await bench.clock.advance(1.0)
    supervisor.report(event(3))
    await bench.clock.advance(1.0)
    assert bench.events() == [1, 2, 3]
    assert bench.row.pulled_seq == supervisor.outbox.seq == supervisor.outbox.acknowledged
    assert supervisor.sent_after == sorted(supervisor.sent_after) and supervisor.sent_after[-1] > 2


async def test_reports_are_stored_without_a_driver_and_a_restarted_one_goes_on(bench: DriverBench) -> None:
    supervisor = await bench.started()
    supervisor.report(event(1))
    await bench.stored(1)
    await bench.stop()
    supervisor.report(event(2))
    await bench.stored(1, 2)
    bench.driver = bench.make_driver()
    bench.start()
    supervisor.report(event(3))
    await bench.stored(1, 2, 3)
    assert len(bench.cluster.avoided) == 1


async def test_the_end_is_stored_the_supervisor_is_released_and_the_attempt_is_reaped(
    store: Store, bench: DriverBench
) -> None:
    supervisor = await bench.started()
    supervisor.end(END)
    await bench.clock.advance(1.0)
    await bench.task
    assert store.get_job(bench.job_id).status.state is JobState.SUCCEEDED
    assert supervisor.is_released and bench.cluster.reaped == [(bench.job_id, 1)]


async def test_a_supervisor_that_cannot_report_for_a_while_is_awaited(bench: DriverBench) -> None:
    supervisor = await bench.started()
    await settle()
    supervisor.cut_off()
    await bench.clock.advance(2.0)
    assert not bench.task.done()
    supervisor.reconnect()
    supervisor.report(event(1))
    await bench.clock.advance(1.0)
    assert bench.events() == [1]


async def test_a_directive_that_an_unavailable_supervisor_missed_is_sent_again(
    store: Store, bench: DriverBench
) -> None:
    supervisor = await bench.started()
    await settle()
    supervisor.cut_off()
    store.writing(driving.set_grant, bench.epoch)(bench.job_id, workers=1, reason="r", now=2.0)
    bench.driver.update(bench.row, ())
    await bench.clock.advance(1.0)
    assert len(supervisor.directives) == 1
    supervisor.reconnect()
    await bench.clock.advance(1.1)
    assert [directive.granted for directive in supervisor.directives] == [2, 1]


async def test_a_dead_supervisor_s_job_goes_back_to_the_queue(store: Store, bench: DriverBench) -> None:
    supervisor = await bench.started()
    supervisor.report(event(1))
    await bench.stored(1)
    bench.cluster.kill_supervisor(bench.job_id, 1)
    await bench.clock.advance(3.0)
    await bench.task
    job = store.get_job(bench.job_id)
    assert (job.status.state, job.status.reason) == (JobState.QUEUED, EndReason.SUPERVISOR_LOST)
    assert bench.cluster.reaped == [(bench.job_id, 1)]


async def test_a_supervisor_that_cannot_be_created_is_started_again_with_pauses_and_not_without_limit(
    store: Store, bench: DriverBench
) -> None:
    bench.cluster.start_error = SupervisorGone("no module named shoal_service")
    bench.start()
    for pause_s in (1.0, 2.0, 4.0, 8.0):
        number = len(bench.cluster.avoided)
        await bench.clock.advance(2.0)  # of silence, then the cluster is asked
        assert bench.failed_starts()[-1]["after_s"] == pause_s
        await bench.clock.advance(pause_s - 1.0)
        assert len(bench.cluster.avoided) == max(1, number), "not before the pause is over"
        await bench.clock.advance(0.6)
        assert len(bench.cluster.avoided) == max(1, number) + 1
    await bench.clock.advance(3.0)
    await bench.task
    assert [failed["number"] for failed in bench.failed_starts()] == [1, 2, 3, 4, 5]
    status = store.get_job(bench.job_id).status
    assert (status.state, status.reason) == (JobState.FAILED, EndReason.INTERNAL)
    assert "could not be started 5 times in a row: no module named shoal_service" in status.message
    assert bench.cluster.reaped == [(bench.job_id, 1)] * 5, "nothing is left in the cluster"


async def test_a_supervisor_that_the_cluster_could_not_create_is_noticed_at_once(
    store: Store, bench: DriverBench
) -> None:
    bench.cluster.start_error = SupervisorGone("its constructor raised")
    bench.cluster.notices_failures = True
    watchers = list(bench.cluster._watchers)
    bench.start()
    for pause_s in (1.0, 2.0, 4.0, 8.0):
        await until(lambda pause_s=pause_s: any(one["after_s"] == pause_s for one in bench.failed_starts()))
        await bench.clock.advance(pause_s)
    await until(bench.task.done)
    assert len(bench.cluster.avoided) == 5
    assert "5 times in a row: its constructor raised" in store.get_job(bench.job_id).status.message
    assert bench.cluster._watchers == watchers, "the driver watches no more"


async def test_a_supervisor_that_starts_at_the_second_try_is_followed(store: Store, bench: DriverBench) -> None:
    bench.cluster.start_error = SupervisorGone("the node is gone")
    bench.start()
    await bench.clock.advance(2.0)
    assert bench.failed_starts()
    bench.cluster.start_error = None
    await bench.clock.advance(1.0)
    bench.supervisor.outbox.set_status(JobStatus(state=JobState.RUNNING, step=1), ())
    bench.supervisor.report(event(1))
    await bench.stored(1)
    assert store.get_job(bench.job_id).status.state is JobState.RUNNING
    await bench.stop()


async def test_a_supervisor_whose_processes_die_before_they_record_their_start_ends_the_attempt(
    store: Store, bench: DriverBench
) -> None:
    """Ray starts them again without limit, and keeps the call."""

    bench.start()
    await until(lambda: bench.cluster.supervisors)
    bench.cluster.num_unrecorded = MAX_UNRECORDED_STARTS
    await bench.clock.advance(30.0)
    assert not bench.task.done()
    bench.cluster.num_unrecorded += 1
    await bench.clock.advance(6.0)
    await bench.task
    status = store.get_job(bench.job_id).status
    assert (status.state, status.reason) == (JobState.FAILED, EndReason.INTERNAL)
    assert "died 8 times in a row before it recorded its start" in status.message
    [failed] = bench.failed_starts()
    assert failed["after_s"] is None and bench.cluster.reaped == [(bench.job_id, 1)]


async def test_a_supervisor_that_dies_for_lack_of_memory_before_it_records_its_start_says_so(
    store: Store, bench: DriverBench
) -> None:
    bench.start()
    await until(lambda: bench.cluster.supervisors)
    bench.cluster.num_unrecorded = MAX_UNRECORDED_STARTS + 1
    bench.cluster.ends = (ProcessEnd(True, "Memory on the node (IP: 10.0.0.7, ID: fa53) was ..."),) * 8
    await bench.clock.advance(30.0)
    await bench.task
    status = store.get_job(bench.job_id).status
    assert (status.state, status.reason) == (JobState.FAILED, EndReason.WORKERS_FAILED)
    assert "its node 10.0.0.7 had no memory left" in status.message


async def test_starts_that_failed_before_the_supervisor_last_answered_do_not_count(bench: DriverBench) -> None:
    supervisor = await bench.started()
    supervisor.report(event(1))
    await bench.stored(1)
    bench.cluster.num_unrecorded = 100
    await bench.clock.advance(30.0)
    bench.cluster.num_unrecorded += MAX_UNRECORDED_STARTS
    await bench.clock.advance(30.0)
    assert not bench.task.done()
    await bench.stop()


async def test_a_supervisor_that_is_missing_after_it_has_reported_is_not_started_again(
    store: Store, bench: DriverBench
) -> None:
    supervisor = await bench.started()
    supervisor.report(event(1))
    await bench.stored(1)
    await bench.stop()
    bench.cluster.supervisors.clear()
    bench.driver = bench.make_driver()
    await bench.start()
    assert store.get_job(bench.job_id).status.state is JobState.QUEUED
    assert len(bench.cluster.avoided) == 1


async def test_a_directive_is_sent_when_one_of_its_values_changes_and_only_then(store: Store) -> None:
    bench = DriverBench(store, elasticity={"min_workers": 1, "max_workers": 2})
    supervisor = await bench.started()
    await settle()
    for _ in range(3):
        bench.driver.update(bench.row, ())
        await settle()
    assert len(supervisor.directives) == 1
    patch = JobPatch.model_validate({"elasticity": {"min_workers": 2}})
    store.writing(submissions.patch)(bench.job_id, patch, if_match=None, now=3.0)
    bench.driver.update(bench.row, ())
    await settle()
    assert supervisor.directives[-1].elasticity.min_workers == 2
    assert supervisor.directives[-1].spec_version == 2


async def test_a_driver_without_the_lease_writes_no_directive_and_reports_are_stored_all_the_same(
    store: Store, bench: DriverBench
) -> None:
    supervisor = await bench.started()
    await settle()
    store.release_lease("me")
    assert store.acquire_lease("other", ttl_s=600, now=bench.clock.time()) is not None
    supervisor.report(event(1))
    await bench.stored(1)
    bench.driver.update(bench.row, (AvoidedNode(node_id="bad", reason="drain requested"),))
    with pytest.raises(LeaseLost):
        await bench.clock.advance(1.0)
        await bench.task
    assert len(supervisor.directives) == 1


def _lose_tokens(bench: DriverBench) -> None:
    """As a database that was restored from a backup."""
    with bench.store.write(bench.epoch) as tx:
        tx.execute(delete(attempt_tokens))


async def test_a_supervisor_whose_token_was_lost_is_replaced_and_its_successor_is_followed(
    store: Store, bench: DriverBench
) -> None:
    first = await bench.started()
    await bench.stop()
    _lose_tokens(bench)
    bench.driver = bench.make_driver()
    bench.start()
    await until(lambda: bench.supervisor is not first)
    bench.supervisor.report(event(1))
    await bench.clock.advance(1.0)
    types = [one.type for one in store.reading(histories.read_events)(bench.job_id)]
    assert "supervisor.rekeyed" in types and bench.supervisor.num_refused == 0
    await bench.stop()


async def test_a_job_goes_back_to_the_queue_if_its_supervisor_can_be_given_no_new_token(
    store: Store, bench: DriverBench
) -> None:
    await bench.started()
    await bench.stop()
    _lose_tokens(bench)
    bench.cluster.has_configurations = False
    bench.driver = bench.make_driver()
    bench.start()
    await bench.clock.advance(1.0)
    await bench.task
    status = store.get_job(bench.job_id).status
    assert (status.state, status.reason) == (JobState.QUEUED, EndReason.SUPERVISOR_LOST)
    assert "cannot report to this service: the token of the attempt is not in the database" in status.message
    assert bench.cluster.reaped == [(bench.job_id, 1)]


async def test_a_supervisor_on_a_silent_host_is_replaced_and_its_successor_is_followed(
    store: Store, bench: DriverBench
) -> None:
    (first := await bench.started()).report(event(1))
    await bench.stored(1)
    bench.cluster.silent_node = "cut-off"
    first.cut_off()
    await bench.clock.advance(3.0)
    assert bench.supervisor is not first
    assert bench.supervisor.config.home != first.config.home and bench.cluster.avoided[-1] == frozenset({"cut-off"})
    [moved] = [one.data for one in store.reading(histories.read_events)(bench.job_id) if one.type == "supervisor.moved"]
    assert moved == {"node_id": "cut-off"}
    bench.supervisor.report(event(2))
    await bench.stored(1, 2)
    first.reconnect()
    await bench.clock.advance(3.0)
    assert first.num_refused and bench.supervisor.num_refused == 0, "its token ended with it"
    await bench.stop()


async def test_an_unexpected_error_is_counted_said_in_the_status_and_ends_the_attempt_after_some_in_a_row(
    store: Store, bench: DriverBench
) -> None:
    bench.cluster.start_error = RayCallFailed("KeyError: 'x'")
    bench.cluster.raises_start_error = True
    bench.start()
    await bench.clock.advance(2.0)
    message = store.get_job(bench.job_id).status.message
    assert "could not drive the attempt, next try in" in message and "KeyError: 'x'" in message
    await bench.clock.advance(120.0)
    await bench.task
    recorded = store.reading(histories.read_events)(bench.job_id)
    failed = [one.data for one in recorded if one.type == "attempt.driver_failed"]
    assert [one["after_s"] for one in failed] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, None]
    status = store.get_job(bench.job_id).status
    assert (status.state, status.reason) == (JobState.FAILED, EndReason.INTERNAL)
    assert "failed 8 times in a row to drive the attempt: RayCallFailed" in status.message


_STORE_CALLS = {
    "keep_token": supervisor_links.keep_token,
    "put_directive": supervisor_links.put_directive,
    "newest": checkpoint_rows.newest,
}
_OF_CLUSTER = ("watch", "find_supervisor", "start_supervisor", "snapshot", "why_gone", "silent_supervisor")


@pytest.mark.parametrize("place", [*_STORE_CALLS, *_OF_CLUSTER, "unrecorded_starts", "last_ends"])
async def test_an_error_in_any_place_of_a_driver_ends_the_attempt_in_words(
    store: Store, bench: DriverBench, place: str
) -> None:
    def fail(*arguments: object, **named: object) -> NoReturn:
        raise ZeroDivisionError(f"a fault of {place}")

    if place in _STORE_CALLS:
        replace_call(store, _STORE_CALLS[place], fail)
    else:
        setattr(bench.cluster, place, fail)
    if place == "why_gone":
        bench.cluster.start_error = SupervisorGone("x")
    bench.cluster.num_unrecorded = MAX_UNRECORDED_STARTS + 1
    bench.cluster._endpoint = None  # the supervisor dies before it reports
    bench.start()
    await bench.clock.advance(300.0)
    assert bench.task.done() and bench.task.exception() is None
    status = store.get_job(bench.job_id).status
    assert (status.state, status.reason) == (JobState.FAILED, EndReason.INTERNAL)
    assert f"a fault of {place}" in status.message


@pytest.mark.parametrize("place", ["find_supervisor", "start_supervisor", "upload_code"])
async def test_orders_that_a_gateway_never_answers_are_counted_and_end_an_attempt_that_has_not_begun(
    store: Store, tmp_path: Path, place: str
) -> None:
    archive = pack(tmp_path)
    store.writing(archives.put)(archives.check(archive.sha256, archive.data), now=1.0)
    bench = DriverBench(store, code={"archive": archive.sha256})

    async def never(*arguments: object, **named: object) -> NoReturn:
        await bench.clock.sleep(60.0)
        raise OrderUnanswered(f"{place}: the gateway has not answered within 60 s")

    setattr(bench.cluster, place, never)
    bench.start()
    await bench.clock.advance(62.0)
    message = store.get_job(bench.job_id).status.message
    assert "could not drive the attempt, next try in" in message and f"{place}: the gateway has not" in message
    await bench.clock.advance(8 * 60.0 + 120.0)
    status = store.get_job(bench.job_id).status
    assert (status.state, status.reason) == (JobState.FAILED, EndReason.INTERNAL)
    assert "failed 8 times in a row to drive the attempt" in status.message
    assert bench.task.done() and bench.task.exception() is None


async def test_orders_without_an_answer_end_no_attempt_whose_supervisor_has_begun(
    store: Store, bench: DriverBench
) -> None:
    async def never(*arguments: object, **named: object) -> NoReturn:
        await bench.clock.sleep(60.0)
        raise OrderUnanswered("FindSupervisor: the gateway has not answered within 60 s")

    supervisor = await bench.started()
    await bench.clock.advance(1.0)
    supervisor.cut_off()  # its workers train on
    bench.cluster.find_supervisor = never
    await bench.clock.advance(900.0)
    assert not bench.task.done() and store.get_job(bench.job_id).status.state is JobState.RUNNING
    await bench.stop()


@pytest.mark.parametrize("call", [reporting.end_attempt, driving.note_driver_failure])
async def test_an_end_that_cannot_be_stored_is_tried_again_with_pauses(
    store: Store, bench: DriverBench, call: Callable[..., Any]
) -> None:
    calls = []

    def fail(*arguments: object, **named: object) -> NoReturn:
        calls.append(bench.clock.time())
        raise ZeroDivisionError(call.__name__)

    bench.cluster.start_error, bench.cluster.raises_start_error = RayCallFailed("KeyError: 'x'"), True
    undo = replace_call(store, call, fail)
    bench.start()
    await bench.clock.advance(400.0)
    assert 2 < len(calls) < 30 and not bench.task.done()
    undo()
    await bench.clock.advance(60.0)
    assert store.get_job(bench.job_id).status.state is JobState.FAILED


async def test_errors_of_the_driver_never_end_an_attempt_whose_supervisor_reports(
    store: Store, bench: DriverBench
) -> None:
    supervisor = await bench.started()
    await bench.clock.advance(1.0)
    await bench.stop()
    bench.cluster.error_of_find = RayCallFailed("KeyError: 'x'")
    bench.driver = bench.make_driver()
    bench.start()
    await bench.clock.advance(120.0)  # the eighth failure in a row comes after 91 s
    assert not bench.task.done() and not supervisor.is_released
    assert store.get_job(bench.job_id).status.state is JobState.RUNNING
    bench.cluster.error_of_find = None
    supervisor.end(END)
    await bench.clock.advance(35.0)
    assert store.get_job(bench.job_id).status.state is JobState.SUCCEEDED


async def test_two_requests_for_stacks_at_once_are_both_answered(bench: DriverBench) -> None:
    supervisor = await bench.started()
    await bench.clock.advance(1.0)
    supervisor.cut_off()  # a rank is slow to answer
    first = asyncio.create_task(bench.driver.stacks(0, native=False))
    second = asyncio.create_task(bench.driver.stacks(1, native=False))
    await bench.clock.advance(5.0)
    supervisor.reconnect()
    await bench.clock.advance(5.0)
    assert first.done() and second.done()
    found = [await first, await second]
    assert [one.summary for one in found if one is not None] == ["rank 0", "rank 1"]


async def test_a_driver_that_is_cancelled_while_it_ends_the_actors_does_so_first() -> None:
    """No later control plane knows of an attempt whose end is stored."""

    clock = FakeClock()
    may_end, ended = asyncio.Event(), asyncio.Event()

    async def reap() -> None:
        await may_end.wait()
        ended.set()

    task = asyncio.create_task(to_its_end(reap(), clock, 5.0))
    await settle()
    task.cancel()
    await settle()
    assert not task.done()
    may_end.set()
    await settle()
    assert task.cancelled() and ended.is_set()


async def test_the_supervisor_of_a_job_that_goes_on_is_left_at_once(bench: DriverBench) -> None:
    supervisor = await bench.started()
    await bench.clock.advance(1.0)
    bench.task.cancel()
    await settle()
    assert bench.task.cancelled() and not supervisor.is_released and bench.cluster.reaped == []


def leave(bench: ControlBench, source: FakeSupervisor, job_id: str, attempt: int) -> None:
    """A supervisor of that attempt is in the cluster, and nobody drives it."""
    config = source.config.model_copy(update={"job_id": job_id, "attempt": attempt})
    bench.cluster.supervisors[job_id, attempt] = FakeSupervisor(config, Outbox(attempt))


async def test_a_supervisor_that_a_killed_server_has_not_released_is_ended_by_the_next_one(store: Store) -> None:
    killed = ControlBench(store)
    job_id = killed.submit()
    async with killed.running():
        supervisor = killed.cluster.supervisors[job_id, 1]
    lease = store.acquire_lease("killed", ttl_s=1.0, now=killed.clock.time())
    assert lease is not None
    end = AttemptEnd(reason=EndReason.FINISHED, message="done", step=4)
    status = JobStatus(state=JobState.RUNNING, step=4)
    store.writing(reporting.apply, lease.epoch)(
        job_id, SupervisorReports(attempt=1, seq=1, status=status, end=end), now=lease.expires_at
    )
    store.release_lease("killed")
    assert killed.state(job_id) is JobState.SUCCEEDED

    following = ControlBench(store)
    leave(following, supervisor, job_id, 1)
    async with following.running():
        assert following.cluster.reaped == [(job_id, 1)]
        await following.clock.advance(5.0)
        assert following.cluster.reaped == [(job_id, 1)], "once"


async def test_other_attempts_stay(store: Store) -> None:
    bench = ControlBench(store)
    job_id = bench.submit()
    async with bench.running():
        mine = bench.cluster.supervisors[job_id, 1]
        leave(bench, mine, "of-another-control-plane", 1)
        leave(bench, mine, job_id, 2)
        await bench.clock.advance(5.0)
        assert bench.cluster.reaped == [], "one is driven, one is not of this store, one is newer than the store"


async def test_an_older_attempt_of_a_job_that_trains_is_ended(store: Store) -> None:
    bench = ControlBench(store)
    job_id = bench.submit()
    async with bench.running():
        first = bench.cluster.supervisors[job_id, 1]
        first.outbox.set_status(JobStatus(state=JobState.RUNNING, step=1), ())
        first.report(PendingEvent(at=1.0, type="said"))
        await bench.clock.advance(1.0)
        bench.cluster.kill_supervisor(job_id, 1)
        await bench.clock.advance(10.0)
        assert (job_id, 2) in bench.cluster.supervisors
        bench.cluster.reaped.clear()
        leave(bench, first, job_id, 1)
        await bench.clock.advance(5.0)
        assert bench.cluster.reaped == [(job_id, 1)]
