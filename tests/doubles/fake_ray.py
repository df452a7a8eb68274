"""FakeRay: a Ray cluster as its gateway sees it, in memory. Its supervisors are FakeSupervisors that report nothing."""

import asyncio
import hashlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

from doubles.fake_cluster import FakeCluster
from shoal_service.cluster.errors import ClusterUnreachable, ConnectionStale
from shoal_service.clusters.wire import ClusterSnapshot
from shoal_service.core.nodes import Node


class FakeRay(FakeCluster):
    """A `gateway.answering.RayAccess`."""

    def __init__(self, *nodes: Any) -> None:
        super().__init__(nodes)
        self.address = ""
        self.ray_cluster = ""
        """Known after the next connection."""
        self.num_connects = 0
        self.refused_connects = 0
        """So many attempts to connect fail."""
        self.is_stale = False
        """The head does not know this driver, until it connects anew."""
        self.started: list[tuple[str, int]] = []
        self.hold: Callable[[], object] = lambda: None
        """Called by each `reap`, on its thread, before it does anything."""
        self.before_test: Callable[[], object] = lambda: None
        """Called when the test of a node begins."""
        self.is_test_endless = False
        self.begun = threading.Event()
        """A `reap` has begun."""
        self.code: dict[str, str] = {}
        """URI of each code archive that it has, by SHA-256."""

    def connect(self, address: str) -> None:
        self.num_connects += 1
        self.address = address
        if self.refused_connects:
            self.refused_connects -= 1
            raise ClusterUnreachable(f"no Ray cluster answers at {address}")
        self.is_stale = False

    def reconnect(self) -> None:
        self.connect(self.address)

    def disconnect(self) -> None:
        pass

    def snapshot(self) -> ClusterSnapshot:
        if self.is_stale:
            raise ConnectionStale("the raylet of this driver is dead")
        return super().snapshot()

    def start_supervisor(self, config: Any, *, avoid_nodes: frozenset[str], places: Mapping[str, int]) -> None:
        super().start_supervisor(config, avoid_nodes=avoid_nodes, places=places)
        self.started.append((config.job_id, config.attempt))

    async def fault_of_node(self, suspect: Node, partner: str | None) -> str:
        self.before_test()
        if self.is_test_endless:
            await asyncio.Event().wait()
        return await super().fault_of_node(suspect, partner)

    def hold_code(self, job_id: str, attempt: int, sha256: str) -> str:
        return self.code.get(sha256, "")

    def upload_code(self, job_id: str, attempt: int, archive: bytes) -> str:  # type: ignore[override]
        return self.code.setdefault(hashlib.sha256(archive).hexdigest(), f"gcs://{len(archive)}.zip")

    def reap(self, job_id: str, attempt: int) -> int:
        self.begun.set()
        self.hold()
        if job_id == "bug":
            raise ValueError("a bug " * 1_000)
        return super().reap(job_id, attempt)
