"""The hooks that Shoal brings: one MLflow run or one W&B run for each job, continued by later attempts.

MlflowHook imports mlflow (or mlflow-skinny). MLFLOW_TRACKING_URI says where to, MLFLOW_EXPERIMENT_NAME the experiment
(default: the job's project). The tag `shoal.job_id` finds the run again. WandbHook imports wandb and takes the job's id
as that of the run. WANDB_PROJECT names the project (default: the job's project); WANDB_API_KEY belongs into `secrets`
of the spec. What a run has is read from the tracker itself, so nothing is logged twice. Made by the package's
functions.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from shoal_workers.contract import HookJob

_TAG = "shoal.job_id"
_MOST_AT_ONCE = 1000
"""Metrics in one request; MLflow's own limit."""
_MOST_PARAMETERS = 100
_STATUS = {"succeeded": "FINISHED", "failed": "FAILED", "cancelled": "KILLED", "paused": "SCHEDULED"}


class MlflowHook:
    """A `Hook`."""

    def __init__(self) -> None:
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient()
        self._make_metric = Metric
        self._run_id = ""
        self._waiting: list[Any] = []

    def start(self, job: HookJob) -> dict[str, int]:
        experiment_id = self._experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or job.project)
        runs = self._client.search_runs([experiment_id], filter_string=f"tags.`{_TAG}` = '{job.id}'", max_results=1)
        if not runs:
            self._run_id = self._create(experiment_id, job)
            return {}
        self._run_id = runs[0].info.run_id
        self._client.update_run(self._run_id, status="RUNNING")
        return {name: self._last_step(name) for name in runs[0].data.metrics}

    def log(self, step: int, values: Mapping[str, float], at: float) -> None:
        self._waiting += (self._make_metric(name, value, int(at * 1000), step) for name, value in values.items())

    def flush(self) -> None:
        while self._waiting:
            self._client.log_batch(self._run_id, metrics=self._waiting[:_MOST_AT_ONCE])
            del self._waiting[:_MOST_AT_ONCE]

    def end(self, state: str) -> None:
        self._client.set_terminated(self._run_id, status=_STATUS.get(state, "SCHEDULED"))

    def _experiment(self, name: str) -> str:
        experiment = self._client.get_experiment_by_name(name)
        return str(experiment.experiment_id if experiment is not None else self._client.create_experiment(name))

    def _create(self, experiment_id: str, job: HookJob) -> str:
        from mlflow.entities import Param

        tags = {_TAG: job.id, "shoal.user": job.user, **{f"shoal.label.{k}": v for k, v in job.labels.items()}}
        run = self._client.create_run(experiment_id, run_name=job.name, tags=tags)
        parameters = [Param(name, str(value)[:500]) for name, value in _flat(job.settings)]
        for first in range(0, len(parameters), _MOST_PARAMETERS):
            self._client.log_batch(run.info.run_id, params=parameters[first : first + _MOST_PARAMETERS])
        return str(run.info.run_id)

    def _last_step(self, name: str) -> int:
        return max(metric.step for metric in self._client.get_metric_history(self._run_id, name))


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


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
    """Return the metric that has the last step of this one: a validation is logged after the step that it belongs
    to."""
    return _VAL_STEP if name.startswith("val_") else _STEP
