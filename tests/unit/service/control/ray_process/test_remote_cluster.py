"""The control plane and its Ray process: real processes, with a fake cluster in place of Ray."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kit.ray_process.fake_ray_process import NODE, PACKAGES
from shoal_service.cluster.errors import ClusterUnreachable, ConnectionStale, RayCallFailed, SupervisorUnavailable
from shoal_service.control.market.demand import RoomKind
from shoal_service.control.protocols import ClusterSnapshot
from shoal_service.control.ray_process.calls import MAX_WORDS
from shoal_service.control.ray_process.remote_cluster import RemoteCluster
from shoal_service.core.desired import Desired
from shoal_service.core.scheduling.market import WorkerNeed
from shoal_service.supervisor.config import Directive, StaleEpoch, SupervisorConfig
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.log_settings import LogLevel, LogSettings

PROGRAM = Path(__file__).parents[4] / "kit" / "ray_process" / "fake_ray_process.py"
SPEC = parse_spec({"name": "x", "data": {"corpus": "python-stdlib"}, "stop": {"steps": 1}})
CONFIG = SupervisorConfig(job_id="j", attempt=1, spec=SPEC, checkpoint_root="/c/j", granted=2, epoch=3, spec_version=1)
DIRECTIVE = Directive(
    epoch=3,
    granted=2,
    desired=Desired.RUN,
    elasticity=SPEC.elasticity,
    parallelism=SPEC.parallelism,
    spec_version=1,
)
Make = Callable[[str], RemoteCluster]


@pytest.fixture
def make() -> Iterator[Make]:
    """`make("serve")`: a connected cluster whose process does this."""
    made: list[RemoteCluster] = []

    def connected(how: str) -> RemoteCluster:
        environment = {"PATH": os.environ["PATH"], "FAKE_RAY_PROCESS": how}
        logs = LogSettings(level=LogLevel.ERROR)
        made.append(RemoteCluster(environment, logs, command=(sys.executable, str(PROGRAM))))
        made[-1].connect("127.0.0.1:1")
        return made[-1]

    yield connected
    for cluster in made:
        cluster.disconnect()
        assert cluster.pid is None, "no process is left"


def test_every_call_has_the_answer_of_the_cluster(make: Make) -> None:
    cluster = make("serve")
    assert cluster.connected
    need = WorkerNeed(cpus=2.0, memory_gib=1.0)
    assert cluster.snapshot() == ClusterSnapshot(nodes=(NODE,), free={"a": need})
    assert cluster.find_supervisor("j", 1) is None
    supervisor = cluster.start_supervisor(CONFIG, avoid_nodes=frozenset({"b", "c"}), places={"a": 2})
    assert cluster.find_supervisor("j", 1) is not None
    assert cluster.silent_supervisor("j", 1) == ""
    assert cluster.unrecorded_starts("j", 1) == 0
    cluster.keep_ready(frozenset({"b"}))
    cluster.request_room({RoomKind(need, (("zone", "x"),)): 3})
    changed = threading.Event()
    unwatch = cluster.watch(changed.set)
    assert cluster.upload_code("j", 1, b"x" * (3 << 20)) == f"gcs://{3 << 20}.zip"
    assert changed.wait(60), "the fake has changed its nodes"
    unwatch()

    async def of_the_supervisor() -> None:
        reports = await supervisor.pull(0, 0.0, 3)
        [event], [point] = reports.events, reports.series
        assert (event.type, event.data) == ("of.a.newer.release", {"avoided": ["b", "c"], "places": {"a": 2}})
        assert math.isnan(point.loss) and math.isinf(point.grad_norm), "they are not made null"
        await supervisor.direct(DIRECTIVE)
        stacks = await supervisor.stacks(1, True, 3)
        assert stacks is not None and stacks.summary == "rank 1"
        with pytest.raises(StaleEpoch) as stale:
            await supervisor.direct(DIRECTIVE.model_copy(update={"epoch": 2}))
        assert (stale.value.epoch, stale.value.current) == (2, 3)
        await supervisor.release(3)
        assert await cluster.fault_of_node(NODE, None) == ""
        assert await cluster.unused_packages(30.0) == (PACKAGES,)
        assert await cluster.remove_packages("a", PACKAGES.name, 30.0)
        assert await cluster.unused_packages(30.0) == ()

    asyncio.run(of_the_supervisor())
    with pytest.raises(RayCallFailed, match="ValueError: a bug") as failed:
        cluster.reap("j", 1)
    assert len(str(failed.value)) <= MAX_WORDS


def test_after_the_death_of_its_process_the_next_reconnect_starts_another(make: Make) -> None:
    cluster = make("serve")
    supervisor = cluster.start_supervisor(CONFIG, avoid_nodes=frozenset(), places={})
    first = cluster.pid
    assert first is not None

    async def pull_until_it_dies() -> None:
        waiting = asyncio.ensure_future(supervisor.pull(2, 60.0, 3))
        await asyncio.to_thread(cluster.snapshot)  # the pull has been sent before it
        os.kill(first, signal.SIGKILL)
        with pytest.raises(SupervisorUnavailable):
            await waiting
        with pytest.raises(SupervisorUnavailable):
            await supervisor.pull(2, 60.0, 3)

    asyncio.run(pull_until_it_dies())
    assert not cluster.connected and cluster.pid is None
    with pytest.raises(ConnectionStale):
        cluster.snapshot()
    with pytest.raises(ClusterUnreachable):
        cluster.find_supervisor("j", 1)
    cluster.reconnect()
    assert cluster.pid not in (None, first)
    assert cluster.snapshot().nodes == (NODE,)


def test_a_call_that_nobody_waits_for_does_not_hold_up_others(make: Make) -> None:
    cluster = make("serve")
    supervisor = cluster.start_supervisor(CONFIG, avoid_nodes=frozenset(), places={})

    async def cancel() -> None:
        waiting = asyncio.ensure_future(supervisor.pull(2, 60.0, 3))
        await asyncio.to_thread(cluster.snapshot)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await supervisor.pull(0, 0.0, 3)).seq == 2

    asyncio.run(cancel())


def test_an_answer_of_another_shape_is_an_error_of_that_call_only(make: Make) -> None:
    cluster = make("junk")
    for _ in range(2):
        with pytest.raises(RayCallFailed, match="is not valid"):
            cluster.snapshot()


def test_a_process_that_announces_too_much_is_ended(make: Make) -> None:
    cluster = make("huge")
    with pytest.raises(ConnectionStale):
        cluster.snapshot()
    assert cluster.pid is None
