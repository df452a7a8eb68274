"""A script in the style of Ray Train's documentation: Ray Data, checkpoints in the middle of an epoch, one result.

ray_train_rows.py DATA OUT GATE     reads the CSV files of DATA; every rank appends `group step rows` to OUT.RANK;
stands still after step 10 until the file GATE appears. Nothing in it is for Shoal but the name of the group in the
ledger.
"""

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from ray.train import Checkpoint, CheckpointConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

import ray

SAVE_EVERY, GATED_STEP = 4, 10


def train_loop_per_worker(config: dict[str, Any]) -> str:
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(nn.Linear(1, 1))
    network = model.module if world_size > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    start_epoch, step = 0, 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder, "state.pt"), weights_only=True)
        network.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start_epoch, step = state["epoch"], state["step"]
    shard = ray.train.get_dataset_shard("train")
    print(f"rank {rank} of {world_size} goes on from step {step}")
    for epoch in range(start_epoch, config["epochs"]):
        for batch in shard.iter_torch_batches(batch_size=4, dtypes=torch.float32):
            x = batch["x"][:, None]
            loss = nn.functional.mse_loss(model(x), 3 * x + 1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            with Path(f"{config['out']}.{rank}").open("a", encoding="utf-8") as ledger:
                ledger.write(f"{os.environ['TORCHELASTIC_RESTART_COUNT']} {step} {batch['row'].int().tolist()}\n")
            mean = loss.detach() / world_size
            dist.all_reduce(mean)
            metrics = {"loss": mean.item(), "epoch": epoch, "step": step, "note": "text"}
            if step % SAVE_EVERY:
                ray.train.report(metrics)
            else:
                with tempfile.TemporaryDirectory() as folder:
                    if rank == 0:
                        state = {"model": network.state_dict(), "optimizer": optimizer.state_dict()}
                        torch.save({**state, "epoch": epoch, "step": step}, Path(folder, "state.pt"))
                    ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))
            while step == GATED_STEP and not Path(config["gate"]).exists():
                time.sleep(0.02)
    return f"returned by rank {rank}"


def add_input(batch: dict[str, Any]) -> dict[str, Any]:
    batch["x"] = batch["row"] / 52
    return batch


def main() -> None:
    data, out, gate = sys.argv[1:]
    trainer = TorchTrainer(
        train_loop_per_worker,
        train_loop_config={"epochs": 2, "out": out, "gate": gate},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(checkpoint_config=CheckpointConfig(num_to_keep=2)),
        datasets={"train": ray.data.read_csv(data, override_num_blocks=2).map_batches(add_input)},
    )
    result = trainer.fit()
    names = [Path(one.path).name.split("-")[0] for one, _ in result.best_checkpoints]
    print(f"result: {result.return_value}, step {result.metrics['step']}, loss {result.metrics['loss']!r}, {names}")


if __name__ == "__main__":
    main()
