"""`trainer.fit()` on Shoal: the training function of rank 0's script runs on every rank, once for each `fit()`.

    rank 0   Driver.fit    opens the run, starts what assigns the datasets, announces the Plan, trains, returns a Result
    others   follow        wait for the next Plan, train; until rank 0's script has ended

Called by door.py. The Plan travels as Ray Train sends a training function: pickled by value if it is of `__main__`.

Within a training function Ray Train V2 asks an object of the process, its `TrainFnUtils`, for the context, reports,
checkpoints, shards and collectives, and says in its docstring that others may take that place. Every rank has one of
these for the time of one `fit()`. In a report every rank copies its files, rank 0 writes the list of checkpoints once
all have, and then all go on.
"""

from __future__ import annotations

import gc
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from shutil import rmtree
from typing import Any, TextIO

import ray.train
import torch
import torch.distributed as dist
from ray.train import Checkpoint, CheckpointUploadMode, ReportedCheckpoint, ReportedCheckpointStatus

import ray
import shoal
from ray import cloudpickle
from shoal_workers.ray_internals import answer_for_ray_train, make_training_result, split_datasets
from shoal_workers.ray_train.group import Group
from shoal_workers.ray_train.run_directory import Manifest, Retention, RunDirectory, Runs
from shoal_workers.ray_train.shards import Ranges, Shard, ShardPlan, number_of, positions_of, start_coordinator

_END = b"end"


@dataclass(frozen=True, slots=True)
class Plan:
    """One `fit()`, as rank 0 announces it."""

    number: int
    """1: the first `fit()` of the script."""
    train: Callable[..., Any]
    config: dict[str, Any] | None
    backend: str
    timeout_s: float
    name: str
    directory: RunDirectory
    retention: Retention
    manifest: Manifest
    positions: dict[str, dict[str, Ranges]]
    shards: tuple[ShardPlan, ...]


class Driver:
    """Rank 0, whose script makes trainers.

    Args:
        checkpoint_dir: the job's own; a run without a storage path of its own is below it.
        log: for sentences to the user.
    """

    def __init__(self, group: Group, checkpoint_dir: str, log: TextIO = sys.stdout) -> None:
        self._group = group
        self._checkpoint_dir = checkpoint_dir
        self._runs = Runs(checkpoint_dir)
        self._log = log
        self._number = 0

    def fit(self, trainer: Any) -> ray.train.Result:
        """Take the place of `TorchTrainer.fit`."""
        self._number += 1
        self._remark_on(trainer)
        run = trainer.run_config
        place = self._runs.of(self._number, lambda: {"storage_path": self._storage_of(run), "name": run.name})
        directory = RunDirectory.at(place["storage_path"], place["name"], run.storage_filesystem)
        manifest, positions = directory.open()
        if manifest.newest is not None:
            self._say(f"{place['name']} goes on from {manifest.newest.name}")
        shards = self._shards_of(trainer, positions.get(manifest.latest or "", {}))
        plan = Plan(
            self._number,
            trainer.train_loop_per_worker,
            trainer.train_loop_config,
            trainer.backend_config.backend,
            trainer.backend_config.timeout_s,
            place["name"],
            directory,
            _retention_of(run.checkpoint_config),
            manifest,
            positions,
            shards,
        )
        coordinators = [
            start_coordinator(shard, trainer.datasets[shard.name], self._group.world_size) for shard in shards
        ]
        self._group.announce(f"plan/{self._number}", cloudpickle.dumps(plan))
        answers, value = train(plan, self._group)
        for actor in coordinators:
            ray.kill(actor)
        return _result_of(directory, answers, value)

    def end(self) -> None:
        """The script has ended well, and with it the training of the others."""
        if not self._number:
            self._say("the script has ended without trainer.fit(), so nothing was trained")
        self._group.announce(f"plan/{self._number + 1}", _END)

    def _storage_of(self, run: Any) -> str:
        given = str(run.storage_path)
        return self._checkpoint_dir if given == default_storage() else given

    def _shards_of(self, trainer: Any, taken: dict[str, Ranges]) -> tuple[ShardPlan, ...]:
        config = trainer.data_config
        if trainer.datasets and type(config).configure is not ray.train.DataConfig.configure:
            raise NotImplementedError(
                f"dataset_config is a {type(config).__name__} with a configure() of its own, which Shoal does not "
                "call, because Shoal splits datasets itself. Use ray.train.DataConfig, or prepare the datasets "
                "before the trainer is made."
            )
        split = split_datasets(config, [*trainer.datasets])
        shards = []
        for name in trainer.datasets:
            rows = taken.get(name, []) if name in split and keeps_positions() else []
            if rows:
                self._say(
                    f"dataset {name} goes on after {number_of(rows)} rows of its pass, which the checkpoint has seen; "
                    "SHOAL_RAY_DATA_POSITION=0 begins the pass again"
                )
            actor = f"{self._group.job}/{self._group.number}/{self._number}/{name}"
            shards.append(ShardPlan(name, actor, name in split, [(first, last) for first, last in rows]))
        return tuple(shards)

    def _remark_on(self, trainer: Any) -> None:
        """What the script sets, and the job decides."""
        scaling, run = trainer.scaling_config, trainer.run_config
        size = self._group.world_size
        if scaling.num_workers and not scaling.min_workers <= size <= scaling.max_workers:
            self._say(
                f"ScalingConfig(num_workers={scaling.num_workers!r}) is not read here: the world size is {size}, "
                "from elasticity of the spec, or --workers"
            )
        if scaling.use_gpu and not torch.cuda.is_available():
            raise RuntimeError(
                "ScalingConfig(use_gpu=True), but the workers of this job have no GPU. Submit it with --gpus 1 "
                "(worker.gpus), or set use_gpu to False."
            )
        if scaling.use_tpu:
            raise NotImplementedError("ScalingConfig(use_tpu=True): Shoal trains on CPUs and NVIDIA GPUs.")
        if run.failure_config is not None and run.failure_config.max_failures:
            self._say(
                f"FailureConfig(max_failures={run.failure_config.max_failures}) is the job's retry.max_failures; a "
                "lost worker is no failure, and the group begins again as long as retry.max_recoveries allows"
            )
        if run.callbacks:
            names = ", ".join(type(callback).__name__ for callback in run.callbacks)
            self._say(f"RunConfig(callbacks=...) is left out, because Ray Train's controller does not run: {names}")
        if trainer.validation_config is not None:
            self._say("validation_config is left out: ray.train.report(validation=...) is refused")

    def _say(self, text: str) -> None:
        self._log.write(f"shoal: {text}\n")
        self._log.flush()


