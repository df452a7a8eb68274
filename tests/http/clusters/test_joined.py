"""A control plane and a cluster that has joined: every call, deaths and replacements of either side, late and repeated
messages. A real service, a real gateway, real HTTP; a fake in place of Ray."""

import asyncio
import hashlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

import pytest

from doubles.blocking_cluster import BlockingCluster
from doubles.fake_ray import FakeRay
from doubles.running_gateway import NODE, RunningGateway, until
from shoal_service.clock import SystemClock
from shoal_service.cluster.errors import ClusterUnreachable, RayCallFailed
from shoal_service.clusters.wire import MAX_WORDS, ClusterSnapshot, FoundSupervisor, Order, RoomKind, UnusedPackages
from shoal_service.control.joined_clusters import JoinedCluster
from shoal_service.core.gateways import Incoming
from shoal_service.core.scheduling.market import WorkerNeed
from shoal_service.home import Home, Rejected
from shoal_service.store import Lease, Store, archives, cluster_links
from shoal_service.store.cluster_links import StoredReport
from shoal_service.supervisor.config import SupervisorConfig
from shoal_workers.contract.checks.spec_errors import parse_spec

SPEC = parse_spec({"name": "x", "data": {"corpus": "python-stdlib"}, "stop": {"steps": 1}})
CONFIG = SupervisorConfig(job_id="j", attempt=1, spec=SPEC, checkpoint_root="/c/j", granted=2, epoch=3, spec_version=1)
HOME = Home(url="http://service:8470", token="secret")
PACKAGES = UnusedPackages("a", "127.0.0.1", "f" * 32, 1_000, 60.0)
Make = Callable[..., RunningGateway]


def joined(cluster: BlockingCluster) -> None:
    until(lambda: cluster.connected, "the gateway has joined")


def reaped_by(cluster: BlockingCluster, gateway: RunningGateway) -> bool:
    """Whether an order reaches this gateway, which may have joined a moment ago."""
    with suppress(ClusterUnreachable):
        cluster.reap("j", 1)
    return ("j", 1) in gateway.ray.reaped


@pytest.mark.first
def test_every_call_has_the_answer_of_the_cluster(store: Store, cluster: BlockingCluster, make_gateway: Make) -> None:
    gateway = make_gateway()
    gateway.ray.packages = [PACKAGES]
    joined(cluster)
    assert cluster.address == "head:6379"
    need = WorkerNeed(cpus=2.0, memory_gib=1.0)
    assert cluster.snapshot() == ClusterSnapshot(nodes=(NODE,), free={"a": need})
    assert cluster.find_supervisor("j", 1) is None
    cluster.start_supervisor(CONFIG, avoid_nodes=frozenset({"b", "c"}), places={"a": 2})
    assert (gateway.ray.avoided, gateway.ray.places) == ([frozenset({"b", "c"})], {"j": {"a": 2}})
    assert cluster.find_supervisor("j", 1) == FoundSupervisor(dials_here=True)
    assert cluster.why_gone("j", 1) == ""
    assert cluster.replace_supervisor("j", 1, "a", HOME)
    assert gateway.ray.supervisors["j", 1].config.home == HOME
    cluster.look_now()
    assert cluster.snapshot().attempts == {("j", 1)}, "it was looked at after the supervisor had started"
    assert cluster.silent_supervisor("j", 1) == "" and cluster.unrecorded_starts("j", 1) == 0
    assert cluster.last_ends("j", 1) == ()
    cluster.keep_ready(frozenset({"b"}))
    cluster.request_room(((RoomKind(need, (("zone", "x"),)), 3),))
    assert gateway.ray.requested == [{RoomKind(need, (("zone", "x"),)): 3}]
    data = b"x" * (3 << 20)
    sha256 = hashlib.sha256(data).hexdigest()
    store.writing(archives.put)(archives.check(sha256, data), now=time.time())
    assert cluster.upload_code("j", 1, sha256) == f"gcs://{3 << 20}.zip"
    store.writing(archives.remove)(sha256, before=time.time() + 1)
    assert cluster.upload_code("other", 1, sha256) == f"gcs://{3 << 20}.zip", "the cluster has it: nothing is read"
    with pytest.raises(ClusterUnreachable, match="No open order"):
        cluster.upload_code("j", 1, "0" * 64)

    assert cluster.fault_of_node(NODE, None) == ""
    assert cluster.unused_packages(30.0) == (PACKAGES,)
    assert cluster.remove_packages("a", PACKAGES.name, 30.0)
    assert cluster.unused_packages(30.0) == ()
    assert cluster.reap("j", 1) == 1
    with pytest.raises(RayCallFailed, match="ValueError: a bug") as failed:
        cluster.reap("bug", 1)
    assert len(str(failed.value)) <= MAX_WORDS


