"""Each kind of wait for another machine is on /metrics, with its bound."""

from __future__ import annotations

import threading

import pytest

from doubles.event_loop import run
from kit.scrapes import scrape, value_of
from shoal_service.control.job_storage import JobStorage, StorageAway
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
