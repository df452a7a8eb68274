"""The same work as a script of Ray Train, for Shoal and for Ray Train itself. Run by `main.py`.

ray_train.py WORKERS FOLDER     every rank writes its pid into FOLDER
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from work import GLOBAL_BATCH, SAVE_EVERY, Samples, model, stamp


def train(config: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    Path(config["folder"], f"pid.{rank}").write_text(str(os.getpid()))
    network, samples = model(), Samples()
    wrapped = ray.train.torch.prepare_model(network)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
    step, checkpoint = 0, ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, "last.pt"))
        network.load_state_dict(saved["network"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    while True:
        first = step * GLOBAL_BATCH
        indices = [at % len(samples) for at in range(first, first + GLOBAL_BATCH)][rank::world_size]
        x, y = (torch.stack(parts) for parts in zip(*(samples[index] for index in indices), strict=True))
        loss = nn.functional.cross_entropy(wrapped(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if rank == 0:
            stamp(step)
        if step % SAVE_EVERY == 0:
            with tempfile.TemporaryDirectory() as folder:
                if rank == 0:
                    state = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    torch.save(state, Path(folder, "last.pt"))
                ray.train.report({"loss": loss.item(), "step": step}, checkpoint=Checkpoint.from_directory(folder))


def main() -> None:
    workers, folder = int(sys.argv[1]), sys.argv[2]
    TorchTrainer(
        train,
        train_loop_config={"folder": folder},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            storage_path=f"{folder}/checkpoints",
            name="program",
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


if __name__ == "__main__":
    main()