def test_a_changed_node_is_reported_at_once(cluster: BlockingCluster, make_gateway: Make) -> None:
    gateway = make_gateway()
    joined(cluster)
    changed = threading.Event()
    unwatch = cluster.watch(changed.set)
    gateway.ray.change_nodes(NODE.model_copy(update={"alive": False}))
    assert changed.wait(60)
    unwatch()
    assert not cluster.snapshot().nodes[0].alive


def test_without_a_gateway_calls_fail_in_words_and_order_nothing(store: Store, cluster: BlockingCluster) -> None:
    with pytest.raises(ClusterUnreachable, match="no gateway speaks for the cluster 'east'"):
        cluster.snapshot()
    with pytest.raises(ClusterUnreachable):
        cluster.reap("j", 1)
    assert not cluster.connected and store.reading(cluster_links.find)("east") is None


def test_a_control_plane_without_the_lease_sees_the_cluster_and_orders_nothing(
    store: Store, make_gateway: Make
) -> None:
    make_gateway()
    with closing(JoinedCluster(store, "east", SystemClock(), lambda: None).start()) as made:
        other = BlockingCluster(made)
        joined(other)
        assert other.snapshot().nodes == (NODE,)
        with pytest.raises(ClusterUnreachable, match="never had the lease"):
            other.reap("j", 1)


def test_an_order_that_a_gateway_left_behind_is_carried_out_by_the_next_one(
    store: Store, cluster: BlockingCluster, lease: Lease, make_gateway: Make
) -> None:
    """The first gateway takes the order, and never reports again."""
    first = make_gateway()
    joined(cluster)
    released = threading.Event()
    first.ray.hold = released.wait
    answers: list[int] = []
    caller = threading.Thread(target=lambda: answers.append(cluster.reap("j", 1)))
    caller.start()
    assert first.ray.begun.wait(60)
    second = make_gateway(token=first.token)  # the same process, started again
    caller.join(60)
    released.set()
    assert answers == [0] and second.ray.reaped == [("j", 1)]
    until(lambda: any("Another gateway speaks" in line for line in first.lines), "the first one stands by, and says so")
    assert first.gateway is not None and cluster.connected


def test_an_order_of_a_control_plane_that_was_replaced_is_void_or_refused(
    store: Store, cluster: BlockingCluster, lease: Lease, make_gateway: Make
) -> None:
    gateway = make_gateway()
    joined(cluster)
    released = threading.Event()
    gateway.ray.hold = released.wait
    failures: list[Exception] = []

    def reap() -> None:
        try:
            cluster.reap("taken", 1)
        except Exception as error:
            failures.append(error)

    caller = threading.Thread(target=reap)
    caller.start()
    assert gateway.ray.begun.wait(60)
    store.release_lease(lease.owner)
    newer = store.acquire_lease("another", ttl_s=600.0, now=time.time())
    assert newer is not None and newer.epoch == lease.epoch + 1
    with closing(JoinedCluster(store, "east", SystemClock(), lambda: newer).start()) as made:
        other = BlockingCluster(made)
        joined(other)
        assert other.unrecorded_starts("j", 1) == 0
        assert gateway.gateway is not None
        late = Order(number=10_000, epoch=lease.epoch, kind="Reap", arguments='{"job_id": "late", "attempt": 1}')
        gateway.call(lambda: gateway.gateway and gateway.gateway.take(late))
        released.set()
        caller.join(60)
        assert failures == [], "it was begun before the replacement, and its answer still arrives"
        assert other.reap("new", 1) == 0
        assert gateway.ray.reaped == [("taken", 1), ("new", 1)], "the late order was refused"


