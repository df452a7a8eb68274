"""The control loop with several clusters: where jobs start, one that does not answer, moves, and jobs of a lost one."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from doubles.control_bench import ControlBench, node
from doubles.event_loop import Hangs, settle
from doubles.fake_cluster import FakeCluster, FakeSupervisor
from shoal_service.cluster.errors import RayCallFailed
from shoal_service.core.desired import Desired
from shoal_service.core.endings import AttemptEnd
from shoal_service.core.gateways import Incoming
from shoal_service.reports import PendingEvent
from shoal_service.store import cluster_links, histories, submissions
from shoal_service.store.cluster_links import StoredReport
from shoal_service.store.errors import ClusterNotFound
from shoal_service.store.store import Store
from shoal_service.views import CheckpointState, CheckpointView, JobPatch, JobStatus, WorkerPatch
from shoal_workers.contract.job import EndReason, JobState

WAIT_S = 30.0
ELASTICITY = {"min_workers": 1, "max_workers": 1, "wait_s": WAIT_S}


def two(store: Store, **options: Any) -> ControlBench:
    """The own cluster `default` and `west`, with a node each."""
    for name in ("default", "west"):
        store.writing(cluster_links.take_report)(name, _report(), now=1.0)
    return ControlBench(store, node("d1"), others={"west": [node("w1")]}, **options)


def _report() -> StoredReport:
    return StoredReport(sender=Incoming("a" * 16, "t", 1, True), address="", error="", snapshot=None)


def of_west(bench: ControlBench) -> FakeCluster:
    return bench.clusters.of("west")


def submit(bench: ControlBench, cluster: str = "any", **spec: Any) -> str:
    return bench.submit(worker={"cluster": cluster}, elasticity=ELASTICITY, **spec)


def saved(supervisor: FakeSupervisor, step: int) -> None:
    """It trains, and has committed a checkpoint."""
    attempt = supervisor.config.attempt
    status = JobStatus(state=JobState.RUNNING, step=step, generation=1, checkpoint_step=step)
    supervisor.outbox.set_status(status, ())
    url = f"{supervisor.config.checkpoint_root}/step-{step:012d}-a{attempt}-g1"
    view = CheckpointView(step=step, url=url, state=CheckpointState.COMMITTED, attempt=attempt, generation=1)
    supervisor.report(view)


def ended(supervisor: FakeSupervisor, step: int) -> None:
    supervisor.end(AttemptEnd(reason=EndReason.MOVED, message=f"saved at step {step}.", step=step))


async def training(bench: ControlBench, job_id: str, cluster: str = "west") -> FakeSupervisor:
    supervisor = bench.clusters.of(cluster).supervisors[job_id, 1]
    saved(supervisor, 7)
    await bench.clock.advance(2.0)
    assert bench.state(job_id) is JobState.RUNNING
    return supervisor


def events(store: Store, job_id: str, kind: str) -> list[dict[str, Any]]:
    return [event.data for event in store.reading(histories.read_events)(job_id) if event.type == kind]


Scenario = Callable[[ControlBench, str, FakeSupervisor], Coroutine[Any, Any, None]]


def with_a_job_in_west(scenario: Scenario) -> Callable[[Store], Coroutine[Any, Any, None]]:
    """The scenario begins when a job trains in the cluster west, beside the service's own cluster."""

    async def test(store: Store) -> None:
        bench = two(store)
        job_id = submit(bench, "west")
        async with bench.running():
            await scenario(bench, job_id, await training(bench, job_id))

    return test


@pytest.fixture
def bench(store: Store) -> ControlBench:
    return two(store)


async def test_a_job_starts_in_the_cluster_that_it_names_and_is_driven_there(store: Store, bench: ControlBench) -> None:
    here, there = submit(bench, "default"), submit(bench, "west")
    async with bench.running():
        assert set(bench.cluster.supervisors) == {(here, 1)}
        assert set(of_west(bench).supervisors) == {(there, 1)}
        assert store.get_job(there).status.cluster == "west"
        view = bench.loop.snapshot()
        assert [(one.name, one.connected, one.num_nodes) for one in view.clusters] == [
            ("default", True, 1),
            ("west", True, 1),
        ]
        assert {one.node_id: one.cluster for one in view.nodes} == {"d1": "default", "w1": "west"}
        assert view.cpus_total == 4.0
        await bench.clock.advance(2.0)
        assert [one.num_jobs for one in bench.loop.snapshot().clusters] == [1, 1]


