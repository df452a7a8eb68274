"""The control plane and its Ray process: real processes, with a fake cluster in place of Ray."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kit.processes.server import until
from kit.ray_process.fake_ray_process import NODE, PACKAGES
from shoal_service.cluster.errors import ClusterUnreachable, ConnectionStale, RayCallFailed
from shoal_service.control.market.demand import RoomKind
from shoal_service.control.protocols import ClusterSnapshot, FoundSupervisor
from shoal_service.control.ray_process.calls import MAX_WORDS
from shoal_service.control.ray_process.remote_cluster import RemoteCluster
from shoal_service.core.scheduling.market import WorkerNeed
from shoal_service.home import Home
from shoal_service.supervisor.config import SupervisorConfig
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.log_settings import LogLevel, LogSettings

PROGRAM = Path(__file__).parents[4] / "kit" / "ray_process" / "fake_ray_process.py"
SPEC = parse_spec({"name": "x", "data": {"corpus": "python-stdlib"}, "stop": {"steps": 1}})
CONFIG = SupervisorConfig(
    job_id="j", attempt=1, spec=SPEC, checkpoint_root="/c/j", granted=2, epoch=3, spec_version=1, home=Home(token="t")
)
Make = Callable[[str], RemoteCluster]


@pytest.fixture
def make() -> Iterator[Make]:
    """`make("serve")`: a connected cluster whose process does this."""
    made: list[RemoteCluster] = []

    def connected(how: str) -> RemoteCluster:
        environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
        environment["FAKE_RAY_PROCESS"] = how
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
    cluster.start_supervisor(CONFIG, avoid_nodes=frozenset({"b"}), places={"a": 2})
    assert cluster.find_supervisor("j", 1) == FoundSupervisor(can_dial=True, dials_here=True)
    assert cluster.why_gone("j", 1) == "[frozenset({'b'})] {'j': {'a': 2}}"
    assert cluster.replace_supervisor("j", 1, "", Home(token="another"))
    assert cluster.silent_supervisor("j", 1) == ""
    assert cluster.unrecorded_starts("j", 1) == 0
    cluster.keep_ready(frozenset({"b"}))
    cluster.request_room({RoomKind(need, (("zone", "x"),)): 3})
    changed = threading.Event()
    unwatch = cluster.watch(changed.set)
    assert cluster.upload_code("j", 1, b"x" * (3 << 20)) == f"gcs://{3 << 20}.zip"
    assert changed.wait(60), "the fake has changed its nodes"
    unwatch()

    async def of_the_nodes() -> None:
        assert await cluster.fault_of_node(NODE, None) == ""
        assert await cluster.unused_packages(30.0) == (PACKAGES,)
        assert await cluster.remove_packages("a", PACKAGES.name, 30.0)
        assert await cluster.unused_packages(30.0) == ()

    asyncio.run(of_the_nodes())
    with pytest.raises(RayCallFailed, match="ValueError: a bug") as failed:
        cluster.reap("j", 1)
    assert len(str(failed.value)) <= MAX_WORDS


def test_after_the_death_of_its_process_the_next_reconnect_starts_another(make: Make) -> None:
    cluster = make("serve")
    first = cluster.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    until(lambda: cluster.pid is None, "its end is noticed")
    assert not cluster.connected and cluster.pid is None
    with pytest.raises(ConnectionStale):
        cluster.snapshot()
    with pytest.raises(ClusterUnreachable):
        cluster.find_supervisor("j", 1)
    cluster.reconnect()
    assert cluster.pid not in (None, first)
    assert cluster.snapshot().nodes == (NODE,)


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
