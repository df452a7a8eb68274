"""No fault of transport, clock, service or supervisor loses an event, or stores one twice: drawn schedules.

`make soak` plays 10,000 of them (bench/soak/schedules.py)."""

from __future__ import annotations

from pathlib import Path
from random import Random

from kit.databases import MigratedDatabases
from kit.worlds.drawn_links import DrawnLink
from shoal_service.store import Store

NUM_SCHEDULES = 10
TURNS = 25


def test_no_drawn_schedule_loses_or_repeats_what_a_supervisor_reports(
    tmp_path: Path, migrated: MigratedDatabases
) -> None:
    url = migrated.sqlite(tmp_path / "shoal.db")
    stores = (Store.open(url), Store.open(url))
    lease = stores[0].acquire_lease("me", ttl_s=1e9, now=0.0)
    assert lease is not None
    failures, faults = {}, set()
    for seed in range(NUM_SCHEDULES):
        link = DrawnLink(stores, lease.epoch, Random(seed))
        try:
            link.play(TURNS)
        except AssertionError as error:
            failures[seed] = error
        faults |= link.faults.keys()
    assert failures == {}
    assert faults >= {"lost", "delayed", "twice", "half_open", "late", "restart", "jump", "away"}
    for store in stores:
        store.close()