async def test_a_cluster_that_joins_later_is_used_without_a_restart(store: Store) -> None:
    bench = ControlBench(store, node("d1"))
    job_id = submit(bench, "west")
    async with bench.running():
        await bench.clock.advance(3.0)
        assert bench.state(job_id) is JobState.QUEUED
        bench.clusters.join("west", bench.make_cluster(node("w1")), labels={"region": "eu"})
        await bench.clock.advance(3.0)
        assert (job_id, 1) in of_west(bench).supervisors
        [of_node] = [one for one in bench.loop.snapshot().nodes if one.node_id == "w1"]
        assert of_node.labels == {"region": "eu"}


async def test_a_selector_may_name_labels_of_the_cluster_which_its_nodes_lack_in_ray(bench: ControlBench) -> None:
    bench.clusters.join("west", of_west(bench), labels={"region": "eu"})
    job_id = bench.submit(worker={"cluster": "west", "selector": {"region": "eu"}})
    async with bench.running():
        supervisor = of_west(bench).supervisors[job_id, 1]
        assert supervisor.config.spec.worker.selector == {}


async def test_a_cluster_that_does_not_answer_keeps_its_jobs_and_others_are_scheduled(
    store: Store, bench: ControlBench
) -> None:
    there = submit(bench, "west")
    async with bench.running():
        supervisor = await training(bench, there)
        of_west(bench).cut_off(with_supervisors=False)
        here = submit(bench, "default")
        await bench.clock.advance(3.0)
        assert bench.state(here) is JobState.STARTING and bench.state(there) is JobState.RUNNING
        [west] = [one for one in bench.loop.snapshot().clusters if one.name == "west"]
        assert (west.connected, west.why_away) == (False, "the gateway of the cluster is silent")
        await bench.clock.advance(3 * WAIT_S)
        assert bench.state(there) is JobState.RUNNING, "its supervisor reports by itself"
        store.writing(submissions.request)(there, Desired.PAUSE, now=bench.clock.time())
        await bench.clock.advance(2.0)
        assert supervisor.directives[-1].desired is Desired.PAUSE, "it is directed"


@with_a_job_in_west
async def test_a_job_moves_on_request_once_it_has_saved(
    bench: ControlBench, job_id: str, supervisor: FakeSupervisor
) -> None:
    bench.store.writing(submissions.move)(job_id, "default", now=bench.clock.time())
    await bench.clock.advance(2.0)
    assert (supervisor.directives[-1].is_preempted, supervisor.directives[-1].moves_to) == (True, "default")
    assert bench.cluster.asked_storage == [(f"/checkpoints/{job_id}", "step-000000000007-a1-g1")]
    assert bench.state(job_id) is JobState.RUNNING and not bench.cluster.supervisors
    saved(supervisor, 9)
    ended(supervisor, 9)
    await bench.clock.advance(3.0)
    assert (job_id, 2) in bench.cluster.supervisors and bench.store.get_job(job_id).status.cluster == "default"
    [moved] = events(bench.store, job_id, "job.move_requested")
    assert (moved["from"], moved["to"], moved["running_in"]) == ("west", "default", "west")
    [queued] = [one for one in events(bench.store, job_id, "job.state") if one["to"] == "QUEUED"]
    assert queued["message"] == "saved at step 9. It moves to the cluster default with 9 steps kept."
    assert of_west(bench).reaped == [(job_id, 1)]


