"""What `ray.train` answers within a training function: the context, reports, checkpoints, shards, collectives.

    report   every rank copies its files -> exchange: rank 0 writes the list of checkpoints -> all go on

Ray Train V2 asks an object of the process, its `TrainFnUtils`, and says in its docstring that others may take that
place. Every rank has one of these for the time of one `fit()`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from shutil import rmtree
from typing import Any

import ray.train
from ray.train import Checkpoint, CheckpointUploadMode, ReportedCheckpoint, ReportedCheckpointStatus

import ray
import shoal
from ray import cloudpickle
from shoal_workers.ray_train.group import Group
from shoal_workers.ray_train.manifest import Manifest, Retention
from shoal_workers.ray_train.row_assignment import Ranges, positions_of
from shoal_workers.ray_train.run_directory import RunDirectory
from shoal_workers.ray_train.shards import Shard

_OF_LOG = ("loss", "lr", "grad_norm", "tokens", "total_steps")
"""Names that `shoal.log` gives a meaning."""
_STEPS = ("step", "global_step")


class Context(ray.train.TrainContext):  # type: ignore[misc]
    """What `ray.train.get_context()` returns."""

    def __init__(self, group: Group, name: str) -> None:
        self._group = group
        self._name = name

    def get_experiment_name(self) -> str:
        return self._name

    def get_world_size(self) -> int:
        return self._group.world_size

    def get_world_rank(self) -> int:
        return self._group.rank

    def get_local_rank(self) -> int:
        return self._group.local_rank

    def get_local_world_size(self) -> int:
        return self._group.local_world_size

    def get_node_rank(self) -> int:
        return self._group.node_rank

    def get_storage(self) -> Any:
        raise NotImplementedError(
            "ray.train.get_context().get_storage() is Ray Train's own object, which Shoal does not have. Paths of "
            "checkpoints are those of ray.train.get_checkpoint()."
        )


class Answers:
    """Takes the place of Ray Train's `TrainFnUtils`. Called on the thread of the training function.

    Args:
        positions: by checkpoint and dataset, the rows that were read before it.
        shards: by name, with what this rank reads.
    """

    def __init__(
        self,
        group: Group,
        name: str,
        directory: RunDirectory,
        retention: Retention,
        manifest: Manifest,
        positions: dict[str, dict[str, Ranges]],
        shards: Mapping[str, Shard],
    ) -> None:
        self.manifest = manifest
        self.metrics: dict[str, Any] | None = None if manifest.newest is None else {**manifest.newest.metrics}
        """What the newest report said."""
        self._group = group
        self._context = Context(group, name)
        self._directory = directory
        self._retention = retention
        self._positions = positions
        self._shards = shards

    def report(
        self,
        metrics: dict[str, Any],
        checkpoint: Checkpoint | None = None,
        checkpoint_dir_name: str | None = None,
        checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.SYNC,
        delete_local_checkpoint_after_upload: bool | None = None,
        checkpoint_upload_fn: Callable[[Checkpoint, str], Checkpoint] | None = None,
        validation: Any = False,
    ) -> None:
        """A barrier of all ranks. An asynchronous upload is made here and now, so it is complete when this returns."""
        if validation:
            raise NotImplementedError(
                "ray.train.report(validation=...) starts tasks of Ray Train, which Shoal does not run. Validate in "
                "the training function, and report what it finds as metrics."
            )
        name = None
        if checkpoint is not None:
            name = checkpoint_dir_name or f"checkpoint_{self.manifest.next_index:06d}-g{self._group.number}"
            name = self._uploaded(checkpoint, name, checkpoint_upload_mode, checkpoint_upload_fn)
            if delete_local_checkpoint_after_upload and checkpoint_upload_mode is not CheckpointUploadMode.NO_UPLOAD:
                rmtree(checkpoint.path, ignore_errors=True)
        readings = {key: shard.reading() for key, shard in self._shards.items()} if name else {}
        said = cloudpickle.dumps((name, metrics if self._group.rank == 0 else None, readings))
        self.manifest, self.metrics = cloudpickle.loads(self._group.exchange(said, self._committed))
        self._log(metrics)

    def get_checkpoint(self) -> Checkpoint | None:
        newest = self.manifest.newest
        return None if newest is None else self._directory.checkpoint(newest.name)

    def get_all_reported_checkpoints(
        self, consistency_mode: Any = None, timeout_s: float | None = None
    ) -> list[ReportedCheckpoint]:
        return [
            ReportedCheckpoint(
                self._directory.checkpoint(reported.name), {**reported.metrics}, ReportedCheckpointStatus.COMMITTED
            )
            for reported in self.manifest.kept
        ]

    def get_dataset_shard(self, dataset_info: Any) -> Any:
        shard = self._shards.get(dataset_info.dataset_name)
        if shard is None:
            known = ", ".join(self._shards) or "none"
            raise KeyError(
                f"there is no dataset {dataset_info.dataset_name!r}; datasets of the trainer: {known}. Pass it to "
                "TorchTrainer(datasets={...})."
            )
        return shard.iterator

    def get_context(self) -> Context:
        return self._context

    def get_preemption_info(self) -> None:
        """Returns None on every rank: a worker that is taken away gets SIGTERM and its grace, and no notice before."""

    def is_distributed(self) -> bool:
        """Returns False, so Ray Train takes the current device, which `fit` sets, and does not ask Ray for GPUs of an
        actor: the script is none."""
        return False

    def barrier(self) -> None:
        self._group.exchange(b"", lambda _: b"")

    def broadcast_from_rank_zero(self, data: Any) -> Any:
        said = cloudpickle.dumps(data) if self._group.rank == 0 else b""
        return cloudpickle.loads(self._group.exchange(said, lambda values: values[0]))

    def _uploaded(
        self,
        checkpoint: Checkpoint,
        name: str,
        mode: CheckpointUploadMode,
        upload: Callable[[Checkpoint, str], Checkpoint] | None,
    ) -> str:
        if upload is not None:
            checkpoint = upload(checkpoint, name)
        elif mode is not CheckpointUploadMode.NO_UPLOAD:
            self._directory.upload(checkpoint, name)
            return name
        known_name = self._directory.name_of(checkpoint)
        if known_name is None:
            raise ValueError(
                f"the checkpoint {checkpoint.path} is not below the directory of the run, {self._directory.path}, and "
                "it was not uploaded (NO_UPLOAD, or checkpoint_upload_fn). Report it without those, and Shoal copies "
                "it."
            )
        return known_name

    def _committed(self, said: list[bytes]) -> bytes:
        """Rank 0, with what every rank says."""
        values = [cloudpickle.loads(path) for path in said]
        name = next((value[0] for value in values if value[0] is not None), None)
        metrics = values[0][1]
        manifest, dropped = self.manifest.with_report(self._retention, name, metrics)
        if name is not None:
            of_name = positions_of([value[2] for value in values])
            kept = {checkpoint.name for checkpoint in manifest.kept}
            self._positions = {key: value for key, value in {**self._positions, name: of_name}.items() if key in kept}
            self._directory.commit(manifest, self._positions, dropped, ray.__version__)
        return bytes(cloudpickle.dumps((manifest, metrics)))

    def _log(self, metrics: dict[str, Any]) -> None:
        """Numbers of the report for the job's page. Every rank says it; rank 0's is shown."""
        numbers = {key: value for key, value in metrics.items() if _is_number(value)}
        steps = [numbers.pop(key) for key in _STEPS if key in numbers]
        step = int(steps[0]) if steps else self.manifest.next_index
        named: dict[str, Any] = {key: numbers.pop(key) for key in _OF_LOG if key in numbers}
        others = {key: value for key, value in numbers.items() if isinstance(key, str)}
        shoal.log(step, named.pop("loss", None), **named, **others)


def _is_number(value: Any) -> bool:
    if isinstance(value, (str, bytes, bool)) or value is None or isinstance(value, (Mapping, list, tuple)):
        return False
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def default_storage() -> str:
    """The storage path that Ray Train takes if RunConfig names none: below the home directory, on one node."""
    return str(Path("~/ray_results").expanduser())


def keeps_positions() -> bool:
    """Return whether a dataset goes on where it was; a script that skips what it has read itself sets the variable to
    0."""
    return os.environ.get("SHOAL_RAY_DATA_POSITION") != "0"
