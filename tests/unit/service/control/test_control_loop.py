"""The control loop: lease and its owner, connection to the cluster, drivers, probation, and the end of the server."""

import asyncio
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from doubles.control_bench import ControlBench, node
from doubles.event_loop import Hangs, run, settle, until
from doubles.fake_clock import FakeClock
from doubles.fake_cluster import FakeCluster
from doubles.fake_clusters import FakeClusters
from kit.island_rounds import announce, announcement
from kit.store_calls import replace_call
from shoal_service.cluster.errors import ClusterUnreachable, RayCallFailed
from shoal_service.control import ownership
from shoal_service.control.cluster_reader import ClusterReader
from shoal_service.core.desired import Desired
from shoal_service.core.endings import AttemptEnd
from shoal_service.core.nodes import FIRST_TEST_S
from shoal_service.reports import SuspectedNode
from shoal_service.store import Lease, histories, island_rounds, submissions, supervisor_links
from shoal_service.store.store import Store
from shoal_service.views import JobStatus
from shoal_workers.contract.job import EndReason, JobState


async def test_a_job_that_cannot_be_read_is_quarantined_and_the_next_one_is_started(
    store: Store, bench: ControlBench
) -> None:
    bad, good = bench.submit(), bench.submit()
    with store._database.write() as tx:
        tx.connection.exec_driver_sql("UPDATE job_specs SET document = '{\"shards\": 3}' WHERE job_num = 1")
    async with bench.running():
        assert bench.state(good) is JobState.STARTING and bench.state(bad) is JobState.QUEUED
        await bench.clock.advance(5.0)
        events = [event.type for event in store.reading(histories.read_events)(bad)]
        assert events.count("job.quarantined") == 1
        assert store.get_job(bad).status.reason == "quarantined"


async def test_nothing_is_driven_while_another_control_plane_holds_the_lease(store: Store, bench: ControlBench) -> None:
    store.acquire_lease("other", ttl_s=6.0, now=bench.clock.time())
    job_id = bench.submit()
    async with bench.running():
        assert bench.state(job_id) is JobState.QUEUED
        assert bench.loop.snapshot().connected and bench.loop.snapshot().owner == "other"
        await bench.clock.advance(5.0)
        assert bench.state(job_id) is JobState.QUEUED
        await bench.clock.advance(4.0)
        assert bench.state(job_id) is JobState.STARTING, "the other's lease has expired"
        assert bench.loop.snapshot().owner == "me" and bench.loop.snapshot().epoch == 2


async def test_a_clock_that_was_set_back_does_not_keep_the_lease_of_an_owner_that_is_gone(
    store: Store, bench: ControlBench
) -> None:
    store.acquire_lease("other", ttl_s=9.0, now=bench.clock.time())
    job_id = bench.submit()
    bench.clock.jump(-900.0)
    async with bench.running():
        await bench.clock.advance(5.0)
        assert bench.state(job_id) is JobState.QUEUED
        await bench.clock.advance(6.0)
        assert bench.state(job_id) is JobState.STARTING, "for its time to live nobody has renewed it"


async def test_a_clock_that_was_set_forward_takes_no_lease_that_is_renewed(store: Store, bench: ControlBench) -> None:
    others_clock = bench.clock.time()
    async with bench.running():
        store.release_lease("me")
        for second in range(12):
            store.acquire_lease("other", ttl_s=9.0, now=others_clock + second)
            bench.clock.jump(3600.0 if second == 6 else 0.0)
            await bench.clock.advance(1.0)
        lease = store.read_lease()
        assert lease is not None and lease.owner == "other"


async def test_the_lease_is_renewed_before_it_expires(store: Store, bench: ControlBench) -> None:
    async with bench.running():
        for _ in range(10):
            await bench.clock.advance(3.0)
            assert store.acquire_lease("other", ttl_s=9.0, now=bench.clock.time()) is None
        lease = store.read_lease()
        assert lease is not None and (lease.owner, lease.epoch) == ("me", 1)


