"""Samples of a job's accounts, and the cluster's goodput by ten minutes. Written by `edit.save_all`.

The cluster's goodput is a running sum: each sample adds what its job has booked since its sample before. So it costs
nothing to read, with any number of jobs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import Connection, func, select

from shoal_service.core.downsampling import BIN_S, bin_of
from shoal_service.core.goodput import Category
from shoal_service.fleet_views import ClusterGoodput
from shoal_service.store.database import insert, upsert
from shoal_service.store.tables import fleet_goodput, job_samples, job_specs
from shoal_service.views import JobStatus, SampleColumns
from shoal_workers.contract.job import JobState

_MAX_SAMPLES = 250
"""Samples that a document has at most; the others are left out evenly, but no change of state or world size is."""
_DAY_S = 86_400.0


class Booked(NamedTuple):
    """Worker-seconds of a job."""

    productive: float
    total: float


@dataclass(frozen=True, slots=True)
class Sample:
    row: dict[str, Any]
    booked: Booked
    before: Booked
    """What was booked at the job's sample before."""


def take(job_num: int, *, state: JobState, granted: int, status: JobStatus, before: Booked, now: float) -> Sample:
    goodput = status.goodput
    seconds = goodput.seconds if goodput is not None else {}
    shown = {name.value: round(amount, 3) for name, amount in seconds.items() if amount}
    row = {
        "job_num": job_num,
        "at": now,
        "state": state.value,
        "step": status.step,
        "granted": granted,
        "workers": status.workers,
        "seconds": json.dumps(shown, separators=(",", ":")),
    }
    total = goodput.total if goodput is not None else 0.0
    return Sample(row, Booked(seconds.get(Category.PRODUCTIVE, 0.0), total), before)


def store(connection: Connection, taken: Sequence[Sample]) -> None:
    """Stores samples of different jobs. A sample replaces that of the same job at the same time."""
    upsert(connection, job_samples, [one.row for one in taken])
    added: dict[float, Booked] = {}
    for one in taken:
        if one.booked.total > one.before.total:
            bin_at = bin_of(one.row["at"])
            sums = added.get(bin_at, Booked(0.0, 0.0))
            added[bin_at] = Booked(
                sums.productive + one.booked.productive - one.before.productive,
                sums.total + one.booked.total - one.before.total,
            )
    for bin_at, more in added.items():
        statement = insert(connection, fleet_goodput).values(bin_at=bin_at, **more._asdict())
        connection.execute(
            statement.on_conflict_do_update(
                index_elements=["bin_at"],
                set_={
                    "productive": fleet_goodput.c.productive + statement.excluded.productive,
                    "total": fleet_goodput.c.total + statement.excluded.total,
                },
            )
        )


def cluster_goodput(connection: Connection) -> tuple[ClusterGoodput, ...]:
    """Goodput in the 24 hours before the newest sample."""
    newest = select(func.max(fleet_goodput.c.bin_at)).scalar_subquery()
    query = (
        select(fleet_goodput)
        .where(fleet_goodput.c.bin_at > newest - _DAY_S + BIN_S / 2)
        .order_by(fleet_goodput.c.bin_at)
    )
    return tuple(
        ClusterGoodput(at=row.bin_at, productive=row.productive, total=row.total) for row in connection.execute(query)
    )


def read(connection: Connection, job_num: int, *, after: float = 0.0) -> SampleColumns:
    """The samples after a time, oldest first."""
    query = select(job_samples).where(job_samples.c.job_num == job_num, job_samples.c.at > after)
    rows = _thinned(list(connection.execute(query.order_by(job_samples.c.at))))
    wanted = _wanted(connection, job_num)
    documents = [json.loads(row.seconds) for row in rows]
    present = [category for category in Category if any(category.value in document for document in documents)]
    return SampleColumns(
        at=tuple(round(row.at, 2) for row in rows),
        step=tuple(row.step for row in rows),
        state=tuple(JobState(row.state) for row in rows),
        wanted=tuple(_at(wanted, row.at) for row in rows),
        granted=tuple(row.granted for row in rows),
        workers=tuple(row.workers for row in rows),
        seconds={
            category: tuple(round(document.get(category.value, 0.0), 1) for document in documents)
            for category in present
        },
    )


def _thinned(rows: list[Any]) -> list[Any]:
    if len(rows) <= _MAX_SAMPLES:
        return rows
    every = -(-len(rows) // _MAX_SAMPLES)
    kept = []
    for index, row in enumerate(rows):
        before = rows[index - 1] if index else None
        changed = before is None or (row.state, row.granted, row.workers) != (
            before.state,
            before.granted,
            before.workers,
        )
        if changed or index % every == 0 or index == len(rows) - 1:
            kept.append(row)
    return kept[-4 * _MAX_SAMPLES :]


def _wanted(connection: Connection, job_num: int) -> list[tuple[float, int]]:
    """Since when which `elasticity.max_workers` has been in force."""
    query = (
        select(job_specs.c.accepted_at, job_specs.c.document)
        .where(job_specs.c.job_num == job_num)
        .order_by(job_specs.c.version)
    )
    return [
        (row.accepted_at, int(json.loads(row.document).get("elasticity", {}).get("max_workers", 1)))
        for row in connection.execute(query)
    ]


def _at(wanted: list[tuple[float, int]], at: float) -> int:
    """If the wall clock was set back, the first version holds."""
    return next((number for since, number in reversed(wanted) if since <= at), wanted[0][1])
