"""A job's page for programs with `Accelerator`, through accelerate's own interface for trackers.

    accelerator = Accelerator(log_with=ShoalTracker(total_steps=1000))
    accelerator.init_trackers("run")
    accelerator.log({"loss": loss.item()}, step=step)        becomes the step, the curves and the remaining time

Import of this module also registers the name, where accelerate has names for trackers of others (from 1.14 on):
`Accelerator(log_with="shoal")`. Without Shoal nothing happens.
"""

from __future__ import annotations

from typing import Any

from accelerate import tracking

import shoal
from shoal.names import sorted_out

__all__ = ["ShoalTracker"]


class ShoalTracker(tracking.GeneralTracker):  # type: ignore[misc]
    """Passes on what `Accelerator.log` is given to `shoal.log`.

    Args:
        run_name: what `init_trackers` was given; the job has a name of its own.
        total_steps: the step with which training ends, for the remaining time.
    """

    name = "shoal"
    requires_logging_directory = False

    def __init__(self, run_name: str = "", *, total_steps: int | None = None) -> None:
        super().__init__()
        self._total_steps = total_steps

    @property
    def tracker(self) -> Any:
        """The package that it logs with."""
        return shoal

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        known, others = sorted_out(values)
        shoal.log(step, total_steps=self._total_steps, **known, **others)


if hasattr(tracking, "register_tracker_class"):
    tracking.register_tracker_class(ShoalTracker)
