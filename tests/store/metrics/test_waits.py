"""Each kind of wait for another machine is on /metrics, with its bound."""

from __future__ import annotations

import ast
import threading
from pathlib import Path

import pytest

from doubles.event_loop import run
from kit.scrapes import scrape, value_of
from shoal_service import control
from shoal_service.clock import SystemClock
from shoal_service.clusters.verbs import VERBS
from shoal_service.control.job_storage import JobStorage, StorageAway
from shoal_service.control.joined_clusters import JoinedClusters
from shoal_service.control.oidc import Issuer, IssuerConfig
from shoal_service.control.webhooks import Notifier
from shoal_service.store import Store
from shoal_service.telemetry.tallies import WaitTallies


def test_a_wait_for_storage_is_counted_and_ends_at_its_bound(store: Store) -> None:
    waits, hangs = WaitTallies(), threading.Event()
    storage = JobStorage("", waits)

    async def main() -> None:
        assert await storage.run(lambda: 7, within_s=30.0) == 7
        with pytest.raises(StorageAway, match=r"within 0\.02 s"):
            await storage.run(hangs.wait, within_s=0.02)

    run(main())
    hangs.set()
    storage.close()
    samples = scrape(store, waits=waits)
    assert value_of(samples, "shoal_wait_seconds_count", what="storage") == 2
    assert value_of(samples, "shoal_wait_limit_seconds", what="storage") == 0.02
    assert value_of(samples, "shoal_waits_ended_total", what="storage") == 1


def test_each_kind_of_wait_is_shown_with_its_bound_before_the_first_one(store: Store) -> None:
    waits = WaitTallies()
    clusters, storage = JoinedClusters(store, "here", SystemClock(), lambda: None, waits), JobStorage("", waits)
    Issuer(IssuerConfig(issuer="https://issuer", audience="shoal"), waits=waits)
    Notifier(10.0, waits).close()
    storage.close()
    clusters.close()
    samples = scrape(store, waits=waits)
    for what in (*VERBS, "storage", "issuer", "webhook"):
        assert value_of(samples, "shoal_wait_limit_seconds", what=what) > 0, what
        assert value_of(samples, "shoal_waits_ended_total", what=what) == 0, what


_BARE = {
    ("job_storage.py", "verify"): "a request waits for a reading that goes on without it, and whose view says how far",
    ("planning.py", "answer"): "a process of this machine",
}


def test_the_control_plane_bounds_no_wait_for_another_machine_without_counting_it() -> None:
    """`asyncio.timeout` and `asyncio.wait_for` bound a wait that no metric shows: `WaitTallies.bounded` does both."""
    bare = []
    for path in sorted(Path(control.__file__).parent.rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.AsyncFunctionDef):
                calls = {ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
                if calls & {"asyncio.timeout", "asyncio.wait_for"}:
                    bare.append((path.name, function.name))
    assert sorted(bare) == sorted(_BARE)
