"""Ray Train V2 elastic as its documentation shows it: the peer loop in 3 to 4 workers, with unlimited restarts.

    python bench/recovery/peers/ray_train_driver.py FOLDER ADDRESS

A driver of the cluster at ADDRESS. recovery/peers/ray_train.py starts it with the cluster's environment.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch

import ray

_ROOT = Path(__file__).parents[3]
_PATH = f"{_ROOT / 'bench'}:{_ROOT / 'tools'}"


def main() -> None:
    folder, address = Path(sys.argv[1]), sys.argv[2]
    ray.init(
        address,
        runtime_env={
            "env_vars": {"PYTHONPATH": _PATH, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        },
    )
    trainer = ray.train.torch.TorchTrainer(
        train_worker,
        train_loop_config={"folder": str(folder)},
        torch_config=ray.train.torch.TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=(3, 4)),
        run_config=ray.train.RunConfig(
            storage_path=str(folder / "checkpoints"),
            failure_config=ray.train.FailureConfig(max_failures=-1),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    )
    trainer.fit()


def train_worker(config: dict[str, Any]) -> None:
    from recovery.peers.loop import save_state, train

    class ReportedCheckpoints:
        """Ray Train's checkpoints: every rank reports its part, and the storage merges the parts."""

        def __init__(self) -> None:
            self._open = contextlib.ExitStack()

        def newest(self) -> tuple[Path, int] | None:
            checkpoint = ray.train.get_checkpoint()
            if checkpoint is None:
                return None
            directory = Path(self._open.enter_context(checkpoint.as_directory()))
            return directory, json.loads((directory / "step.json").read_text())

        def save(self, loop: Any, step: int) -> None:
            with tempfile.TemporaryDirectory() as directory:
                save_state(loop, Path(directory))
                (Path(directory) / "step.json").write_text(json.dumps(step))
                ray.train.report({"step": step}, checkpoint=ray.train.Checkpoint.from_directory(directory))

    train(Path(config["folder"]), ReportedCheckpoints())


if __name__ == "__main__":
    main()
