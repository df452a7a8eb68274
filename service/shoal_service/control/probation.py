"""Tests nodes of a cluster that a supervisor suspected, one at a time, and clears those that pass.

The first test of a node comes soon after the suspicion, since others may be using it. If it passes, the job that
suspects the node still avoids it for its `health.probation_s`, and a second test clears it. The pause doubles after
each failed test.

The control loop begins it in each pass, as a background call to each cluster, so that at most one test is under way in
a cluster. It never decides which nodes may be used; `core/nodes.py` does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from math import inf

from shoal_service.clock import Clock
from shoal_service.control.protocols import Cluster
from shoal_service.core.nodes import Node, next_test_delay_s, partner_for_test
from shoal_service.store import Store, node_records

_log = logging.getLogger(__name__)


async def run_due_test(store: Store, tester: Cluster, nodes: Sequence[Node], clock: Clock, *, epoch: int) -> None:
    """Test the node of a cluster whose test is due first, if one is due. Raises LeaseLost."""
    now = clock.time()
    due = [
        node
        for node in nodes
        if node.alive and node.suspected and node.drain is None and (node.next_test_at or inf) <= now
    ]
    if not due:
        return
    node = min(due, key=lambda candidate: candidate.next_test_at or 0.0)
    suspicion = (await asyncio.to_thread(store.reading(node_records.suspicions))).get(node.node_id)
    if suspicion is None or suspicion.next_test_at > now:
        return
    partner = partner_for_test(node.node_id, nodes)
    fault = await tester.fault_of_node(node, partner)
    now = clock.time()
    details = {"node_id": node.node_id, "partner": partner, "fault": fault}
    if fault:
        _log.warning("node_test.failed", extra=details)
        delay_s = next_test_delay_s(suspicion.probation_s, suspicion.num_tests + 1)
        reason = f"failed test {suspicion.num_tests + 1}: {fault}"
        postpone = store.writing(node_records.postpone_test, epoch)
        await asyncio.to_thread(postpone, node.node_id, reason=reason, next_test_at=now + delay_s)
        return
    _log.info("node_test.passed", extra=details)
    if now < suspicion.avoided_until and not suspicion.num_tests:
        repeat = store.writing(node_records.repeat_test, epoch)
        await asyncio.to_thread(repeat, suspicion, next_test_at=suspicion.avoided_until)
    else:
        await asyncio.to_thread(store.writing(node_records.clear_suspicion, epoch), suspicion, now=now)
