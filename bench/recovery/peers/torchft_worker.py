"""One replica of the torchft peer: the plain loop's model, data and optimizer under torchft's Manager.

    python bench/recovery/peers/torchft_worker.py FOLDER RANK LIGHTHOUSE

A replica that joins fetches the state from a live one. Every replica trains one micro-batch of 3 samples in each step,
so that a step has fewer samples while a replica is missing, as torchft's documentation describes. The gradients are
averaged by one all-reduce of the Manager, not by torchft's DDP: that of 0.2.0 ends the survivors with an assertion if a
replica dies within an all-reduce, and training begins anew.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torchft import Manager, Optimizer, ProcessGroupGloo

# Started as a script from any directory: the shared modules are found beside this folder.
sys.path.extend(str(Path(__file__).parents[3] / name) for name in ("bench", "tools"))

from measurements.stamps import StampWriter
from recovery.workload import WORKERS
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.engine.schedule import compute_lr_factor
from shoal_workers.tasks.lm import LanguageModel

_TIMEOUT_S = 5.0
"""Limit of a collective and of torchft's own calls; its default is 60 s. A shorter one fails on a loaded machine."""


def main() -> None:
    folder, rank, lighthouse = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    spec = parse_spec(yaml.safe_load((folder / "spec.yaml").read_text()))
    task = LanguageModel(model=spec.model, data=spec.data, seed=spec.seed)
    task.prepare(lambda _: None)
    data = task.build_dataset("train")
    torch.manual_seed(spec.seed)
    model = task.build_model()
    adamw = torch.optim.AdamW(model.parameters(), lr=spec.optimizer.lr, weight_decay=spec.optimizer.weight_decay)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": adamw.state_dict()}

    def load(saved: dict[str, Any]) -> None:
        model.load_state_dict(saved["model"])
        adamw.load_state_dict(saved["optimizer"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=_TIMEOUT_S)),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=3,
        timeout=timedelta(seconds=_TIMEOUT_S),
        quorum_timeout=timedelta(seconds=60),
        connect_timeout=timedelta(seconds=60),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica_{rank}_",
        hostname="127.0.0.1",
    )
    optimizer = Optimizer(manager, adamw)
    stamps = StampWriter(folder, rank, WORKERS)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(spec.seed)).tolist()
    assert spec.stop is not None and spec.stop.steps is not None
    while manager.current_step() < spec.stop.steps:
        before = manager.current_step()
        optimizer.zero_grad()
        first = (before * WORKERS + rank) * spec.batch.micro_size
        chosen = range(first, first + spec.batch.micro_size)
        task.loss(model, task.collate([data[order[i % len(order)]] for i in chosen])).backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        averaged = _flatten_dense_tensors(gradients)
        manager.allreduce(averaged).wait()
        for gradient, average in zip(gradients, _unflatten_dense_tensors(averaged, gradients), strict=True):
            gradient.copy_(average)
        torch.nn.utils.clip_grad_norm_(model.parameters(), spec.optimizer.clip_norm or float("inf"))
        for group in adamw.param_groups:
            group["lr"] = spec.optimizer.lr * compute_lr_factor(spec.schedule, before, spec.stop.steps)
        optimizer.step()
        step = manager.current_step()
        if step > before and manager.participating_rank() == 0:
            size = manager.num_participants()
            stamps.completed(step, world_size=size, life=f"quorum {manager._quorum_id}, {size} replicas")


if __name__ == "__main__":
    main()
