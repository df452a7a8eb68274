"""A DDP script that waits: it saves every 4 steps, and stands still after step 6 until a file appears.

gated_ddp.py STEPS GATE     it goes on from its own checkpoint, and prints where, and the pid of each rank
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import Linear
from torch.nn.parallel import DistributedDataParallel

import shoal

SAVE_EVERY, GATED_STEP = 4, 6


def main() -> None:
    steps, gate = int(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    checkpoint = Path(os.environ["SHOAL_CHECKPOINT_DIR"]) / "last.pt"
    torch.manual_seed(0)
    model = DistributedDataParallel(Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    done = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        done = state["step"]
    print(f"rank {rank} of {world_size} goes on from step {done}, pid {os.getpid()}")
    for step in range(done + 1, steps + 1):
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))[rank::world_size]
        loss = (model(batch) - batch.sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach())
        shoal.log(step=step, loss=loss / world_size, total_steps=steps)
        if step % SAVE_EVERY == 0 and rank == 0:
            torch.save({"model": model.state_dict(), "step": step}, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").rename(checkpoint)
        while step == GATED_STEP and not gate.exists():
            time.sleep(0.02)
    del model  # first: torch 2.13 may lock itself up if a DDP model is the last that holds the group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
