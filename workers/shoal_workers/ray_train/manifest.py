"""The list of a run's checkpoints: which exist, which are kept, and what each was reported with. Pure.

Its file is the one that Ray Train V2 keeps in the directory of a run, so `ray.train.Result.from_path` reads a run of
Shoal's, and Ray Train and Shoal go on with each other's runs. A checkpoint exists once it is in the list.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Kept:
    """One checkpoint."""

    name: str
    """Name of its directory, in that of the run."""
    metrics: Mapping[str, Any]
    index: int
    """Number of reports before it, since the run began."""


@dataclass(frozen=True, slots=True)
class Retention:
    """What `ray.train.CheckpointConfig` says."""

    num_to_keep: int | None = None
    attribute: str | None = None
    order: str = "max"


@dataclass(frozen=True, slots=True)
class Manifest:
    """The worst checkpoint first, or the oldest if they have no score."""

    kept: tuple[Kept, ...] = ()
    latest: str | None = None
    next_index: int = 0

    @property
    def newest(self) -> Kept | None:
        return next((checkpoint for checkpoint in self.kept if checkpoint.name == self.latest), None)

    def with_report(
        self, retention: Retention, name: str | None, metrics: Mapping[str, Any]
    ) -> tuple[Manifest, list[str]]:
        """The list after a report, and the names of checkpoints that are kept no longer. `name`: None without a
        checkpoint.

        The newest is kept whatever its score, as in Ray Train: training goes on from it.
        """
        later = replace(self, next_index=self.next_index + 1)
        if name is None:
            return later, []
        others = [checkpoint for checkpoint in self.kept if checkpoint.name != name]
        added = Kept(name, metrics, self.next_index)
        ordered = sorted([*others, added], key=lambda checkpoint: (_score(checkpoint, retention), checkpoint.index))
        too_many = len(ordered) - (retention.num_to_keep or len(ordered))
        dropped = [checkpoint.name for checkpoint in ordered[: max(0, too_many)] if checkpoint.name != name]
        kept = tuple(checkpoint for checkpoint in ordered if checkpoint.name not in dropped)
        return replace(later, kept=kept, latest=name), dropped

    def to_text(self, ray_version: str) -> str:
        results = {
            checkpoint.name: {"version": 0, "checkpoint_dir_name": checkpoint.name, "metrics": checkpoint.metrics}
            for checkpoint in self.kept
        }
        document = {
            "ray_version": ray_version,
            "checkpoint_results": [*results.values()],
            "checkpoint_report_indices": [checkpoint.index for checkpoint in self.kept],
            "latest_checkpoint_result": results.get(self.latest or ""),
            "pending_training_results": [],
            "pending_validation_specs": [],
            "current_report_index": self.next_index,
            "validated_checkpoint_dir_names": [],
            "timed_out_validation_checkpoint_dir_names": [],
            "failed_validation_checkpoint_dir_names": [],
        }
        return json.dumps(document, default=plain)

    @staticmethod
    def from_text(text: str) -> Manifest:
        document = json.loads(text)
        results = document["checkpoint_results"]
        indices = document.get("checkpoint_report_indices") or range(len(results))
        latest = document.get("latest_checkpoint_result") or {}
        return Manifest(
            tuple(
                Kept(result["checkpoint_dir_name"], result["metrics"], index)
                for result, index in zip(results, indices, strict=True)
            ),
            latest.get("checkpoint_dir_name"),
            document.get("current_report_index", len(results)),
        )


def _score(checkpoint: Kept, retention: Retention) -> tuple[bool, float]:
    """What is no number, or missing, is worse than any number."""
    if retention.attribute is None:
        return True, 0.0
    value: Any = checkpoint.metrics
    for part in [retention.attribute] if retention.attribute in checkpoint.metrics else retention.attribute.split("/"):
        value = value.get(part) if isinstance(value, Mapping) else None
    if not isinstance(value, (int, float)) or math.isnan(value):
        return False, 0.0
    return True, float(value) if retention.order == "max" else -float(value)


def plain(value: Any) -> Any:
    """A value of a metric that JSON has no form for: numpy's numbers, and arrays; else its text."""
    convert = getattr(value, "tolist", None)
    return convert() if callable(convert) else str(value)