def test_an_order_that_arrives_twice_is_carried_out_once(
    store: Store, cluster: BlockingCluster, lease: Lease, make_gateway: Make
) -> None:
    gateway = make_gateway()
    joined(cluster)
    assert cluster.reap("j", 1) == 0
    [row] = [number for number in range(1, 20) if store.reading(cluster_links.read_answers)("east", [number])][-1:]
    again = Order(number=row, epoch=lease.epoch, kind="Reap", arguments='{"job_id": "j", "attempt": 1}')
    gateway.call(lambda: gateway.gateway and gateway.gateway.take(again))
    assert cluster.reap("other", 1) == 0
    assert gateway.ray.reaped == [("j", 1), ("other", 1)]


def test_an_order_that_nobody_waits_for_is_deleted_and_its_work_ends(
    store: Store, cluster: BlockingCluster, make_gateway: Make
) -> None:
    gateway = make_gateway()
    joined(cluster)
    begun = threading.Event()
    gateway.ray.before_test = begun.set
    gateway.ray.is_test_endless = True

    async def cancel() -> None:
        waiting = asyncio.ensure_future(cluster.cluster.fault_of_node(NODE, None))
        await asyncio.to_thread(until, begun.is_set, "the test of the node has begun")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert gateway.gateway is not None
        running = gateway.gateway._life.running
        await asyncio.to_thread(until, lambda: not running, "it was ended in the gateway")

    asyncio.run(cancel())


def test_a_head_that_is_away_is_reported_in_words_and_a_stale_connection_is_renewed(
    cluster: BlockingCluster, make_gateway: Make
) -> None:
    gateway = make_gateway()
    joined(cluster)
    gateway.ray.error = ClusterUnreachable("the head does not answer")
    until(lambda: not cluster.connected, "it is reported")
    with pytest.raises(ClusterUnreachable, match="the head does not answer"):
        cluster.snapshot()
    gateway.ray.error = None
    joined(cluster)
    gateway.ray.is_stale = True
    until(lambda: gateway.ray.num_connects == 2, "it has connected anew")
    joined(cluster)


def test_a_gateway_with_another_token_stands_by_until_the_first_one_ends(
    cluster: BlockingCluster, make_gateway: Make
) -> None:
    first, second = make_gateway(), make_gateway()
    joined(cluster)
    speaking, waiting = (first, second) if any("joined" in line for line in first.lines) else (second, first)
    until(lambda: any("stands by" in line for line in waiting.lines), "it says so")
    speaking.stop()
    until(lambda: any("joined" in line for line in waiting.lines), "it has followed at once")
    until(lambda: reaped_by(cluster, waiting), "it carries out the orders")


def of_ray_cluster(ray_cluster: str) -> FakeRay:
    ray = FakeRay(NODE)
    ray.ray_cluster = ray_cluster
    return ray


def test_another_ray_cluster_under_the_name_ends_in_words_or_stands_by_and_follows_when_asked_to(
    store: Store, cluster: BlockingCluster, make_gateway: Make
) -> None:
    first = make_gateway(ray=of_ray_cluster("a1"))
    joined(cluster)
    barred = make_gateway(ray=of_ray_cluster("b2"))
    barred.wait()
    assert isinstance(barred.error, Rejected)
    assert "(a1, this one is b2)" in str(barred.error) and "--replace" in str(barred.error)
    asked = make_gateway(ray=of_ray_cluster("b2"), replaces=True)
    until(lambda: any("This one is b2 and stands by" in line for line in asked.lines), "it says so")
    same = make_gateway(ray=of_ray_cluster("b2"), token=first.token)
    until(lambda: any("This one is b2 and stands by" in line for line in same.lines), "the token alone does not do")
    same.stop()
    first.stop()
    until(lambda: any("joined" in line for line in asked.lines), "it has followed")
    until(lambda: reaped_by(cluster, asked), "it carries out the orders")


