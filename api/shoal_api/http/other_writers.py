"""What other processes commit: one query a second for all open streams and long polls together, and none without any.

The commits of this process are notified by the store. With several control planes on one database, the one that holds
the lease writes most changes; the clients of the others learn of them here. The cluster's nodes are looked at too: they
change without a commit.
"""

from __future__ import annotations

import asyncio
import logging

from starlette.concurrency import run_in_threadpool

from shoal_api.http.context import Context
from shoal_service.store import histories
from shoal_service.store.errors import StoreUnavailable

CLUSTER = "cluster"
"""Notified, in the place of a job's id, when the nodes have changed."""
_CLOCKS_APART_S = 60.0
"""Largest difference between the clocks of two control planes."""
_log = logging.getLogger(__name__)


async def watch_other_writers(context: Context) -> None:
    """Runs until it is cancelled."""
    changes, store = context.changes, context.store
    known: dict[str, tuple[float, int, int]] = {}
    cluster = None
    while True:
        await asyncio.sleep(context.pace.reread_s)
        if not changes.num_watches:
            continue
        try:
            newest = max((updated_at for updated_at, *_ in known.values()), default=0.0)
            newest = newest or await run_in_threadpool(store.reading(histories.newest_change))
            found = await run_in_threadpool(store.reading(histories.changed_jobs), newest - _CLOCKS_APART_S)
            nodes = await run_in_threadpool(lambda: context.cluster.snapshot().nodes)
        except StoreUnavailable:
            _log.warning("changes.store_unavailable")
            continue
        for job_id, content in found.items():
            if known.get(job_id) != content:
                changes.notify(job_id)
        if nodes != cluster:
            changes.notify(CLUSTER)
        known, cluster = found, nodes
