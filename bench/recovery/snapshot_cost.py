"""What snapshots in memory cost while nothing goes wrong: two jobs, with and without, that take turns.

One is paused while the other trains: a noisy machine is noisy for both, and they never compete. The service's own
figures (`snapshot_every_steps`, `snapshot_share`) stand beside the ratio.
"""

from __future__ import annotations

import statistics

from recovery.shoal_run import ShoalRun
from recovery.shoal_server import ShoalServer
from recovery.trial import Emit, Event, System, Trial
from recovery.workload import WORKERS
from shoal_workers.contract.job import JobState

_TURNS = 5
_STEPS = 16
_WARM_UP_STEPS = 4


def compare_snapshots(server: ShoalServer, emit: Emit) -> None:
    with server.client as client:
        runs: dict[bool, ShoalRun] = {}
        for _ in range(_TURNS):
            step_s: dict[bool, float] = {}
            for enabled in (True, False):
                if enabled not in runs:
                    runs[enabled] = ShoalRun(client, snapshot={"enabled": enabled}, checkpoint={"every_steps": 100_000})
                else:
                    client.resume(runs[enabled].id)
                step_s[enabled] = _train_a_turn(runs[enabled])
                status = client.job(runs[enabled].id).status
                if enabled:
                    share, every = status.snapshot_share, status.snapshot_every_steps
                client.pause(runs[enabled].id)
                runs[enabled].must(lambda: client.job(runs[enabled].id).status.state is JobState.PAUSED, "paused")  # noqa: B023
            overhead = step_s[True] / step_s[False] - 1
            emit(
                Trial(
                    System.SHOAL,
                    Event.SNAPSHOT_COST,
                    from_workers=WORKERS,
                    to_workers=WORKERS,
                    step_s=step_s[True],
                    figures={
                        "overhead": round(overhead, 4),
                        "step_without_s": round(step_s[False], 4),
                        "said_share": share,
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