@with_a_job_in_west
async def test_a_job_trains_on_until_it_would_start_in_the_other_cluster_which_keeps_the_room_for_it(
    bench: ControlBench, job_id: str, supervisor: FakeSupervisor
) -> None:
    first, second = (submit(bench, "default") for _ in range(2))
    await bench.clock.advance(2.0)
    assert set(bench.cluster.supervisors) == {(first, 1), (second, 1)}, "default is full"
    bench.store.writing(submissions.move)(job_id, "default", now=bench.clock.time())
    await bench.clock.advance(20.0)
    assert not supervisor.directives[-1].is_preempted
    [stays] = events(bench.store, job_id, "job.stays_in_cluster")
    assert stays["reason"].startswith("moves to the cluster 'default' as soon as it can: ")
    assert stays["reason"].endswith("It trains on until then")
    bench.cluster.supervisors[first, 1].end(AttemptEnd(reason=EndReason.FINISHED, message="done.", step=9))
    await bench.clock.advance(3.0)
    assert supervisor.directives[-1].is_preempted
    later = submit(bench, "default")
    await bench.clock.advance(20.0)
    assert bench.state(later) is JobState.QUEUED, "the room is kept"
    saved(supervisor, 9)
    ended(supervisor, 9)
    await bench.clock.advance(3.0)
    assert {key for key in bench.cluster.supervisors if key[0] in (job_id, later)} == {(job_id, 2)}


@with_a_job_in_west
async def test_the_room_of_a_move_is_kept_after_its_attempt_has_ended_and_not_longer_than_a_minute(
    bench: ControlBench, job_id: str, supervisor: FakeSupervisor
) -> None:
    first, _ = (submit(bench, "default") for _ in range(2))
    await bench.clock.advance(2.0)
    bench.store.writing(submissions.move)(job_id, "default", now=bench.clock.time())
    bench.cluster.supervisors[first, 1].end(AttemptEnd(reason=EndReason.FINISHED, message="done.", step=9))
    await bench.clock.advance(5.0)
    later = submit(bench, "default")
    bench.cluster.sees_storage = lambda *_: asyncio.Event().wait()  # type: ignore[method-assign,assignment]
    saved(supervisor, 9)
    ended(supervisor, 9)
    await bench.clock.advance(40.0)
    assert {bench.state(job_id), bench.state(later)} == {JobState.QUEUED}, "whether it can start is not known yet"
    await bench.clock.advance(30.0)
    assert (later, 1) in bench.cluster.supervisors and bench.state(job_id) is JobState.QUEUED


@with_a_job_in_west
async def test_a_job_that_is_moved_at_once_saves_and_waits_in_the_full_cluster(
    bench: ControlBench, job_id: str, supervisor: FakeSupervisor
) -> None:
    first, _ = (submit(bench, "default") for _ in range(2))
    await bench.clock.advance(2.0)
    for to, is_directed in (("west", False), ("default", True), ("default", True)):
        bench.store.writing(submissions.move)(job_id, to, at_once=True, now=bench.clock.time())
        await bench.clock.advance(3.0)
        directive = supervisor.directives[-1]
        assert (directive.is_preempted, directive.moves_to) == (is_directed, "default" if is_directed else "")
    saved(supervisor, 9)
    ended(supervisor, 9)
    await bench.clock.advance(3.0)
    assert bench.state(job_id) is JobState.QUEUED and of_west(bench).reaped == [(job_id, 1)]
    assert [one["to"] for one in events(bench.store, job_id, "job.move_requested")] == ["default"]
    bench.cluster.supervisors[first, 1].end(AttemptEnd(reason=EndReason.FINISHED, message="done.", step=9))
    await bench.clock.advance(3.0)
    assert bench.store.get_job(job_id).status.cluster == "default"


@with_a_job_in_west
async def test_a_move_waits_with_words_for_a_cluster_that_cannot_have_the_job(
    bench: ControlBench, job_id: str, supervisor: FakeSupervisor
) -> None:
    bench.cluster.storage[f"/checkpoints/{job_id}"] = "no such directory"
    bench.store.writing(submissions.patch)(
        job_id, JobPatch(worker=WorkerPatch(cluster="default")), if_match=None, now=bench.clock.time()
    )
    await bench.clock.advance(20.0)
    assert not supervisor.directives[-1].is_preempted
    [stays] = events(bench.store, job_id, "job.stays_in_cluster")
    assert stays["cluster"] == "west" and "its checkpoints cannot be read there: no such directory" in stays["reason"]
    bench.cluster.storage.clear()
    await bench.clock.advance(20.0)
    assert supervisor.directives[-1].is_preempted, "it is asked again"
    bench.store.writing(submissions.move)(job_id, "any", now=bench.clock.time())
    await bench.clock.advance(2.0)
    assert not supervisor.directives[-1].is_preempted, "and stays, once it may"


