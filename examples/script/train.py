"""A script that trains by itself with DistributedDataParallel, as one process of each worker.

    torchrun --nproc-per-node 2 train.py --steps 200               without a service
    shoal submit train.py --workers 1:4 --follow -- --steps 200    elastic: any number of workers, also after deaths

Nothing in it is for Shoal but two things that torchrun needs as well, a checkpoint that it loads when it starts and a
batch that does not depend on the number of processes, and one line that reports its progress.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import shoal

BATCH = 64  # samples of a step, of all processes together


def samples(step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """This process's share of a step: points, and the ring that each is on. Equal at every world size."""
    random = torch.Generator().manual_seed(step)
    rings = torch.randint(3, (BATCH,), generator=random)
    angles = 2 * torch.pi * torch.rand(BATCH, generator=random)
    radii = rings + 1 + 0.2 * torch.randn(BATCH, generator=random)
    points = radii[:, None] * torch.stack([angles.cos(), angles.sin()], dim=1)
    return points[rank::world_size], rings[rank::world_size]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--save-every", type=int, default=10)
    options = parser.parse_args()

    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if has_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if has_gpu else "gloo")  # the environment says where
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)).to(device)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)

    checkpoint, done = Path(os.environ.get("SHOAL_CHECKPOINT_DIR", ".")) / "last.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device)
        network.load_state_dict(saved["network"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]

    for step in range(done + 1, options.steps + 1):
        points, rings = (part.to(device) for part in samples(step, rank, world_size))
        # DDP takes the mean over the processes, which may have different numbers of samples
        loss = F.cross_entropy(model(points), rings, reduction="sum") * world_size / BATCH
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / world_size
        dist.all_reduce(mean)
        shoal.log(step=step, loss=mean, lr=options.lr, tokens=BATCH, total_steps=options.steps)
        if rank == 0 and (step % options.save_every == 0 or step == options.steps):
            partial = checkpoint.with_suffix(".partial")
            torch.save({"network": network.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, partial)
            partial.replace(checkpoint)  # never half a checkpoint
    if rank == 0:
        print(f"trained to step {options.steps}, loss {mean.item():.4f}" if done < options.steps else "nothing to do")
    del model  # first: torch 2.13 may lock itself up if a DDP model is the last that holds the group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