def follow(group: Group) -> None:
    """The life of every other rank."""
    number = 0
    while True:
        number += 1
        said = group.awaited(f"plan/{number}")
        if said == _END:
            return
        plan: Plan = cloudpickle.loads(said)
        plan.directory.require()
        train(plan, group)


def train(plan: Plan, group: Group) -> tuple[Answers, Any]:
    """Run the training function on this rank, within a process group. Returns what was reported, and its value."""
    if torch.cuda.is_available():
        torch.cuda.set_device(group.local_rank)
    dist.init_process_group(
        plan.backend,
        store=group.store_of(plan.number),
        rank=group.rank,
        world_size=group.world_size,
        timeout=timedelta(seconds=plan.timeout_s),
    )
    shards = {shard.name: Shard(shard, group) for shard in plan.shards}
    answers = Answers(group, plan.name, plan.directory, plan.retention, plan.manifest, plan.positions, shards)
    answer_for_ray_train(answers)
    value = plan.train(plan.config or {}) if _takes_config(plan.train) else plan.train()
    group.leave()
    answer_for_ray_train(None)
    gc.collect()  # torch 2.13 may lock itself up if a DDP model is the last that holds the group
    if dist.is_initialized():
        dist.destroy_process_group()
    return answers, value


def _takes_config(function: Callable[..., Any]) -> bool:
    """As Ray Train decides it: by the parameters without a default. Raises ValueError: there are several."""
    names = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if len(names) > 1:
        raise ValueError(f"train_loop_per_worker takes no argument, or the config alone; it takes {', '.join(names)}.")
    return bool(names)


def _retention_of(config: Any) -> Retention:
    if config is None:
        return Retention()
    return Retention(config.num_to_keep, config.checkpoint_score_attribute, config.checkpoint_score_order)


def _result_of(directory: RunDirectory, answers: Answers, value: Any) -> ray.train.Result:
    """What Ray Train returns; without a checkpoint, the metrics of the last report."""
    best = [(directory.checkpoint(checkpoint.name), {**checkpoint.metrics}) for checkpoint in answers.manifest.kept]
    return make_training_result(
        metrics=answers.metrics,
        checkpoint=answers.get_checkpoint(),
        path=directory.path,
        filesystem=directory.filesystem,
        best_checkpoints=best,
        return_value=value,
    )


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
        """Return None on every rank: a worker that is taken away gets SIGTERM and its grace, and no notice before."""

    def is_distributed(self) -> bool:
        """Return False, so Ray Train takes the current device, which `fit` sets, and does not ask Ray for GPUs of an
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
    """Return the storage path that Ray Train takes if RunConfig names none: below the home directory, on one node."""
    return str(Path("~/ray_results").expanduser())


def keeps_positions() -> bool:
    """Return whether a dataset goes on where it was; a script that skips what it has read itself sets the variable to
    0."""
    return os.environ.get("SHOAL_RAY_DATA_POSITION") != "0"
