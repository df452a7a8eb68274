"""The contract between Shoal and a metrics hook, and what keeps a step from being logged twice.

A hook is a plain object that imports nothing from Shoal. Called by __main__.py, in the hook's own process.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Protocol

from shoal_workers.contract.metrics.messages import HookJob, MetricPoint


class Hook(Protocol):
    """What `metrics.hook` makes. Calls come one after the other, on the main thread of a process of its own.

    Optional member:

        flush() -> None
            After some calls of `log`. When it returns, what was logged before must be safe with the tracker.
    """

    def start(self, job: HookJob) -> Mapping[str, int] | None:
        """Open the job's run, or go on with it after a restart.

        Returns the last step that the tracker has of each metric; values of these steps and before are not logged
        again. None or {}: it has nothing.
        """
        ...

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        """New values of one step, which ended at `at` (seconds since the epoch). Steps do not go down."""
        ...

    def end(self, state: str) -> None:
        """The attempt is over: "succeeded", "failed", "cancelled", "paused" or "queued". After the last two, and often
        after "failed", `start` is called again later, maybe on another machine."""
        ...


def load_hook(path: str) -> Hook:
    """Makes the hook that `module:Name` names."""
    module, _, name = path.partition(":")
    hook: Hook = getattr(importlib.import_module(module), name)()
    return hook


class NewValues:
    """Drops what was logged before: a recovery repeats steps, and a new process gets points that its predecessor may
    have logged."""

    def __init__(self, last_steps: Mapping[str, int] | None) -> None:
        """`last_steps`: what `Hook.start` has returned."""
        self._last_steps = dict(last_steps or {})

    def of(self, point: MetricPoint) -> dict[str, float]:
        """The values that are not logged yet. They count as logged from now on."""
        new = {name: value for name, value in point.values.items() if point.step > self._last_steps.get(name, -1)}
        self._last_steps.update(dict.fromkeys(new, point.step))
        return new
