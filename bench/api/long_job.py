"""A job of 26 million steps in SQLite (30 days of 10 steps a second): list, page, parts of the curve, scrape, size.

    python bench/api/long_job.py [--sizes 1000000,10000000,26000000] [--out long-job.json]

SQL writes the steps and their roll-ups, 262,144 at a time, since the service would take an hour of CPU for them; the
shipped store thins them a few chunks in each transaction, as it does when reports arrive. A validation each 1,000
steps, a new group each 50,000. At the end real reports of 100 steps are stored, and the reads go through the HTTP edge
in a process of its own; all of this at each size. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "tools"))
sys.path.append(str(Path(__file__).parents[2] / "tests"))
sys.path.append(str(Path(__file__).parents[1]))

from sqlalchemy import func, select, text

from api.reads import Attempt, Edge, fetch, first_answer, http_edge, point, times
from measurements.machine import describe
from shoal_service.core.downsampling import CHUNK, KEPT_STEPS
from shoal_service.core.events.training import Validated
from shoal_service.reports import PendingEvent
from shoal_service.store import Store
from shoal_service.store.curves import FACTOR, WIDTHS, thin_steps
from shoal_service.store.database import Transaction, jobs, series, series_rollups
from shoal_service.store.records import read_job_num

_AT_ONCE = 2**18
_REPORTS = 300
_READS = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1000000,10000000,26000000", help="steps at which is measured")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.sizes.split(",")]
    with tempfile.TemporaryDirectory(prefix="shoal-long-job-") as folder:
        result = {"machine": describe(), "sizes": list(measure(Path(folder), sizes))}
    print(json.dumps(result))
    if arguments.out:
        arguments.out.write_text(json.dumps(result))


def measure(folder: Path, sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    url = f"sqlite:///{folder}/shoal.db"
    store = Store.open(url)
    job = Attempt(store, "long", stop={"steps": 2 * max(sizes)})
    num, last = store.reading(read_job_num)(job.id), 0
    for size in sizes:
        thin_s: list[float] = []
        while last < size // CHUNK * CHUNK:
            first, last = last + 1, min(last + _AT_ONCE, size // CHUNK * CHUNK)
            store.writing(_fill)(num, first, last)
            thin_s += _thin(store, num, first, last)
        result: dict[str, Any] = {"steps": last, "rows": store.reading(_count_rows)(num), **times("thin", thin_s)}
        report_s = [_timed(partial(job.report, **_parts(last + 1 + 100 * n))) for n in range(_REPORTS)]
        result |= {"megabytes": round(_megabytes(folder), 1), **times("report", report_s)}
        with http_edge(store, url) as edge:
            for name, read in _reads(edge, job.id, last).items():
                read_s = []
                for _ in range(_READS):
                    job.report(step=last + 100 * _REPORTS)  # a change, so that no answer is kept from the read before
                    read_s.append(_timed(read))
                result |= times(name, read_s)
        print(json.dumps(result), flush=True)
        yield result
    store.close()


def _thin(store: Store, num: int, first: int, last: int) -> Iterator[float]:
    """Thins as far as it goes, and yields the seconds of each transaction."""
    thinned = -1
    while thinned != (thinned := store.reading(_thinned_until)(num)):
        thin = partial(store.writing(thin_steps), num, first_step=first, last_step=last, kept_steps=KEPT_STEPS)
        yield _timed(thin)


def _timed(call: Callable[[], object]) -> float:
    begun_mono = time.monotonic()
    call()
    return time.monotonic() - begun_mono


def _fill(tx: Transaction, num: int, first: int, last: int) -> None:
    """Writes steps and the roll-ups that they complete."""
    tx.execute(text(_STEPS), {"num": num, "first": first, "last": last, "metrics": _METRICS})
    for width in WIDTHS:
        below = "series WHERE" if width == FACTOR else f"series_rollups WHERE width = {width // FACTOR} AND"
        bounds = {"num": num, "width": width, "after": first - 1, "last": last // width * width}
        tx.execute(text(_ROLLED.format(below=below)), bounds)


_METRICS = '{"accuracy":0.5,"perplexity":7.25}'
_STEPS = """
WITH RECURSIVE n(step) AS (SELECT :first UNION ALL SELECT step + 1 FROM n WHERE step < :last)
INSERT OR REPLACE INTO series SELECT :num, step, 1e9 + step / 10.0,
    2 + (step % 97) / 1000.0 + (step * 7919 % 1009) / 1e6, 1 + (step % 31) / 100.0, 1e-3,
    1e5 + step % 1013, 0.1 + (step % 11) / 1000.0, 4 - (step / 50000) % 2,
    1 + step / 50000, CASE WHEN step % 1000 = 0 THEN 2.1 END,
    :metrics, NULL FROM n
"""
_ROLLED = """
INSERT OR REPLACE INTO series_rollups SELECT :num, :width, (step - 1) / :width, max(step), max(at), avg(loss),
    avg(grad_norm), avg(lr), avg(tokens_per_s), avg(step_s), max(world_size), max(generation), avg(val_loss),
    max(metrics), NULL FROM {below} job_num = :num AND step > :after AND step <= :last GROUP BY (step - 1) / :width
"""


def _thinned_until(tx: Transaction, num: int) -> int:
    return int(tx.execute(select(jobs.c.thinned_until).where(jobs.c.num == num)).scalar_one())


def _count_rows(tx: Transaction, num: int) -> int:
    tables = (series, series_rollups)
    return sum(tx.execute(select(func.count()).where(table.c.job_num == num)).scalar_one() for table in tables)


def _reads(edge: Edge, job_id: str, steps: int) -> dict[str, Callable[[], object]]:
    """The reads by their names; a part of the curve is a thousandth of it."""
    part = steps // 1000
    old = f"after_step={steps // 10}&until_step={steps // 10 + part}"
    new = f"after_step={steps - part}"
    return {
        "list": lambda: fetch(edge, "/v1/jobs"),
        "condition": lambda: fetch(edge, "/v1/jobs?where=max(loss)%20%3E%203"),
        "curves": lambda: fetch(edge, "/v1/curves?metric=loss"),
        "page": lambda: first_answer(edge, f"/v1/jobs/{job_id}/overview?logs=true"),
        "curve": lambda: fetch(edge, f"/v1/jobs/{job_id}/series"),
        "old_part": lambda: fetch(edge, f"/v1/jobs/{job_id}/series?{old}"),
        "new_part": lambda: fetch(edge, f"/v1/jobs/{job_id}/series?{new}"),
        "scrape": lambda: fetch(edge, "/metrics", accept="application/openmetrics-text;version=1.0.0"),
    }


def _parts(first: int) -> dict[str, Any]:
    validated = PendingEvent.of(Validated(step=first, loss=2.1, bits_per_byte=None), 1e9 + first / 10)
    return {
        "step": first + 99,
        "series": tuple(point(step) for step in range(first, first + 100)),
        "events": (validated,) * 100,
    }


def _megabytes(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.iterdir()) / 1e6


if __name__ == "__main__":
    main()
