"""Drawn schedules of faults between a supervisor and the service: nothing is lost, and nothing is stored twice.

    python bench/soak/schedules.py [--num 10000] [--seed 1] [--turns 40]

Transport, clock, service and supervisor fail as tests/kit/worlds/drawn_links.py draws it. The seed of each schedule
that fails is printed; `--seed N --num 1` plays it again. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from kit.worlds.drawn_links import DrawnLink
from shoal_service.store import Store

_SCHEDULES_OF_DATABASE = 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--turns", type=int, default=40)
    arguments = parser.parse_args()
    began_mono, failed, faults = time.monotonic(), 0, Counter[str]()
    seeds = range(arguments.seed, arguments.seed + arguments.num)
    for first in range(0, len(seeds), _SCHEDULES_OF_DATABASE):
        failed += _play(seeds[first : first + _SCHEDULES_OF_DATABASE], arguments.turns, faults)
    print(
        json.dumps(
            {
                "schedules": arguments.num,
                "failed": failed,
                "faults": dict(sorted(faults.items())),
                "seconds": round(time.monotonic() - began_mono, 1),
            }
        )
    )
    sys.exit(bool(failed))


def _play(seeds: range, turns: int, faults: Counter[str]) -> int:
    """Plays some schedules on one new database. Returns how many have failed."""
    failed = 0
    with tempfile.TemporaryDirectory(prefix="shoal-schedules-") as folder:
        stores = [Store.open(f"sqlite:///{folder}/shoal.db") for _ in range(2)]
        lease = stores[0].acquire_lease("soak", ttl_s=1e9, now=0.0)
        assert lease is not None
        for seed in seeds:
            link = DrawnLink((stores[0], stores[1]), lease.epoch, Random(seed))
            try:
                link.play(turns)
            except AssertionError as error:
                failed += 1
                print(f"seed {seed}: {error!r} after {link.faults}", flush=True)
            faults.update({name: number for name, number in link.faults.items() if name})
        for store in stores:
            store.close()
    return failed


if __name__ == "__main__":
    main()
