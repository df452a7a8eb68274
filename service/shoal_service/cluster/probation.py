"""Probation: tests nodes that a supervisor suspected, one at a time, and clears those that pass.

The first test of a node comes health.probation_s after the suspicion, the next ones later and later. Called by the
control loop in each pass; what may be used until then is decided in `core/nodes.py`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from shoal_service.cluster.ray_cluster import Cluster
from shoal_service.core.nodes import Node, next_test_delay_s, partner_for_test
from shoal_service.store.nodes import Suspicion
from shoal_service.store.store import Store

_log = logging.getLogger(__name__)


class Probation:
    """Belongs to the control loop; holds at most one test that is under way."""

    def __init__(self, store: Store, cluster: Cluster) -> None:
        self._store = store
        self._cluster = cluster
        self._test: asyncio.Task[None] | None = None

    async def consider(self, nodes: Sequence[Node], *, epoch: int, now: float) -> None:
        """Begin the test that is due, if none is under way; returns at once.

        Raises what the last test raised, LeaseLost among it.
        """
        if self._test is not None:
            if not self._test.done():
                return
            test, self._test = self._test, None
            await test
        due = [
            n
            for n in nodes
            if n.alive and n.suspected and n.drain is None and n.next_test_at is not None and n.next_test_at <= now
        ]
        if not due:
            return
        node = min(due, key=lambda n: n.next_test_at or 0.0)
        suspicion = (await asyncio.to_thread(self._store.suspicions)).get(node.node_id)
        if suspicion is not None and suspicion.next_test_at <= now:
            partner = partner_for_test(node.node_id, nodes)
            self._test = asyncio.create_task(self._run(node, partner, suspicion, epoch))

    def stop(self) -> None:
        """The lease is lost: whoever has it tests again."""
        if self._test is not None:
            self._test.cancel()
            self._test = None

    async def _run(self, node: Node, partner: str | None, suspicion: Suspicion, epoch: int) -> None:
        fault = await self._cluster.fault_of_node(node, partner)
        now = time.time()
        details = {"node_id": node.node_id, "partner": partner, "fault": fault}
        if not fault:
            _log.info("a suspected node has passed its test", extra=details)
            await asyncio.to_thread(self._store.clear_suspicion, suspicion, epoch=epoch, now=now)
            return
        _log.warning("a suspected node has failed its test", extra=details)
        delay_s = next_test_delay_s(suspicion.probation_s, suspicion.num_tests + 1)
        await asyncio.to_thread(
            self._store.postpone_probation,
            node.node_id,
            reason=f"failed test {suspicion.num_tests + 1}: {fault}",
            next_test_at=now + delay_s,
            epoch=epoch,
        )