async def test_a_queued_job_starts_only_where_its_checkpoints_are_known_to_be_readable(store: Store) -> None:
    async def refuse(url: str, name: str) -> str:
        raise RayCallFailed("this release knows no order 'SeesStorage'")

    bench = two(store)
    job_id = submit(bench, "west")
    async with bench.running():
        supervisor = await training(bench, job_id)
        of_west(bench).change_nodes()
        store.writing(submissions.move)(job_id, "default", now=bench.clock.time())
        bench.cluster.sees_storage = refuse  # type: ignore[method-assign]
        ended(supervisor, 7)
        await bench.clock.advance(5.0)
        assert bench.state(job_id) is JobState.QUEUED
        note = store.get_job(job_id).status.note
        assert "its checkpoints cannot be read there: this release knows no order" in note
        del bench.cluster.sees_storage
        await bench.clock.advance(20.0)
        assert (job_id, 2) in bench.cluster.supervisors
        assert store.get_job(job_id).status.note != note


@with_a_job_in_west
async def test_a_request_to_move_is_refused_with_words(
    bench: ControlBench, job_id: str, supervisor: FakeSupervisor
) -> None:
    async def why(to: str) -> str:
        return await bench.loop.why_not_in(bench.store.get_job(job_id), to)

    assert await why("any") == "" and await why("default") == ""
    with pytest.raises(ClusterNotFound):
        await why("east")
    bench.cluster.storage[f"/checkpoints/{job_id}"] = "another disk"
    assert "another disk" in await why("default") and "checkpoint.url" in await why("default")
    bench.cluster.storage.clear()
    bench.clusters.cordon("default", "upgrade")
    assert "cordoned (upgrade)" in await why("default") and "uncordon" in await why("default")
    bench.cluster.change_nodes(node("d1", cpus=0.5))
    bench.clusters.join("default", bench.cluster)
    await bench.clock.advance(3.0)
    assert "elasticity.min_workers is 1, and 0 of its workers" in await why("default")
    bench.cluster.cut_off()
    await bench.clock.advance(3.0)
    assert "the cluster is away (the gateway of the cluster is silent)" in await why("default")


@with_a_job_in_west
async def test_a_job_of_a_lost_cluster_goes_on_elsewhere_and_what_is_left_is_ended_when_it_returns(
    bench: ControlBench, job_id: str, supervisor: FakeSupervisor
) -> None:
    bench.store.writing(submissions.move)(job_id, "any", now=bench.clock.time())
    of_west(bench).cut_off()
    await bench.clock.advance(WAIT_S - 2.0)
    assert bench.state(job_id) is JobState.RUNNING, "not yet"
    await bench.clock.advance(8.0)
    assert bench.store.get_job(job_id).status.cluster == "default" and (job_id, 2) in bench.cluster.supervisors
    [queued] = [one for one in events(bench.store, job_id, "job.state") if one["to"] == "QUEUED"]
    assert queued["reason"] == "cluster_lost"
    assert "the cluster 'west' and the job's supervisor have been silent for 3" in queued["message"]
    assert "(30 s); it goes on in another cluster from the checkpoint of step 7" in queued["message"]
    of_west(bench).reconnect()
    supervisor.report(PendingEvent(at=1.0, type="said"))
    await bench.clock.advance(6.0)
    assert supervisor.num_refused, "its token has ended with the attempt"
    assert of_west(bench).reaped == [(job_id, 1)] and not of_west(bench).supervisors
    assert (job_id, 2) in bench.cluster.supervisors


@with_a_job_in_west
async def test_a_job_that_names_the_lost_cluster_stays_and_says_so_once(
    bench: ControlBench, job_id: str, supervisor: FakeSupervisor
) -> None:
    of_west(bench).cut_off()
    await bench.clock.advance(3 * WAIT_S)
    assert bench.state(job_id) is JobState.RUNNING
    [stays] = events(bench.store, job_id, "job.stays_in_cluster")
    assert "worker.cluster is west. `shoal move JOB --to any` lets it go on" in stays["reason"]
    assert bench.store.get_job(job_id).status.note == stays["reason"]
    bench.store.writing(submissions.move)(job_id, "any", now=bench.clock.time())
    await bench.clock.advance(5.0)
    assert (job_id, 2) in bench.cluster.supervisors, "the way out"
    assert supervisor.config.attempt == 1


