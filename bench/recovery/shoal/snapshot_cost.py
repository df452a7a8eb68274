"""What snapshots in memory cost without failures: jobs with and without them take turns, one at a time.

Two jobs run without snapshots. The difference between these two is the machine's noise; an overhead below it cannot be
measured. The service's own figures (`snapshot_every_steps`, `snapshot_share`) are emitted with the ratios.
"""

from __future__ import annotations

import statistics
from enum import StrEnum
from itertools import permutations

from measurements.trial import Emit, Event, Size, System, Trial
from recovery.shoal.run import ShoalRun
from recovery.workload import WORKERS
from shoal_server import ShoalServer
from shoal_workers.contract.job import JobState

_TURNS = 6
_STEPS = 16
_WARM_UP_STEPS = 4


class Kind(StrEnum):
    WITH = "with"
    WITHOUT = "without"
    AGAIN = "without, again"


_ORDERS = tuple(permutations(Kind))
"""All orders in turn, so that no kind always runs first."""


def compare_snapshots(server: ShoalServer, params: Size, emit: Emit) -> None:
    with server.client as client:
        runs: dict[Kind, ShoalRun] = {}
        for turn in range(_TURNS):
            step_s: dict[Kind, float] = {}
            share, every = None, None
            for kind in _ORDERS[turn % len(_ORDERS)]:
                if kind in runs:
                    client.resume(runs[kind].id)
                else:
                    enabled = kind is Kind.WITH
                    without_saves = {"every_steps": 100_000}
                    runs[kind] = ShoalRun(client, params, snapshot={"enabled": enabled}, checkpoint=without_saves)
                run = runs[kind]
                step_s[kind] = _train_a_turn(run)
                status = client.job(run.id).status
                if kind is Kind.WITH:
                    share, every = status.snapshot_share, status.snapshot_every_steps
                client.pause(run.id)
                run.must(lambda: client.job(run.id).status.state is JobState.PAUSED, "paused")  # noqa: B023
            emit(
                Trial(
                    System.SHOAL,
                    Event.SNAPSHOT_COST,
                    from_workers=WORKERS,
                    to_workers=WORKERS,
                    step_s=step_s[Kind.WITH],
                    figures={
                        "overhead": round(step_s[Kind.WITH] / step_s[Kind.WITHOUT] - 1, 4),
                        "noise": round(abs(step_s[Kind.AGAIN] / step_s[Kind.WITHOUT] - 1), 4),
                        "step_without_s": round(step_s[Kind.WITHOUT], 4),
                        "reported_share": share,
                        "every_steps": every,
                    },
                )
            )
        for run in runs.values():
            run.cancel()


def _train_a_turn(run: ShoalRun) -> float:
    """Median seconds of a step, once the group has settled."""
    begun = run.client.job(run.id).status.step
    run.must(lambda: run.client.job(run.id).status.step >= begun + _WARM_UP_STEPS + _STEPS, "a turn of steps")
    points = [point for point in run.client.series(run.id, after_step=begun) if point.step > begun + _WARM_UP_STEPS]
    return statistics.median(point.step_s for point in points)
