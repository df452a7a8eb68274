"""How long training pauses when a job is switched to another layout: a real `shoal serve`, four workers, snapshots.

    last step of the old layout      first step of the new one      next step
    ---------------|------------------------------|--------------------|
                   |<---- pause + one step ------>|<--- one step ----->|

The switch is the PATCH of `shoal relayout`; times are those of the step reports. All switches count, the first one to a
layout as well as later ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from measurements.disturbance import steady_step_s
from measurements.stamps import StepEnd
from measurements.trial import Size
from recovery.shoal.run import ShoalRun
from recovery.workload import WORKERS
from shoal_server import ShoalServer
from shoal_service.views import JobPatch
from shoal_workers.contract.layout import ParallelismSpec

LIMIT_S = 1.5
_HEADS = {"num_heads": 8, "num_kv_heads": 4}
"""tp 4 divides these; the example's own numbers are 6 and 3."""
_STEPS_BETWEEN = 8
_CHANGES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("pp2 x tp2", {"pp": 2, "tp": 2}),
    ("fsdp4", {"dp_shard": 4}),
    ("tp4", {"tp": 4}),
    ("pp4", {"pp": 4}),
    ("fsdp2 x tp2", {"tp": 2}),
    ("pp2 x fsdp2", {"pp": 2}),
    ("fsdp4", {"dp_shard": 4}),
    ("pp2 x tp2", {"pp": 2, "tp": 2}),
)


@dataclass(frozen=True, slots=True)
class Change:
    """One switch of the layout."""

    before: str
    after: str
    pause_s: float
    step_s: float
    """Median step of the new layout."""
    steps_lost: int
    is_same_pids: bool
    """Whether no process was replaced."""


def measure_changes(folder: Path, say: Callable[[str], None]) -> list[Change]:
    """Measures the changes. Takes about two minutes on two idle cores."""
    server = ShoalServer(folder, (f"--num-cpus={WORKERS}",))
    changes = []
    try:
        server.start()
        with server.client as client:
            run = ShoalRun(client, Size.SMALL, model=_HEADS, parallelism={"dp_shard": WORKERS})
            run.must(lambda: _num_in_newest_group(run) >= _STEPS_BETWEEN, "steps in the first layout")
            before = "fsdp4"
            for after, degrees in _CHANGES:
                change = _change(run, before, after, degrees)
                say(f"{before} -> {after}: {1000 * change.pause_s:.0f} ms, a step takes {1000 * change.step_s:.0f} ms")
                changes.append(change)
                before = after
            run.cancel()
    finally:
        server.end()
    return changes


def summary(changes: list[Change]) -> dict[str, Any]:
    """Makes the summary that is written as JSON."""
    median_s = statistics.median(change.pause_s for change in changes)
    return {
        "changes": [asdict(change) for change in changes],
        "median_pause_s": median_s,
        "limit_s": LIMIT_S,
        "passed": median_s <= LIMIT_S,
    }


def _change(run: ShoalRun, before: str, after: str, degrees: dict[str, Any]) -> Change:
    group, pids = run.steps()[-1].life, [worker.pid for worker in run.workers()]
    requested_at = run.steps()[-1].at
    run.client.patch(run.id, JobPatch(parallelism=ParallelismSpec(**degrees)))
    run.must(lambda: run.steps()[-1].life != group, f"a step as {after}")
    run.must(lambda: _num_in_newest_group(run) >= _STEPS_BETWEEN, f"steps as {after}")
    steps = run.steps()
    first = next(step for step in steps if step.at > requested_at and step.life != group)
    last = max((step for step in steps if step.at < first.at), key=lambda step: step.at)
    step_s = steady_step_s(steps, first)
    return Change(
        before=before,
        after=after,
        pause_s=first.at - last.at - step_s,
        step_s=step_s,
        steps_lost=max(0, last.step + 1 - first.step),
        is_same_pids=pids == [worker.pid for worker in run.workers()],
    )


def _num_in_newest_group(run: ShoalRun) -> int:
    steps: list[StepEnd] = run.steps()
    return sum(step.life == steps[-1].life for step in steps) if steps else 0