async def test_a_lost_lease_ends_the_driving_and_is_taken_again_when_it_is_free(
    store: Store, bench: ControlBench
) -> None:
    job_id = bench.submit()
    async with bench.running():
        supervisor = bench.cluster.supervisors[job_id, 1]
        store.release_lease("me")
        store.acquire_lease("other", ttl_s=30.0, now=bench.clock.time())
        supervisor.outbox.set_status(JobStatus(state=JobState.RUNNING, step=1), ())
        await bench.clock.advance(9.0)
        store.acquire_lease("other", ttl_s=30.0, now=bench.clock.time())
        num_directives = len(supervisor.directives)
        store.writing(submissions.request)(job_id, Desired.PAUSE, now=bench.clock.time())
        await bench.clock.advance(9.0)
        assert len(supervisor.directives) == num_directives, "none is written without the lease"
        store.writing(submissions.request)(job_id, Desired.RUN, now=bench.clock.time())
        store.release_lease("other")
        await bench.clock.advance(3.0)
        assert bench.state(job_id) is JobState.RUNNING
        assert bench.loop.snapshot().epoch == 3


async def test_an_unreachable_head_keeps_the_last_view_and_supervisors_get_directives(
    store: Store, bench: ControlBench
) -> None:
    job_id = bench.submit()
    async with bench.running():
        bench.cluster.error = ClusterUnreachable("no answer")
        await bench.clock.advance(3.0)
        view = bench.loop.snapshot()
        assert not view.connected and [n.node_id for n in view.nodes] == ["n1"]
        queued = bench.submit()
        store.writing(submissions.request)(job_id, Desired.PAUSE, now=bench.clock.time())
        await bench.clock.advance(3.0)
        assert bench.cluster.supervisors[job_id, 1].directives[-1].desired is Desired.PAUSE
        assert bench.state(queued) is JobState.QUEUED, "without the head nothing is started"
        bench.cluster.error = None
        await bench.clock.advance(3.0)
        assert bench.loop.snapshot().connected


async def test_rounds_of_islands_are_closed_while_no_cluster_answers(
    store: Store, bench: ControlBench, tmp_path: Path
) -> None:
    job_id = bench.submit(islands={"num": 1, "index": 0}, checkpoint={"url": str(tmp_path)})
    async with bench.running():
        bench.cluster.error = ClusterUnreachable("no answer")
        await bench.clock.advance(3.0)
        announce(tmp_path / job_id / "islands", announcement(0, world_size=1, island=0))
        await bench.clock.advance(3.0)
        await until(lambda: any(row.decision for row in store.reading(island_rounds.rounds)(job_id)))


async def test_a_failed_driver_is_replaced_in_the_next_pass(store: Store, bench: ControlBench) -> None:
    job_id = bench.submit()
    async with bench.running():
        supervisor = bench.cluster.supervisors[job_id, 1]
        failed = []

        def fail(*arguments: Any, **named: Any) -> int:
            failed.append(arguments)
            raise ValueError("a fault of our own")

        undo = replace_call(store, supervisor_links.put_directive, fail)
        store.writing(submissions.request)(job_id, Desired.PAUSE, now=bench.clock.time())
        await bench.clock.advance(1.5)
        assert failed
        undo()
        await bench.clock.advance(4.0)
        assert supervisor.directives[-1].desired is Desired.PAUSE


@pytest.mark.slow
async def test_a_suspected_node_is_not_used_until_its_test_has_passed(store: Store) -> None:
    probation_s = 2 * FIRST_TEST_S
    bench = ControlBench(store, node(), node("n2"))
    job_id = bench.submit(health={"probation_s": probation_s})
    async with bench.running():
        supervisor = bench.cluster.supervisors[job_id, 1]
        supervisor.outbox.set_status(JobStatus(state=JobState.RUNNING, step=2), ())
        supervisor.report(SuspectedNode(at=bench.clock.time(), node_id="n2", reason="computes wrong"))
        await bench.clock.advance(2.5)
        assert [n.node_id for n in supervisor.directives[-1].avoid] == ["n2"]
        await bench.clock.advance(FIRST_TEST_S + 3.0)
        assert bench.cluster.tested == [("n2", "n1")]
        assert [n.node_id for n in supervisor.directives[-1].avoid] == ["n2"], "a test that passes early is repeated"
        await bench.clock.advance(probation_s)
        assert bench.cluster.tested == [("n2", "n1")] * 2
        await bench.clock.advance(3.0)
        assert supervisor.directives[-1].avoid == ()


