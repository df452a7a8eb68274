"""An embedded cluster of which a node dies: started again, or named as away; never left out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kit.processes.ray_nodes import Nodes
from shoal_service.cluster.embedded_cluster import EmbeddedCluster
from shoal_service.cluster.embedded_node import RAYLET, EmbeddedNote
from shoal_service.cluster.ray_environment import CLUSTER_ENVIRONMENT

_VICTIM = 2
_LOOK_S = 0.02
_CHATTER_BYTES = 40 << 20
_CHATTER = f"""
import os, sys, ray
ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")

@ray.remote
def chatter():
    line = b"x" * 1023 + b"\\n"
    for _ in range({_CHATTER_BYTES} // len(line)):
        os.write(1, line)

ray.get(chatter.remote())
print("written", flush=True)
sys.stdin.read()
"""
_COUNT = """
import sys, ray
ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
print("alive:", *sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]))
"""


@pytest.mark.matrix
def test_the_output_of_a_worker_is_rotated_and_nothing_is_lost(tmp_path: Path) -> None:
    cluster = EmbeddedCluster(tmp_path, num_cpus=1)
    try:
        environment = {**os.environ, **cluster.environment}
        script = [sys.executable, "-c", _CHATTER, cluster.start()]
        with subprocess.Popen(script, env=environment, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline() == b"written\n"
            note = EmbeddedNote.read(tmp_path / "embedded-cluster.json")
            assert note is not None
            deadline_mono = time.monotonic() + 60
            while sum(sizes := _output_sizes(Path(note.temp_dir))) < _CHATTER_BYTES:
                assert time.monotonic() < deadline_mono, sizes
                time.sleep(_LOOK_S)  # another process's files cannot be waited for
            process.communicate()
        limit = int(CLUSTER_ENVIRONMENT["RAY_ROTATION_MAX_BYTES"])
        assert len(sizes) == 3 and max(sizes) <= limit, sizes
    finally:
        cluster.stop()


@pytest.mark.matrix
def test_a_node_that_dies_while_it_starts_is_started_again_and_one_that_dies_later_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = EmbeddedCluster(tmp_path, num_cpus=2, num_nodes=2, leave_dead_nodes=True)
    try:
        with _raylets_killed(tmp_path, at_most=1) as killed:
            cluster.start()
        assert len(killed) == 1
        assert ("embedded_cluster.start_failed", ["127.0.0.3"]) in _events(caplog)
        assert cluster.dead_nodes == ()
        assert _alive(cluster) == ["127.0.0.1", "127.0.0.2", "127.0.0.3"]

        os.kill(next(_pids(tmp_path)), signal.SIGKILL)
        assert not cluster.heal(), "it is left dead"
        assert cluster.dead_nodes == ("127.0.0.3",)
        assert ("embedded_cluster.nodes_away", ["127.0.0.3"]) in _events(caplog)
    finally:
        cluster.stop()


@pytest.mark.matrix
def test_a_cluster_that_has_lost_all_its_nodes_starts_them_again_unless_others_have_joined(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    cluster = EmbeddedCluster(tmp_path, num_cpus=2, num_nodes=2, leave_dead_nodes=True)
    try:
        cluster.start()
        nodes.add("127.0.0.9", num_cpus=1)
        for ip in ("127.0.0.2", "127.0.0.3"):
            nodes.remove(ip)
        assert not cluster.heal(), "it can train on the one that has joined"
        nodes.remove("127.0.0.9")
        assert cluster.heal()
        assert cluster.dead_nodes == ()
    finally:
        cluster.stop()
        nodes.end_added()


@contextmanager
def _raylets_killed(state_dir: Path, at_most: int = 99) -> Iterator[set[int]]:
    """SIGKILL for the victim's raylet as soon as there is one; yields the pids."""
    killed: set[int] = set()
    over = threading.Event()

    def kill() -> None:
        while len(killed) < at_most and not over.wait(_LOOK_S):
            for pid in _pids(state_dir):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)

    killer = threading.Thread(target=kill, name="killer")
    killer.start()
    try:
        yield killed
    finally:
        over.set()
        killer.join()


def _pids(state_dir: Path) -> Iterator[int]:
    """Pids of the victim's raylet."""
    path = state_dir / "embedded-cluster.json"
    nodes = EmbeddedNote.model_validate_json(path.read_text()).nodes if path.exists() else ()
    for node in nodes[_VICTIM : _VICTIM + 1]:
        yield from node.find_pids(RAYLET)


def _alive(cluster: EmbeddedCluster) -> list[str]:
    """Addresses of the live nodes, according to the head."""
    count = subprocess.run(
        [sys.executable, "-c", _COUNT, cluster.address],
        env={**os.environ, **cluster.environment},
        check=True,
        capture_output=True,
        text=True,
    )
    [line] = [line for line in count.stdout.splitlines() if line.startswith("alive:")]
    return line.split()[1:]


def _events(caplog: pytest.LogCaptureFixture) -> list[tuple[str, list[str]]]:
    """Logged events about nodes: their names and the addresses of the nodes."""
    return [(record.message, record.nodes) for record in caplog.records if hasattr(record, "nodes")]


def _output_sizes(temp_dir: Path) -> list[int]:
    """Sizes of the files with what workers have printed, rotated or not, without empty ones."""
    return [size for path in temp_dir.rglob("worker-*.out*") if (size := path.stat().st_size)]
