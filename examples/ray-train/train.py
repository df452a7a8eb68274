"""A script of Ray Train, with Ray Data and checkpoints. Ray Train and Shoal run the same text.

    python train.py                                             Ray Train, on a Ray cluster of its own
    shoal submit train.py --workers 1:4 --follow -- --epochs 9  elastic: any number of workers, also after deaths

Nothing in it is for Shoal.
"""

import argparse
import tempfile
from pathlib import Path

import ray.data
import ray.train
import torch
import torch.nn.functional as F
from ray.train import Checkpoint, CheckpointConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn


def rings(batch):
    """Points of the plane, each on one of three rings."""
    random = torch.Generator().manual_seed(int(batch["id"][0]))
    ring = torch.randint(3, (len(batch["id"]),), generator=random)
    angle = 2 * torch.pi * torch.rand(len(ring), generator=random)
    points = (ring + 1)[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
    return {"point": points.numpy(), "ring": ring.numpy()}


def train_loop_per_worker(config):
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 3))
    model = ray.train.torch.prepare_model(network)
    optimizer = torch.optim.AdamW(network.parameters(), lr=config["lr"])

    first_epoch, step = 0, 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, "state.pt"))
        network.load_state_dict(saved["network"])
        optimizer.load_state_dict(saved["optimizer"])
        first_epoch, step = saved["epoch"], saved["step"]

    shard = ray.train.get_dataset_shard("train")
    for epoch in range(first_epoch, config["epochs"]):
        for batch in shard.iter_torch_batches(batch_size=16):
            loss = F.cross_entropy(model(batch["point"].float()), batch["ring"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 10 == 0:
                with tempfile.TemporaryDirectory() as folder:
                    if rank == 0:
                        state = {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
                        torch.save({**state, "epoch": epoch, "step": step}, Path(folder, "state.pt"))
                    metrics = {"loss": loss.item(), "epoch": epoch, "step": step}
                    ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    trainer = TorchTrainer(
        train_loop_per_worker,
        train_loop_config={"lr": 3e-3, "epochs": options.epochs},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(checkpoint_config=CheckpointConfig(num_to_keep=2)),
        datasets={"train": ray.data.range(1280, override_num_blocks=2).map_batches(rings, batch_size=64)},
    )
    result = trainer.fit()
    print(f"trained to step {result.metrics['step']}, loss {result.metrics['loss']:.4f}: {result.checkpoint.path}")


if __name__ == "__main__":
    main()
