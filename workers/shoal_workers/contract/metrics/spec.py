"""MetricsSpec: the user's hook that gets the metrics of a job. See docs/metrics-hook.md."""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from shoal_workers.contract.base import Frozen

_HOOK = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class MetricsSpec(Frozen):
    """Where the job's metrics go besides the service."""

    hook: str | None = Field(None, max_length=255)
    """`module:Name` of a class or function, in the job's code or installed on the nodes, that makes a hook:
    `shoal_workers.metrics_hook:mlflow`, `shoal_workers.metrics_hook:wandb`, or your own (docs/metrics-hook.md). It runs
    in a process of its own beside the workers. null: none."""

    @field_validator("hook")
    @classmethod
    def _is_a_path(cls, hook: str | None) -> str | None:
        if hook is not None and not _HOOK.fullmatch(hook):
            raise ValueError(
                f'metrics.hook {hook!r} must have the form "module:Name", for example '
                '"shoal_workers.metrics_hook:mlflow".'
            )
        return hook
