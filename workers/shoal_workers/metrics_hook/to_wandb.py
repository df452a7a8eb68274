"""WandbHook: one W&B run for each job, with the job's id as its id, continued by later attempts. Imports wandb.

WANDB_PROJECT names the project (default: the job's project); WANDB_API_KEY belongs into `secrets` of the spec.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from shoal_workers.contract.metrics.messages import HookJob

_STEP, _VAL_STEP = "step", "val_step"


class WandbHook:
    """A `Hook`. The job's step is a metric of its own, and the axis of the others: W&B counts its own steps up by one
    for each call, and a validation comes with the step that it belongs to."""

    def __init__(self) -> None:
        import wandb

        self._wandb = wandb
        self._run: Any = None

    def start(self, job: HookJob) -> dict[str, int]:
        self._run = self._wandb.init(
            id=job.id,
            name=job.name,
            project=os.environ.get("WANDB_PROJECT") or job.project,
            config=dict(job.settings),
            tags=[f"{name}={value}"[:64] for name, value in job.labels.items()],
            resume="allow",
        )
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)
        summary = dict(self._run.summary)
        return {name: int(last) for name in summary if (last := summary.get(_axis(name))) is not None}

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        self._run.log({**values, _STEP: step, **{_axis(name): step for name in values}})

    def end(self, state: str) -> None:
        self._run.summary["state"] = state
        self._run.finish(exit_code=int(state == "failed"))


def _axis(name: str) -> str:
    """The metric that has the last step of this one: a validation is logged after the step that it belongs to."""
    return _VAL_STEP if name.startswith("val_") else _STEP