async def test_a_suspicion_of_one_job_keeps_the_node_for_others_until_a_second_job_shares_it(store: Store) -> None:
    bench = ControlBench(store, node(cpus=4.0), node("n2", cpus=4.0))
    first, second = bench.submit(), bench.submit()
    async with bench.running():
        one, other = bench.cluster.supervisors[first, 1], bench.cluster.supervisors[second, 1]
        for supervisor in (one, other):
            supervisor.outbox.set_status(JobStatus(state=JobState.RUNNING, step=2), ())
            supervisor.report()
        one.report(SuspectedNode(at=bench.clock.time(), node_id="n2", reason="replay"))
        await bench.clock.advance(2.5)
        assert [n.node_id for n in one.directives[-1].avoid] == ["n2"]
        assert other.directives[-1].avoid == ()
        other.report(SuspectedNode(at=bench.clock.time(), node_id="n2", reason="the GPU failed"))
        await bench.clock.advance(2.5)
        assert [n.reason for n in other.directives[-1].avoid] == ["on probation: the GPU failed"]


async def test_a_node_that_fails_its_test_stays_on_probation(store: Store) -> None:
    bench = ControlBench(store, node(), node("n2"))
    bench.cluster.fault = "computes wrong"
    job_id = bench.submit()
    async with bench.running():
        supervisor = bench.cluster.supervisors[job_id, 1]
        supervisor.outbox.set_status(JobStatus(state=JobState.RUNNING, step=2), ())
        supervisor.report(SuspectedNode(at=bench.clock.time(), node_id="n2", reason="a collective hung"))
        await bench.clock.advance(FIRST_TEST_S + 6.0)
        assert bench.cluster.tested == [("n2", "n1")]
        [shown] = [n for n in bench.loop.snapshot().nodes if n.node_id == "n2"]
        assert "failed test 1: computes wrong" in shown.suspected and shown.on_probation
        assert supervisor.directives[-1].avoid != ()


async def test_a_server_that_stops_saves_every_attempt_and_starts_none(store: Store, bench: ControlBench) -> None:
    job_id = bench.submit()
    shown: list[list[str]] = []
    stop = asyncio.Event()
    task = asyncio.create_task(bench.loop.run(stop))
    await settle()
    supervisor = bench.cluster.supervisors[job_id, 1]
    assert [directive.server_stops for directive in supervisor.directives] == [False]

    bench.loop.save_and_end(lambda rows: shown.append([row.id for row in rows]))
    await bench.clock.advance(1.0)
    assert supervisor.directives[-1].server_stops and supervisor.directives[-1].desired is Desired.RUN
    assert shown[-1] == [job_id] and not task.done()

    supervisor.end(AttemptEnd(reason=EndReason.SERVER_STOPPED, message="saved at step 3.", step=3))
    await bench.clock.advance(3.0)
    assert task.done(), "nothing is left to save"
    status = store.get_job(job_id).status
    assert (status.state, status.attempt, status.reason) == (JobState.QUEUED, 1, "server_stopped")
    assert supervisor.is_released and store.read_lease() is None


async def test_a_server_that_is_hurried_notes_what_it_did_not_save(store: Store, bench: ControlBench) -> None:
    job_id = bench.submit()
    async with bench.running():
        supervisor = bench.cluster.supervisors[job_id, 1]
        supervisor.outbox.set_status(
            JobStatus(state=JobState.RUNNING, attempt=1, generation=2, workers=2, step=9, checkpoint_step=4), ()
        )
        supervisor.report()
        await bench.clock.advance(1.0)
        bench.loop.save_and_end(lambda rows: None)
    status = store.get_job(job_id).status
    assert (status.state, status.reason, status.step) == (JobState.QUEUED, "cluster_lost", 9)
    assert status.lost is not None
    assert (status.lost.attempt, status.lost.generation, status.lost.workers, status.lost.step) == (1, 2, 2, 9)


async def test_the_lease_is_renewed_after_the_wall_clock_was_set_back(store: Store, bench: ControlBench) -> None:
    """Another machine, whose clock was not, would take it."""

    async with bench.running():
        bench.clock.jump(-900.0)
        await bench.clock.advance(5.0)
        lease = store.read_lease()
        assert lease is not None and lease.expires_at <= bench.clock.time() + 9.0


