"""The cluster of the fault matrix: a head that runs no work, and three nodes of two CPUs, each of which may die.

They belong to a server of their own, from the same wheel as the session's.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kit.processes.ray_nodes import Nodes

_NODE_IPS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
_CPUS_PER_NODE = 2
_PATIENCE_S = 60.0


class Arena:
    """A control plane and its cluster. Faults may hit both; `mend` repairs them before the next cell."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.nodes = Nodes(server.state_dir, python=server.python)

    def mend(self) -> None:
        """Every node that was taken away comes back, and the control plane, which looks once a while, has seen it."""
        for ip in [ip for ip in _NODE_IPS if not self.nodes.is_alive(ip)]:
            self.nodes.remove(ip)
            self.nodes.add(ip, num_cpus=_CPUS_PER_NODE)
        deadline = time.monotonic() + _PATIENCE_S
        while not self._is_whole():
            assert time.monotonic() < deadline, f"the control plane does not see all nodes within {_PATIENCE_S:g} s"
            time.sleep(0.05)

    def _is_whole(self) -> bool:
        with self.server.client as client:
            seen = client.cluster()
        alive = [node.ip for node in seen.nodes if node.alive and node.cpus]
        return seen.connected and sorted(alive) == sorted(_NODE_IPS)


@pytest.fixture(scope="session")
def arena(shoal_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    options = [f"--num-cpus={_CPUS_PER_NODE * len(_NODE_IPS)}", f"--nodes={len(_NODE_IPS)}", "--leave-dead-nodes"]
    environment = {"SHOAL_SNAPSHOT_SCOPE": "node"}  # each node stands for a machine, which dies with its memory
    server = type(shoal_server)(shoal_server.python, tmp_path_factory.mktemp("arena"), options, environment)
    arena = Arena(server)
    scratch = None
    try:
        server.start().wait_for_cluster()
        scratch = arena.nodes.temp_dir
        yield arena
        assert server.whats_left() == ([], [], [])
        assert server.stop() == 0
    finally:
        if server.process is not None and server.process.poll() is None:
            server.kill()
        arena.nodes.end_added()
        server.sweep()
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
