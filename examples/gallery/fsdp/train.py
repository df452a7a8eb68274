"""FSDP2, with sharded checkpoints by torch.distributed.checkpoint, as a script.

    torchrun --nproc-per-node 2 train.py                      without a service
    shoal submit train.py --workers 1:4 --follow              killed, it goes on from its last checkpoint, at any size

A checkpoint is written into a directory of its own, and `last` names it once all ranks have written their part. It
loads at every number of processes, and the batch does not depend on that number either.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import shoal

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 200
OUT = Path(os.environ.get("SHOAL_CHECKPOINT_DIR", "checkpoints"))
BATCH = 32  # samples of a step, of all processes together


def samples(step, rank, world_size):
    x = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(step))[rank::world_size]
    return x, x.pow(2).sum(1, keepdim=True).sqrt()


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)), nn.Linear(8, 1)).to(device)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def state():
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    done = int((OUT / "last").read_text()) if (OUT / "last").exists() else 0
    if done:
        saved = state()
        dcp.load(saved, checkpoint_id=OUT / str(done))
        set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])

    for step in range(done + 1, STEPS + 1):
        x, y = (part.to(device) for part in samples(step, rank, world_size))
        # FSDP takes the mean over the processes, which may have different numbers of samples
        loss = (model(x) - y).pow(2).sum() * world_size / BATCH
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / world_size
        dist.all_reduce(mean)
        shoal.log(step=step, loss=mean, tokens=BATCH, total_steps=STEPS)
        if step % 20 == 0:
            dcp.save(state(), checkpoint_id=OUT / str(step))
            if rank == 0:  # every rank has written when `save` returns
                (OUT / "partial").write_text(str(step))
                (OUT / "partial").replace(OUT / "last")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
