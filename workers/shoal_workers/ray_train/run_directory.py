"""The directory of a run: its checkpoints, the list of them, and how far its datasets were read at each.

    DIRECTORY/checkpoint_000012-g2/       files of all ranks; report 12 of the run, made by group 2
    DIRECTORY/checkpoint_manager_snapshot.json   Ray Train's list; a checkpoint that is not in it does not exist
    DIRECTORY/shoal_positions.json        by checkpoint: the rows of each dataset that were read before it

Every rank copies its files; when all have, rank 0 writes the list, and then deletes what is kept no longer. So a
checkpoint is complete or absent, whenever a process dies. What a group has left unfinished, the next one deletes.

The list says which checkpoints exist, which are kept, and what each was reported with. Its file is the one that Ray
Train V2 keeps in the directory of a run, so `ray.train.Result.from_path` reads a run of Shoal's, and Ray Train and
Shoal go on with each other's runs.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.fs as arrow
from ray.train import Checkpoint

from shoal_workers.checkpoint.storage import open_directory
from shoal_workers.descriptors import sync_path
from shoal_workers.ray_internals import TRAIN_MARKER, TRAIN_SNAPSHOT
from shoal_workers.ray_train.shards import Ranges

_POSITIONS = "shoal_positions.json"
_UNFINISHED = re.compile(r"checkpoint_\d{6}-g\d+")


class RunDirectory:
    """One run. `path` is a directory of `filesystem`."""

    def __init__(self, filesystem: arrow.FileSystem, path: str) -> None:
        self.filesystem = filesystem
        self.path = path.rstrip("/")

    @staticmethod
    def at(storage_path: str, name: str, filesystem: arrow.FileSystem | None = None) -> RunDirectory:
        """As `RunConfig(storage_path, name, storage_filesystem)` names it."""
        if filesystem is not None:
            return RunDirectory(filesystem, f"{storage_path.rstrip('/')}/{name}")
        if "://" not in storage_path:
            storage_path = str(Path(storage_path).expanduser().absolute())
        file_system, path = arrow.FileSystem.from_uri(storage_path)
        return RunDirectory(file_system, f"{path.rstrip('/')}/{name}")

    def open(self) -> tuple[Manifest, dict[str, dict[str, Ranges]]]:
        """Rank 0, before the others: make the directory, delete unfinished checkpoints, and return what is there."""
        self.filesystem.create_dir(self.path, recursive=True)
        self._write(TRAIN_MARKER, "")
        text = self._read(TRAIN_SNAPSHOT)
        manifest = Manifest() if text is None else Manifest.from_text(text)
        positions = json.loads(self._read(_POSITIONS) or "{}")
        complete = {checkpoint.name for checkpoint in manifest.kept}
        for info in self.filesystem.get_file_info(arrow.FileSelector(self.path)):
            if info.base_name not in complete and _UNFINISHED.fullmatch(info.base_name):
                self.filesystem.delete_dir(info.path)
        return manifest, positions

    def require(self) -> None:
        """Other ranks, after rank 0 has opened it. Raises RuntimeError: this node sees another directory."""
        if not self._exists(TRAIN_MARKER):
            raise RuntimeError(
                f"RunConfig.storage_path: {self.path} is another directory on this node than on that of rank 0. Name "
                "a place that every node can write, or leave it out: Shoal then takes the job's checkpoint "
                "directory."
            )

    def checkpoint(self, name: str) -> Checkpoint:
        return Checkpoint(f"{self.path}/{name}", filesystem=self.filesystem)

    def name_of(self, checkpoint: Checkpoint) -> str | None:
        """Return the name of a checkpoint that lies in this directory already; None if it does not."""
        inside = checkpoint.path.rstrip("/").removeprefix(f"{self.path}/")
        same = checkpoint.filesystem.equals(self.filesystem)
        return inside if same and inside != checkpoint.path.rstrip("/") and inside else None

    def upload(self, checkpoint: Checkpoint, name: str) -> None:
        """Copy the files of this rank. Files of the same name, of several ranks, replace each other, as in Ray
        Train."""
        if checkpoint.filesystem.get_file_info(checkpoint.path).type is arrow.FileType.NotFound:
            raise FileNotFoundError(
                f"the checkpoint {checkpoint.path} is not there. Report it before its temporary directory is deleted."
            )
        target = f"{self.path}/{name}"
        self.filesystem.create_dir(target, recursive=True)
        arrow.copy_files(
            checkpoint.path,
            target,
            source_filesystem=checkpoint.filesystem,
            destination_filesystem=self.filesystem,
            use_threads=not isinstance(self.filesystem, arrow.S3FileSystem),  # uploads of pyarrow to S3 may stand still
        )
        self._flush(target)

    def commit(
        self, manifest: Manifest, positions: dict[str, dict[str, Ranges]], dropped: list[str], version: str
    ) -> None:
        """Rank 0, once every rank has copied its files."""
        self._write(_POSITIONS, json.dumps(positions))
        self._write(TRAIN_SNAPSHOT, manifest.to_text(version))
        for name in dropped:
            self.filesystem.delete_dir(f"{self.path}/{name}")

    def _exists(self, name: str) -> bool:
        return bool(self.filesystem.get_file_info(f"{self.path}/{name}").type is not arrow.FileType.NotFound)

    def _read(self, name: str) -> str | None:
        if not self._exists(name):
            return None
        with self.filesystem.open_input_stream(f"{self.path}/{name}") as file:
            return bytes(file.read()).decode()

    def _write(self, name: str, text: str) -> None:
        """All of it or nothing: an object store writes whole objects, and in a directory the file is renamed."""
        if isinstance(self.filesystem, arrow.LocalFileSystem):
            open_directory(self.path).write(name, [text.encode()])
            return
        with self.filesystem.open_output_stream(f"{self.path}/{name}") as file:
            file.write(text.encode())

    def _flush(self, folder: str) -> None:
        """The files of a checkpoint reach the disk before the list that names them."""
        if isinstance(self.filesystem, arrow.LocalFileSystem):
            for parent, _, names in os.walk(folder):
                for name in names:
                    sync_path(Path(parent, name))
                sync_path(Path(parent))


class Runs:
    """Which directory the n-th `fit()` of the job's script has. The first group decides, and later ones find it again:
    a name with the date or a random part is then still one run.

    Args:
        checkpoint_dir: the job's own, a path or a URL.
    """

    def __init__(self, checkpoint_dir: str) -> None:
        self._own = RunDirectory.at(checkpoint_dir, "")
        self._checkpoint_dir = checkpoint_dir

    def of(self, number: int, decide: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """`storage_path` and `name` of that run."""
        file = f"shoal_ray_train_run_{number}.json"
        text = self._own._read(file)
        if text is None:
            self._own.filesystem.create_dir(self._own.path, recursive=True)
            text = json.dumps(decide())
            self._own._write(file, text)
        document: dict[str, Any] = json.loads(text)
        return document


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
        """Return the list after a report, and the names of checkpoints that are kept no longer. `name`: None without a
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
