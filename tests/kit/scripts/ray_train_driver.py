"""A driver script: its trainer trains on the workers of the service of SHOAL_URL, and its result comes back.

ray_train_driver.py STEPS
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from ray.train import Checkpoint, RunConfig, ScalingConfig

from shoal.ray_train import TorchTrainer

SCALE = 0.5


def train_loop_per_worker(config: dict[str, Any]) -> None:
    total = torch.ones(1)
    for step in range(1, config["steps"] + 1):
        dist.all_reduce(total)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, f"rank{ray.train.get_context().get_world_rank()}").write_text(str(step))
            metrics = {"loss": SCALE * total.item(), "step": step}
            ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))


def main() -> None:
    trainer = TorchTrainer(
        train_loop_per_worker,
        train_loop_config={"steps": int(sys.argv[1])},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="driven"),
        name="driven",
    )
    result = trainer.fit()
    files = sorted(path.name for path in Path(result.checkpoint.path).iterdir())
    steps = [metrics["step"] for _, metrics in result.best_checkpoints]
    print(f"result {result.metrics} {Path(result.path).name} {files} {steps}")


if __name__ == "__main__":
    main()
