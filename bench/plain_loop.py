"""The yardstick: an ordinary FSDP2 training loop under torchrun, as one would write it without Shoal.

Same model class, data set, global batch, micro-batches, optimizer and clipping as the spec says; no votes, no reports,
no checkpoints. Rank 0 prints one line of JSON with the seconds of every step. Run by bench/overhead.py:

    torchrun --nproc-per-node 2 bench/plain_loop.py spec.yaml
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from torch.distributed.fsdp import fully_shard

from shoal_workers.contract.spec_errors import parse_spec
from shoal_workers.engine.schedule import lr_factor
from shoal_workers.tasks.lm import LanguageModel


def main() -> None:
    torch.set_num_threads(1)
    spec = parse_spec(yaml.safe_load(Path(sys.argv[1]).read_text()))
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    task = LanguageModel(model=spec.model, data=spec.data, seed=spec.seed)
    task.prepare(lambda _: None)
    data = task.build_dataset("train")
    torch.manual_seed(spec.seed)
    model = task.build_model()
    for unit in task.shard_units(model):
        fully_shard(unit)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec.optimizer.lr, weight_decay=spec.optimizer.weight_decay)

    steps = spec.stop.steps or 0
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(spec.seed)).tolist()
    local = spec.batch.num_micro_batches // world_size
    step_s: list[float] = []
    losses: list[float] = []
    last = time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = spec.optimizer.lr * lr_factor(spec.schedule, step, steps)
        total = torch.zeros(())
        for index in range(local):
            first = step * spec.batch.global_size + (rank * local + index) * spec.batch.micro_size
            samples = [data[order[i % len(order)]] for i in range(first, first + spec.batch.micro_size)]
            batch = torch.utils.data.default_collate(samples)
            model.set_requires_gradient_sync(index == local - 1)
            loss = task.loss(model, batch) / local
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), spec.optimizer.clip_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / world_size)
        now = time.perf_counter()
        step_s.append(now - last)
        last = now
    if rank == 0:
        print(json.dumps({"step_s": step_s, "last_loss": losses[-1], "pid": os.getpid()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
