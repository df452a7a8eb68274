"""A job's page for programs with Lightning's `Trainer`, through its interface for loggers.

    Trainer(..., logger=ShoalLogger(total_steps=1000))

What `self.log` is given becomes the step, the curves and the remaining time, every `log_every_n_steps`. Without Shoal
nothing happens. Both names of the library are served: `lightning` and `pytorch_lightning`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import shoal
from shoal.names import sorted_out

if TYPE_CHECKING or "pytorch_lightning" not in sys.modules or "lightning" in sys.modules:
    from lightning.pytorch.loggers.logger import Logger
else:
    from pytorch_lightning.loggers.logger import Logger

__all__ = ["ShoalLogger"]


class ShoalLogger(Logger):  # type: ignore[misc]
    """Passes on what the Trainer logs to `shoal.log`.

    Args:
        total_steps: the step with which training ends, for the remaining time; a logger of Lightning does not know it.
    """

    def __init__(self, *, total_steps: int | None = None) -> None:
        super().__init__()
        self._total_steps = total_steps

    @property
    def name(self) -> str:
        return "shoal"

    @property
    def version(self) -> str:
        return ""

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Lightning counts steps from 0: what it logs with step 49 is of the 50th, which is then complete."""
        known, others = sorted_out(metrics)
        completed = None if step is None else step + 1
        shoal.log(completed, total_steps=self._total_steps, **known, **others)

    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        """Does nothing: the job's spec has the arguments of the program."""
