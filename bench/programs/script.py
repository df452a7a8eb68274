"""A torchrun script with DistributedDataParallel and a checkpoint every few steps. Run by `main.py`."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from work import GLOBAL_BATCH, SAVE_EVERY, Samples, model, stamp


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    network, samples = model(), Samples()
    wrapped = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
    path, step = Path(os.environ["SHOAL_CHECKPOINT_DIR"]) / "last.pt", 0
    if path.exists():
        saved = torch.load(path)
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
                torch.save(
                    {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "step": step},
                    path.with_suffix(".partial"),
                )
                path.with_suffix(".partial").replace(path)


if __name__ == "__main__":
    main()
