"""Probation: tests nodes of a cluster that a supervisor suspected, one at a time, and clears those that pass.

The first test of a node comes soon after the suspicion, since others may be using it. If it passes, the job that
suspects the node still avoids it for its `health.probation_s`, and a second test clears it. The pause doubles after
each failed test.

Called by the control loop in each pass; each cluster has its own. It never decides which nodes may be used;
`core/nodes.py` does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from shoal_service.clock import Clock
from shoal_service.core.nodes import Node, next_test_delay_s, partner_for_test
from shoal_service.store import Store, node_records
from shoal_service.store.node_records import Suspicion

_log = logging.getLogger(__name__)


class NodeTester(Protocol):
    """What probation needs of `control.protocols.Cluster`."""

    async def fault_of_node(self, suspect: Node, partner: str | None) -> str: ...


class Probation:
    """The probation of one cluster's nodes; at most one test is under way."""

    def __init__(self, store: Store, tester: NodeTester, clock: Clock) -> None:
        self._store = store
        self._tester = tester
        self._clock = clock
        self._test: asyncio.Task[None] | None = None

    async def consider(self, nodes: Sequence[Node], *, epoch: int, now: float) -> None:
        """Begin the test that is due, if none is under way; returns immediately.

        Raises:
            LeaseLost, or any other error of the last test.
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
        suspicion = (await asyncio.to_thread(self._store.reading(node_records.suspicions))).get(node.node_id)
        if suspicion is not None and suspicion.next_test_at <= now:
            partner = partner_for_test(node.node_id, nodes)
            self._test = asyncio.create_task(self._run(node, partner, suspicion, epoch))

    def stop(self) -> None:
        """Cancel the test, because the lease is lost. Its next holder repeats the test."""
        if self._test is not None:
            self._test.cancel()
            self._test = None

    async def _run(self, node: Node, partner: str | None, suspicion: Suspicion, epoch: int) -> None:
        fault = await self._tester.fault_of_node(node, partner)
        now = self._clock.time()
        details = {"node_id": node.node_id, "partner": partner, "fault": fault}
        if not fault:
            _log.info("node_test.passed", extra=details)
            if now < suspicion.avoided_until and not suspicion.num_tests:
                await asyncio.to_thread(
                    self._store.writing(node_records.repeat_test, epoch),
                    suspicion,
                    next_test_at=suspicion.avoided_until,
                )
                return
            await asyncio.to_thread(self._store.writing(node_records.clear_suspicion, epoch), suspicion, now=now)
            return
        _log.warning("node_test.failed", extra=details)
        delay_s = next_test_delay_s(suspicion.probation_s, suspicion.num_tests + 1)
        await asyncio.to_thread(
            self._store.writing(node_records.postpone_test, epoch),
            node.node_id,
            reason=f"failed test {suspicion.num_tests + 1}: {fault}",
            next_test_at=now + delay_s,
        )
