"""Program of four gloo processes: gradients of a model with branches, communicated while the passes compute.

    python streamed_order.py STORE_FILE

A GPU does this; a CPU can, and is compared here with one process. Rank 0 prints the largest difference of a gradient,
by mesh and kind of branch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from ranks import largest, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from shoal_workers.engine.parallel.collective_order import CollectiveOrder

sys.path.insert(0, str(Path(__file__).parents[1] / "tasks"))
from branching_tasks import Branches

MESHES = {"shards": (1, 4), "replicas of shards": (2, 2), "replicas": (4, 1)}
NUM_MICRO_BATCHES = 12


def find(rank: int) -> dict[str, float]:
    return largest(list(_cases(rank)))


def _cases(rank: int) -> Iterator[tuple[str, float]]:
    for name, shape in MESHES.items():
        for kind in ("heads", "skipped", "order", "twice", "rare", "never"):
            yield f"{name}, {kind}", _difference(rank, shape, kind)


def _difference(rank: int, shape: tuple[int, int], kind: str) -> float:
    task = Branches({}, {"kind": kind}, 0)
    torch.manual_seed(3)
    whole = task.build_model()
    torch.manual_seed(3)
    model = task.build_model()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    order = CollectiveOrder(model, mesh, is_whole=True, streams=True)
    order.begin_generation()
    order.begin_step()
    own = range(3 * rank, 3 * rank + 3)
    for number in range(NUM_MICRO_BATCHES):
        _backward(task, whole, number)
    for number in own:
        model.set_is_last_backward(number == own[-1])
        model.set_reshard_after_backward(number == own[-1])
        model.set_requires_all_reduce(number == own[-1])
        _backward(task, model, number)
    differences = [0.0]
    for expected, found in zip(whole.parameters(), model.parameters(), strict=True):
        gradient = found.grad.full_tensor()
        differences.append(float((gradient - (0 if expected.grad is None else expected.grad)).abs().max()))
    return max(differences)


def _backward(task: Branches, model: torch.nn.Module, number: int) -> None:
    data = task.build_dataset("train")
    batch = task.collate([data[index] for index in range(3 * number + 1, 3 * number + 3)])
    task.loss(model, batch).backward()


if __name__ == "__main__":
    run_ranks(4, find)