async def test_a_cancel_needs_nothing_but_the_store(store: Store) -> None:
    bench = ControlBench(store, node(cpus=4.0))
    silent = bench.submit()
    async with bench.running():
        bench.cluster.supervisors[silent, 1].outbox.set_status(JobStatus(state=JobState.RUNNING, step=1), ())
        await bench.clock.advance(2.0)
        bench.cluster.start_error, bench.cluster.raises_start_error = RayCallFailed("KeyError"), True
        starting = bench.submit()
        await bench.clock.advance(2.0)
        assert bench.state(starting) is JobState.STARTING and bench.state(silent) is JobState.RUNNING
        bench.cluster.cut_off()
        for job_id in (starting, silent):
            store.writing(submissions.request)(job_id, Desired.CANCEL, now=bench.clock.time())
        await bench.clock.advance(5.0)
        assert bench.state(starting) is JobState.CANCELLED and bench.state(silent) is JobState.CANCELLING
        await bench.clock.advance(30.0)
        status = store.get_job(silent).status
        assert status.state is JobState.CANCELLED and "while its supervisor did not report" in status.message
        bench.cluster.reconnect()
        await bench.clock.advance(10.0)
        assert bench.cluster.supervisors == {} and (silent, 1) in bench.cluster.reaped


class SlowCluster(FakeCluster):
    """Its gateway does not look again until the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.look = Hangs()

    def look_now(self) -> None:
        raise self.look


def test_an_error_that_comes_after_the_deadline_is_not_reported_as_one_that_nobody_retrieved(store: Store) -> None:
    unretrieved: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unretrieved.append(context))
        cluster, clock = SlowCluster(), FakeClock()
        reader = ClusterReader(store, FakeClusters.single(cluster), clock, "50%")
        assert await reader.read(None, {})
        reader.expire("default")
        reading = asyncio.create_task(reader.read(Lease("me", 1, 100.0), {}))
        await clock.advance(1.0)
        assert await reading, "what was reported last counts"
        cluster.look.answer(ClusterUnreachable("the head died meanwhile"))
        await settle()
        del reader, reading
        gc.collect()

    run(main())
    assert not unretrieved


class DeafCluster(FakeCluster):
    """Its gateway refuses to look again, with this message."""

    message = "no answer"

    def look_now(self) -> None:
        raise ClusterUnreachable(self.message)


async def test_a_look_that_fails_again_in_the_same_way_is_logged_once(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = DeafCluster()
    reader, lease = ClusterReader(store, FakeClusters.single(cluster), FakeClock(), "50%"), Lease("me", 1, 100.0)
    assert await reader.read(lease, {})
    for message in ("no answer", "no answer", "the head died", "the head died"):
        cluster.message = message
        reader.expire("default")
        assert await reader.read(lease, {})
    failures = [vars(record)["error"] for record in caplog.records if record.getMessage() == "cluster.call_failed"]
    assert failures == ["no answer", "the head died"]


async def test_without_the_lease_no_gateway_is_asked_to_look(store: Store) -> None:
    cluster, clock = FakeCluster(), FakeClock()
    reader = ClusterReader(store, FakeClusters.single(cluster), clock, "50%")
    assert await reader.read(None, {})
    reader.expire("default")
    assert await reader.read(None, {}) and cluster.num_fresh == 0
    assert await reader.read(Lease("me", 1, 100.0), {}) and cluster.num_fresh == 1, "it does so once it has the lease"


async def test_looks_that_hang_are_cancelled_when_the_lease_is_lost(store: Store, bench: ControlBench) -> None:
    def hang() -> None:
        raise Hangs

    async with bench.running():
        bench.cluster.look_now = hang  # type: ignore[method-assign]
        bench.cluster.change_nodes(node("n1"), node("n2"))
        await bench.clock.advance(2.0)
        assert _looking()
        store.release_lease("me")
        store.acquire_lease("other", ttl_s=30.0, now=bench.clock.time())
        await bench.clock.advance(4.0)
        assert not _looking()


def _looking() -> list[str]:
    return [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("look ")]


def _name_of_another() -> tuple[subprocess.Popen[str], str]:
    code = "from shoal_service.control.ownership import own_name; print(own_name(), flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_a_killed_process_has_ended_even_before_it_is_reaped() -> None:
    process, name = _name_of_another()
    with process:
        assert not ownership.is_gone(name)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert ownership.is_gone(name)
    assert ownership.is_gone(name)


def test_this_process_is_alive() -> None:
    assert not ownership.is_gone(ownership.own_name())


def test_another_process_of_the_same_pid_is_not_the_owner() -> None:
    host, pid, place, start = ownership.own_name().rsplit("-", 3)
    assert ownership.is_gone(f"{host}-{pid}-{place}-{int(start) - 1}")


@pytest.mark.parametrize("name", ["", "owner", "host-99999999-abcdefab-12", "host-x-y-z", "a-b"])
def test_owners_on_other_hosts_are_unknown(name: str) -> None:
    assert not ownership.is_gone(name)
