"""One job of Shoal as the benchmark observes it: steps from the service's series, workers, incidents.

The series overwrites a step that is repeated, so it is read regularly and every reading is kept.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from measurements.disturbance import steady_step_s
from measurements.stamps import StepEnd
from measurements.trial import EventFailed, Size
from recovery.workload import CHECKPOINT_EVERY_STEPS, workload
from shoal_api.client import Client, Disconnected
from shoal_service.views import IncidentView, WorkerView

_STEPS = 1_000_000
"""More than any run reaches: the benchmark cancels the job."""
_LOOK_S = 0.2
_PATIENCE_S = 120.0
_QUIET_STEPS = 8
_OVERLAP_STEPS = 60
"""Steps before the newest known one that are read again. A rollback goes back by at most one checkpoint interval."""


class ShoalRun:
    """`settings` are sections of the spec that override the common workload. The state is sharded, as that of the
    peers."""

    def __init__(self, client: Client, params: Size, **settings: Any) -> None:
        self.client = client
        spec = {**workload(steps=_STEPS, params=params), "parallelism": {"dp_shard": "auto"}}
        for section, values in settings.items():
            spec[section] = spec.get(section, {}) | values if isinstance(values, dict) else values
        self.id = client.submit(spec).id
        self.quiet_step_s: dict[int, float] = {}
        """Median step by world size, without other load such as a new worker that imports torch on the same cores."""
        self._seen: dict[tuple[int, int, float], StepEnd] = {}

    def calibrate(self, *sizes: int) -> None:
        """Measures the step time without other load at each of these sizes. The job keeps the last size."""
        for workers in sizes:
            self.client.scale(self.id, max_workers=workers)
            self.must(lambda: self._is_settled(workers, 0), f"{workers} workers")  # noqa: B023
            begun = self.steps()[-1]
            self.must(lambda: self.steps()[-1].step >= begun.step + _QUIET_STEPS, "quiet steps")  # noqa: B023
            self.quiet_step_s[workers] = steady_step_s(self.steps(), begun)

    def steps(self) -> list[StepEnd]:
        """The end of every step that was ever read, ordered by time."""
        newest = max((step for _, step, _ in self._seen), default=0)
        for point in self.client.series(self.id, after_step=max(-1, newest - _OVERLAP_STEPS)):
            end = StepEnd(point.step, point.at, point.world_size, f"generation {point.generation}")
            self._seen[point.generation, point.step, point.at] = end
        return sorted(self._seen.values(), key=lambda one: one.at)

    def wait(self, condition: Callable[[], Any], what: str, timeout_s: float = _PATIENCE_S) -> bool:
        """Waits for the condition. Returns whether it came true within the time. A service that does not answer is
        polled again."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if condition():
                    return True
                status = self.client.job(self.id).status
                if status.state.ended:
                    raise EventFailed(f"the job ended {status.state} before {what}: {status.message}")
            except Disconnected:
                pass
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_S)

    def must(self, condition: Callable[[], Any], what: str, timeout_s: float = _PATIENCE_S) -> None:
        if not self.wait(condition, what, timeout_s):
            raise EventFailed(f"not within {timeout_s:.0f} s: {what}; {self.client.job(self.id).status}")

    def wait_for_random_moment(self, chance: random.Random, workers: int, standbys: int = 0) -> None:
        """Waits for a random step of the checkpoint cycle and a random point within it, with all workers. The peers do
        the same."""
        self.must(lambda: self._is_settled(workers, standbys), f"{workers} workers and {standbys} standbys")
        target = self.steps()[-1].step + chance.randint(4, 3 + CHECKPOINT_EVERY_STEPS)
        self.must(lambda: self.steps()[-1].step >= target, f"step {target}")
        steps = self.steps()
        time.sleep(chance.random() * steady_step_s(steps, steps[-1]))

    def watch_until(self, at: float) -> None:
        """Watches until this wall-clock time has passed and the steps until then have been read."""

        def is_past() -> bool:
            self.steps()
            return time.time() >= at

        self.wait(is_past, "the end of the window", max(0.0, at - time.time()) + _PATIENCE_S)

    def workers(self) -> list[WorkerView]:
        """The workers of the group, ordered by rank."""
        ranked = [one for one in self.client.workers(self.id) if one.rank is not None]
        return sorted(ranked, key=lambda one: one.rank or 0)

    def standbys(self) -> int:
        return sum(one.rank is None and one.state == "warm" for one in self.client.workers(self.id))

    def incident_after(self, at: float) -> IncidentView | None:
        """The first closed incident that began after `at`, or None."""
        found = [one for one in self.client.incidents(self.id) if one.at > at and one.closed]
        return min(found, key=lambda one: one.at) if found else None

    def cancel(self) -> None:
        self.client.cancel(self.id)
        self.client.wait(self.id, timeout_s=_PATIENCE_S)

    def _is_settled(self, workers: int, standbys: int) -> bool:
        """Whether the group has the requested number of workers and has completed a few steps."""
        steps = self.steps()
        recent = [one for one in steps[-3:] if one.world_size == workers]
        is_one_group = len(recent) == 3 and len({one.life for one in recent}) == 1
        return is_one_group and len(self.workers()) == workers and self.standbys() >= standbys
