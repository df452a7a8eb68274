"""What system metrics cost: the training thread, the worker's control thread, and the database.

    python bench/system_metrics.py [--ranks 1024] [--samples 600] [--database URL]

    booking_us    microseconds that a change of phase takes longer because its time is booked (training thread)
    measure_ms    milliseconds of one measurement, which a worker makes every 5 s on a thread of its own
    add_ms        milliseconds in which the store takes one sample of all ranks and rolls up
    add_cpu_ms    the same in CPU time of this process, which other programs on the machine do not change
    read_ms       milliseconds in which it reads one metric of all ranks over the whole time
    row_bytes     bytes of one sample of all ranks and metrics; a job has at most `max_rows` of them

The last line is JSON. Times are medians, except of `add`, which are means because every fourth sample is rolled up. The
database is SQLite, or an empty one of PostgreSQL that `--database` names.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable

from sqlalchemy import func, select

from shoal_service.core.system_metrics import LEVELS, MAX_BUCKETS, SystemMetric, SystemSample
from shoal_service.store import Store, submissions, system_samples
from shoal_service.store.database import system_samples as table
from shoal_service.store.records import read_job_num
from shoal_workers.contract.messages import Phase
from shoal_workers.contract.spec import JobSpec
from shoal_workers.engine.group.collectives import waited_s
from shoal_workers.engine.process.position import Position
from shoal_workers.engine.process.use_meter import UseMeter

_CHANGES = 20_000
_TURNS = 15


class _NotBooking(Position):
    def _book(self, ended: Phase) -> None:
        del ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=600)
    parser.add_argument("--database", default="", help="postgresql+psycopg://user@host/database, empty")
    arguments = parser.parse_args()
    plain, booking = [], []
    for _ in range(_TURNS):  # by turns, so that noise of the machine reaches both
        plain.append(_change_s(_NotBooking(waited_s=waited_s)))
        booking.append(_change_s(Position(waited_s=waited_s)))
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        meter = UseMeter(folder, has_gpu=False)
        measure = [_seconds(meter.measure) for _ in range(50)]
        database = arguments.database or f"sqlite:///{folder}/shoal.db"
        stored = _stored(database, arguments.ranks, arguments.samples)
    result = {
        "booking_us": round(1e6 * (statistics.median(booking) - statistics.median(plain)), 3),
        "measure_ms": round(1e3 * statistics.median(measure), 3),
        "ranks": arguments.ranks,
        **stored,
        "max_rows": len(LEVELS) * MAX_BUCKETS,
    }
    print(json.dumps(result))


def _change_s(position: Position) -> float:
    start = time.perf_counter()
    for _ in range(_CHANGES // 2):
        position.enter(Phase.FORWARD)
        position.enter(Phase.BACKWARD)
    return (time.perf_counter() - start) / _CHANGES


def _stored(database: str, num_ranks: int, num_samples: int) -> dict[str, float]:
    draw = random.Random(0)
    store = Store.open(database)
    spec = JobSpec.model_validate({"task": "m:T", "data": {"paths": ["a"]}, "stop": {"steps": 12}})
    job = store.writing(submissions.create)(spec, idempotency_key=None, now=1.0)[0]
    took, cpu = [], []
    with store.read() as tx:
        job_num = read_job_num(tx, job.id)
    for number in range(num_samples):
        values = {metric.value: tuple(draw.random() for _ in range(num_ranks)) for metric in SystemMetric}
        sample = SystemSample(at=1e6 + 10.0 * number, generation=1, values=values)
        start, cpu_start = time.perf_counter(), time.thread_time()
        with store.write() as tx:
            system_samples.add(tx, job_num, [sample])
        took.append(time.perf_counter() - start)
        cpu.append(time.thread_time() - cpu_start)
    read = _seconds(lambda: store.reading(system_samples.read)(job.id, SystemMetric.BUSY))
    with store.read() as tx:
        size = tx.execute(select(func.avg(func.length(table.c.data)))).scalar_one()
    return {
        "add_ms": round(1e3 * statistics.fmean(took), 2),
        "add_cpu_ms": round(1e3 * statistics.fmean(cpu), 2),
        "read_ms": round(1e3 * read, 1),
        "row_bytes": round(float(size)),
    }


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
