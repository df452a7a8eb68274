"""`TorchTrainer` for a program that is not on Shoal's workers: a driver script, or a notebook. `fit()` submits a job.

    from shoal.ray_train import TorchTrainer          instead of: from ray.train.torch import TorchTrainer
    result = TorchTrainer(train_loop_per_worker, scaling_config=ScalingConfig(num_workers=(2, 8))).fit()

The job gets the files of the current directory, and the trainer's arguments as Ray Train pickles them: functions of
`__main__` by value, those of modules by name. Its workers run this module (`python -m shoal.ray_train`), which makes
the same trainer of Ray's there. On a worker of Shoal, `fit()` trains in that job. Imports Ray and the client of Shoal
when a trainer is made, on the machine of the user.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["TorchTrainer"]

_RESULT = "shoal.ray_train result: "
"""Beginning of the line in the job's log with what `fit()` returns."""
_CHECKPOINT = "shoal.ray_train checkpoint: "
"""Beginning of the line for each checkpoint that Ray Train keeps, the worst first."""
_MAX_LINE_CHARS = 2000
_CHUNK_CHARS = 8000
"""Characters of one argument of a job's script."""
_MAX_CHARS = 700_000
"""Most characters of all arguments together."""


class TorchTrainer:
    """Arguments as those of `ray.train.torch.TorchTrainer`. The service is the one of SHOAL_URL, else of this machine.

    Args:
        name: of the job; None means `ray-train`.
        spec: further keys of the job's spec, for example `{"priority": 5}`.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        datasets: dict[str, Any] | None = None,
        name: str | None = None,
        spec: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        self._arguments = {"train_loop_per_worker": train_loop_per_worker, **arguments}
        self._datasets = datasets or {}
        self._name = name
        self._spec = spec or {}

    def fit(self) -> Any:
        """Submit the job, print its events, and return a `ray.train.Result` when it has succeeded.

        If this call is interrupted, the job goes on. The value that the training function returns stays on the workers.

        Raises:
            ray.train.TrainingFailedError: the job has failed, or was cancelled.
        """
        import ray.train.torch

        trainer = ray.train.torch.TorchTrainer(datasets=self._datasets, **self._arguments)
        if os.environ.get("SHOAL_HOOK"):
            return trainer.fit()
        from shoal_api.client import Client

        with Client() as client:
            job = client.submit(self._make_spec(trainer))
            sys.stderr.write(f"{job.id} {job.name}: shoal watch {job.id}\n")
            for event in client.events(job.id, follow=True):
                sys.stderr.write(f"{event.message}\n")
            status = client.wait(job.id).status
            lines = [line.text for line in client.logs(job.id, rank=0)]
        results = [json.loads(line.removeprefix(_RESULT)) for line in lines if line.startswith(_RESULT)]
        checkpoints = [json.loads(line.removeprefix(_CHECKPOINT)) for line in lines if line.startswith(_CHECKPOINT)]
        if not results or status.state != "SUCCEEDED":
            raise ray.train.TrainingFailedError(f"{job.id} has ended as {status.state}: {status.message}")
        return _make_result(results[-1], checkpoints)

    def _make_spec(self, trainer: Any) -> dict[str, Any]:
        scaling = trainer.scaling_config
        worker: dict[str, Any] = {"gpus": int(bool(scaling.use_gpu))}
        if cpus := (scaling.resources_per_worker or {}).get("CPU"):
            worker["cpus"] = cpus
        text = _pack(self._arguments, self._datasets)
        args = [text[first : first + _CHUNK_CHARS] for first in range(0, len(text), _CHUNK_CHARS)]
        document: dict[str, Any] = {
            "name": self._name or "ray-train",
            "script": {"module": "shoal.ray_train", "launcher": "ray_train", "args": args},
            "code": {"working_dir": os.getcwd()},  # noqa: PTH109
            "elasticity": {"min_workers": scaling.min_workers, "max_workers": scaling.max_workers},
            "worker": worker,
        }
        if (failures := trainer.run_config.failure_config) is not None and failures.max_failures:
            document["retry"] = {"max_failures": failures.max_failures if failures.max_failures > 0 else 10_000}
        return {**document, **self._spec}


def _pack(arguments: dict[str, Any], datasets: dict[str, Any]) -> str:
    """Return the arguments as text for `_run`. Raises ValueError if they are too large for a job's spec."""
    from ray import cloudpickle

    lineages = {
        name: dataset if callable(dataset) else dataset.serialize_lineage() for name, dataset in datasets.items()
    }
    text = base64.b64encode(cloudpickle.dumps((arguments, lineages))).decode()
    if len(text) > _MAX_CHARS:
        raise ValueError(
            f"train_loop_per_worker and the other arguments of TorchTrainer take {len(text)} characters, and a job's "
            f"spec has room for {_MAX_CHARS}. Read large values within the function, or from files of the current "
            "directory."
        )
    return text


def _make_result(result: dict[str, Any], checkpoints: list[tuple[str, dict[str, Any]]]) -> Any:
    """Return a `ray.train.Result` from the lines in the job's log; its checkpoints stay where workers wrote them."""
    from ray.train import Checkpoint

    from shoal_workers.ray_internals import make_training_result

    return make_training_result(
        metrics=result["metrics"],
        checkpoint=Checkpoint(result["checkpoint"]) if result["checkpoint"] else None,
        path=result["path"],
        filesystem=None,
        best_checkpoints=[(Checkpoint(path), metrics) for path, metrics in checkpoints],
        return_value=None,
    )


def _run(chunks: list[str]) -> None:
    """Run the packed trainer on rank 0 of the job, and print its result for `fit()`."""
    import ray.data
    import ray.train.torch

    from ray import cloudpickle

    arguments, lineages = cloudpickle.loads(base64.b64decode("".join(chunks)))
    datasets = {
        name: ray.data.Dataset.deserialize_lineage(lineage) if isinstance(lineage, bytes) else lineage
        for name, lineage in lineages.items()
    }
    result = ray.train.torch.TorchTrainer(datasets=datasets, **arguments).fit()
    for checkpoint, values in result.best_checkpoints or ():
        sys.stdout.write(f"{_CHECKPOINT}{json.dumps([checkpoint.path, _shorten(values)])}\n")
    newest = result.checkpoint and result.checkpoint.path
    fields = {"metrics": _shorten(result.metrics), "checkpoint": newest, "path": result.path}
    sys.stdout.write(f"{_RESULT}{json.dumps(fields)}\n")


def _shorten(metrics: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the numbers and texts that fit into one line of the log."""
    if metrics is None:
        return None
    plain = {key: value for key, value in metrics.items() if isinstance(value, (int, float, str))}
    while len(json.dumps(plain)) > _MAX_LINE_CHARS:
        plain.popitem()
    return plain


if __name__ == "__main__":
    _run(sys.argv[1:])
