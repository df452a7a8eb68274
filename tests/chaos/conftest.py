"""Clusters of several nodes, each of which may die, with a head that runs no work.

    arena         three nodes of two CPUs, for this folder
    wide_arena    four nodes of four CPUs, for a module

Each belongs to a server of its own, from the same wheel as the session's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kit.processes.ray_nodes import Nodes
from kit.processes.server import until


class Arena:
    """A control plane and its cluster. Faults may hit both; `mend` repairs them before the next cell."""

    def __init__(self, server: Any, num_nodes: int, cpus_per_node: int) -> None:
        self.server = server
        self.nodes = Nodes(server.state_dir, python=server.python)
        self._ips = [f"127.0.0.{2 + number}" for number in range(num_nodes)]
        self._cpus_per_node = cpus_per_node

    def mend(self) -> None:
        """Every node that was taken away comes back, and the control plane, which looks once a while, has seen it."""
        for ip in self._ips:
            if not self.nodes.is_alive(ip) or self._cpus_of(ip) != self._cpus_per_node:
                self.nodes.remove(ip)
                self.nodes.add(ip, num_cpus=self._cpus_per_node)
        self.wait_until_whole()

    def wait_until_whole(self) -> None:
        """Until the control plane sees all nodes."""
        until(self._is_whole, "the control plane sees all nodes")

    def _cpus_of(self, ip: str) -> float:
        with self.server.client as client:
            return sum(node.cpus for node in client.cluster().nodes if node.alive and node.ip == ip)

    def _is_whole(self) -> bool:
        with self.server.client as client:
            seen = client.cluster()
        alive = [(node.ip, node.cpus) for node in seen.nodes if node.alive and node.cpus]
        return seen.connected and sorted(alive) == [(ip, self._cpus_per_node) for ip in self._ips]


@pytest.fixture(scope="package")
def arena(shoal_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    with _running(shoal_server, tmp_path_factory.mktemp("arena"), num_nodes=3, cpus_per_node=2) as arena:
        yield arena


@pytest.fixture(scope="module")
def wide_arena(shoal_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    with _running(shoal_server, tmp_path_factory.mktemp("wide"), num_nodes=4, cpus_per_node=4) as arena:
        yield arena


@contextmanager
def _running(shoal_server: Any, state_dir: Path, *, num_nodes: int, cpus_per_node: int) -> Iterator[Arena]:
    options = [f"--num-cpus={num_nodes * cpus_per_node}", f"--nodes={num_nodes}", "--leave-dead-nodes"]
    environment = {"SHOAL_SNAPSHOT_SCOPE": "node"}  # each node stands for a machine, which dies with its memory
    server = type(shoal_server)(shoal_server.python, state_dir, options, environment)
    arena = Arena(server, num_nodes, cpus_per_node)
    try:
        with server.running():
            yield arena
            assert server.whats_left() == ([], [], [])
    finally:
        arena.nodes.end_added()
