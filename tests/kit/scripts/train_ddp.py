"""A DDP script as torchrun runs it. It goes on from its own checkpoint, and saves every few steps and on SIGTERM.

train_ddp.py STEPS OUT      rank 0 appends `step loss` lines to OUT; every rank writes its environment to OUT.RANK
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SAMPLES = 8


def main() -> None:
    steps, out = int(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    Path(f"{out}.{rank}").write_text(json.dumps(dict(os.environ)), encoding="utf-8")
    checkpoint = Path(os.environ.get("SHOAL_CHECKPOINT_DIR", out.parent)) / "last.pt"
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first = 1
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"] + 1
    ending = False

    def end(*_: object) -> None:
        nonlocal ending
        ending = True

    signal.signal(signal.SIGTERM, end)
    for step in range(first, steps + 1):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(SAMPLES, 4, generator=generator)
        own = batch[rank::world_size]
        loss = (model(own) - own.sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = torch.tensor([loss.item() / world_size, float(ending)])
        dist.all_reduce(mean)
        if rank == 0:
            with out.open("a", encoding="utf-8") as file:
                file.write(f"{step} {mean[0].item()!r}\n")
            report(step, mean[0].item(), steps)
        if mean[1] or step == steps:
            if rank == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, checkpoint.with_suffix(".new"))
                checkpoint.with_suffix(".new").rename(checkpoint)
            break
    del model  # first: torch 2.13 may lock itself up if a DDP model is the last that holds the group
    dist.destroy_process_group()


def report(step: int, loss: float, total_steps: int) -> None:
    import shoal

    shoal.log(step=step, loss=loss, total_steps=total_steps)


if __name__ == "__main__":
    main()
