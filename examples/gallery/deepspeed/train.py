"""A script that DeepSpeed's launcher starts: it finds its place in that launcher's variables. It trains with DDP here,
so that it runs without DeepSpeed; with it, `deepspeed.initialize` takes the model and reads the same variables.

    deepspeed --no_local_rank train.py                                       without a service
    shoal submit -- deepspeed --no_local_rank --num_gpus 4 train.py          killed, it goes on from its last checkpoint
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import shoal

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 200
OUT = Path(os.environ.get("SHOAL_CHECKPOINT_DIR", ".")) / "last.pt"
BATCH = 32  # samples of a step, of all processes together


def samples(step, rank, world_size):
    x = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(step))[rank::world_size]
    return x, x.pow(2).sum(1, keepdim=True).sqrt()


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if rank == 0:
        print(f"{os.environ['LOCAL_SIZE']} processes on each of {os.environ['CROSS_SIZE']} nodes")
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).to(device)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    done = 0
    if OUT.exists():
        saved = torch.load(OUT, map_location=device)
        network.load_state_dict(saved["network"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
    for step in range(done + 1, STEPS + 1):
        x, y = (part.to(device) for part in samples(step, rank, world_size))
        loss = (model(x) - y).pow(2).sum() * world_size / BATCH
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / world_size
        dist.all_reduce(mean)
        shoal.log(step=step, loss=mean, tokens=BATCH, total_steps=STEPS)
        if rank == 0 and step % 20 == 0:
            state = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, OUT.with_suffix(".partial"))
            OUT.with_suffix(".partial").replace(OUT)  # never half a checkpoint
    del model  # first: torch 2.13 may lock itself up if a DDP model is the last that holds the group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