@with_a_job_in_west
async def test_a_job_whose_checkpoints_cannot_be_read_elsewhere_stays_and_says_so_once(
    bench: ControlBench, job_id: str, supervisor: FakeSupervisor
) -> None:
    bench.store.writing(submissions.move)(job_id, "any", now=bench.clock.time())
    bench.cluster.storage[f"/checkpoints/{job_id}"] = "no such directory"
    of_west(bench).cut_off()
    await bench.clock.advance(3 * WAIT_S)
    assert bench.state(job_id) is JobState.RUNNING
    [stays] = events(bench.store, job_id, "job.stays_in_cluster")
    assert "in 'default': its checkpoints cannot be read there: no such directory" in stays["reason"]
    bench.cluster.storage.clear()
    await bench.clock.advance(20.0)
    assert (job_id, 2) in bench.cluster.supervisors


@with_a_job_in_west
async def test_jobs_of_a_cluster_that_was_removed_go_on_elsewhere(
    bench: ControlBench, job_id: str, supervisor: FakeSupervisor
) -> None:
    bench.store.writing(submissions.move)(job_id, "any", now=bench.clock.time())
    supervisor.cut_off()
    bench.clusters.remove("west")
    await bench.clock.advance(WAIT_S + 5.0)
    assert (job_id, 2) in bench.cluster.supervisors
    assert [one.name for one in bench.loop.snapshot().clusters] == ["default"]


async def test_a_new_control_plane_waits_anew_and_finds_the_jobs_in_their_clusters(
    store: Store, bench: ControlBench
) -> None:
    job_id = submit(bench, "west")
    async with bench.running():
        await training(bench, job_id)
        store.writing(submissions.move)(job_id, "any", now=bench.clock.time())
        of_west(bench).cut_off()
        await bench.clock.advance(WAIT_S - 5.0)
    next_one = two(store, owner="another")
    next_one.clusters.join("west", of_west(bench))
    next_one.clock.take(bench.clock.time() - next_one.clock.time())
    async with next_one.running():
        await next_one.clock.advance(WAIT_S - 5.0)
        assert next_one.state(job_id) is JobState.RUNNING, "this process has seen less silence"
        await next_one.clock.advance(12.0)
        assert (job_id, 2) in next_one.cluster.supervisors


@with_a_job_in_west
async def test_nothing_is_added_in_a_cordoned_cluster_and_its_supervisors_know_why(
    bench: ControlBench, job_id: str, supervisor: FakeSupervisor
) -> None:
    bench.clusters.cordon("west", "upgrade")
    await bench.clock.advance(2.0)
    [avoided] = supervisor.directives[-1].avoid
    assert avoided.keeps_workers and avoided.reason == "cordoned: the cluster 'west' is cordoned: upgrade"
    other = submit(bench, "west")
    await bench.clock.advance(3.0)
    assert bench.state(other) is JobState.QUEUED


async def test_a_server_that_stops_ends_the_jobs_of_its_own_cluster_only(bench: ControlBench) -> None:
    here, there = submit(bench, "default"), submit(bench, "west")
    async with bench.running():
        await training(bench, there)
        own = await training(bench, here, "default")
        shown: list[list[str]] = []
        bench.loop.save_and_end(lambda rows: shown.append([row.id for row in rows]))
        await bench.clock.advance(2.0)
        assert own.directives[-1].server_stops
        assert not of_west(bench).supervisors[there, 1].directives[-1].server_stops
        own.end(AttemptEnd(reason=EndReason.SERVER_STOPPED, message="saved", step=7))
        await bench.clock.advance(3.0)
        await settle()
        assert shown[0] == [here] and bench.state(there) is JobState.RUNNING


async def test_a_cluster_that_hangs_holds_up_no_pass(bench: ControlBench) -> None:
    west = of_west(bench)

    def hang() -> None:
        raise Hangs

    async with bench.running():
        west.look_now = hang  # type: ignore[method-assign]
        west.change_nodes(node("w1"), node("w2"))
        await bench.clock.advance(1.5)
        job_id = submit(bench, "default")
        await bench.clock.advance(1.5)
        assert bench.state(job_id) is JobState.STARTING
        [summary] = [cluster for cluster in bench.loop.snapshot().clusters if cluster.name == "west"]
        assert summary.connected and summary.num_nodes == 2, "what it has reported counts"