def test_a_supervisor_that_could_not_be_created_is_reported_at_once(
    cluster: BlockingCluster, make_gateway: Make
) -> None:
    gateway = make_gateway()
    joined(cluster)
    gateway.ray.start_error = ClusterUnreachable("its constructor raised")
    gateway.ray.notices_failures = True
    reported = threading.Event()
    unwatch = cluster.watch(lambda: reported.set() if cluster.snapshot().failed else None)
    cluster.start_supervisor(CONFIG, avoid_nodes=frozenset(), places={})
    assert reported.wait(60)
    assert cluster.snapshot().failed == {("j", 1)} and cluster.why_gone("j", 1) == "its constructor raised"
    unwatch()
    cluster.reap("j", 1)
    cluster.look_now()
    assert cluster.snapshot().failed == frozenset()


@pytest.mark.parametrize(
    ("token", "words"),
    [
        ("shoal_00000000_" + "a" * 43, "unknown, expired or revoked"),
        ("of west", "The token is for the cluster 'west': join with --name west"),
        ("of an admin", "needs the token of the cluster's gateway"),
    ],
)
def test_a_gateway_that_the_service_refuses_ends_and_says_why(
    own_service: Any, store: Store, make_gateway: Make, token: str, words: str
) -> None:
    from shoal_api.client.credentials import find_token
    from shoal_service.access_views import ClusterTokenRequest

    if token == "of west":
        token = store.writing(cluster_links.create_token)(
            "west", ClusterTokenRequest(), by="test", now=time.time()
        ).token
    elif token == "of an admin":
        token = str(find_token(own_service.url))
    gateway = make_gateway(token=token)
    gateway.wait()
    assert isinstance(gateway.error, Rejected) and words in str(gateway.error)


def test_a_revoked_token_ends_its_gateway(own_service: Any, make_gateway: Make, cluster: BlockingCluster) -> None:
    gateway = make_gateway()
    joined(cluster)
    own_service.client.revoke_token(gateway.token.split("_")[1])
    gateway.wait()
    assert isinstance(gateway.error, Rejected)


def test_an_answer_of_another_shape_is_an_error_of_that_call_only(
    store: Store, cluster: BlockingCluster, lease: Lease, make_gateway: Make
) -> None:
    gateway = make_gateway()
    joined(cluster)
    released = threading.Event()
    gateway.ray.hold = released.wait  # it does not answer itself
    life = store.reading(cluster_links.read_newest_report)("east")[0]

    def forge() -> None:
        assert gateway.ray.begun.wait(60)
        [open_order], _ = store.reading(cluster_links.read_open_orders)("east", life, after=0, limit=10)
        forged = f'{{"number": {open_order.number}, "value": "{{\\"__reduce__\\": 1}}"}}'
        sender = Incoming(life, "", 0, False)
        forged_report = StoredReport(
            sender=sender, address="", error="", snapshot=None, answers=[(open_order.number, forged)]
        )
        store.writing(cluster_links.take_report)("east", forged_report, now=time.time())

    forging = threading.Thread(target=forge)
    forging.start()
    with pytest.raises(RayCallFailed, match="is not valid"):
        cluster.reap("j", 1)
    forging.join()
    assert cluster.unrecorded_starts("j", 1) == 0
    released.set()


def test_forty_orders_that_wait_for_a_gateway_take_no_thread_of_the_store(
    store: Store, cluster: BlockingCluster, make_gateway: Make
) -> None:
    gateway, may_end = make_gateway(), threading.Event()
    joined(cluster)
    gateway.ray.hold = may_end.wait

    async def orders() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        waiting = [asyncio.ensure_future(cluster.cluster.reap("j", number)) for number in range(1, 41)]
        await asyncio.to_thread(gateway.ray.begun.wait)
        async with asyncio.timeout(60.0):
            for _ in range(10):
                await asyncio.to_thread(store.ping)
        assert not any(one.done() for one in waiting)
        may_end.set()
        assert await asyncio.gather(*waiting) == [0] * 40

    asyncio.run(orders())


def test_a_gateway_says_joined_only_once_ray_answers(cluster: BlockingCluster, make_gateway: Make) -> None:
    ray = FakeRay(NODE)
    ray.refused_connects = 4
    gateway = make_gateway(ray=ray)
    joined(cluster)
    until(lambda: "gateway: joined; jobs can use this cluster" in gateway.lines, "it says that it has joined")
    waits, *_, last = [line for line in gateway.lines if "jobs can use" in line]
    assert "once Ray answers. no Ray cluster answers at head:6379" in waits and "joined" in last
