"""Metrics hooks: forward what a job measures to MLflow, W&B or anything else (`metrics.hook` of the spec).

    supervisor --batch--> worker (process.py) ==pipe==> child process (program.py) --calls--> hook

The hook is user code. It runs in a child of one of the job's workers, with their environment and rights, and at lower
priority. What it raises, and how long it takes, never reaches the training. docs/metrics-hook.md explains it to users.
This module names the hooks that Shoal brings; they import mlflow and wandb only when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal_workers.metrics_hook.program import Hook


def mlflow() -> Hook:
    """`metrics.hook: shoal_workers.metrics_hook:mlflow`; MLFLOW_TRACKING_URI says where to."""
    from shoal_workers.metrics_hook.trackers import MlflowHook

    return MlflowHook()


def wandb() -> Hook:
    """`metrics.hook: shoal_workers.metrics_hook:wandb`; WANDB_API_KEY is a secret of the job."""
    from shoal_workers.metrics_hook.trackers import WandbHook

    return WandbHook()
