"""Program of two gloo processes: trains a tiny model on FSDP2, on split sequences, or both, with options of the engine.

    python option_losses.py STORE_FILE

Rank 0 prints one JSON line {case: {"losses": of five steps, "counts": tokens that each block has counted}}. The ranks
are forked from one process that has imported everything and has no thread yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shoal_workers.contract.layout import ContextMethod, Recompute
from shoal_workers.contract.model import ParallelPlan
from shoal_workers.contract.spec import Precision
from shoal_workers.engine.parallel.context import ContextCall, apply_context
from shoal_workers.engine.parallel.recompute import apply_compile, apply_recompute, is_recomputing
from shoal_workers.engine.parallel.sharding import mixed_precision

PLAN = ParallelPlan(blocks="blocks", attention="blocks.*.core", sequence={"tokens": 1, "labels": 1, "positions": 0})
NUM_STEPS, BATCH, TOKENS, VOCABULARY, DIM = 5, 4, 16, 40, 32


@dataclass(frozen=True, slots=True)
class Case:
    axis: str = "fsdp"
    """fsdp, tp, or a context method."""
    recompute: Recompute = Recompute.NONE
    compiles: bool = False
    compute: Precision = Precision.FP32
    reduction: Precision = Precision.FP32


CASES = {
    "fsdp": Case(),
    "fsdp selective": Case(recompute=Recompute.SELECTIVE),
    "fsdp full": Case(recompute=Recompute.FULL),
    "fsdp compiled": Case(compiles=True),
    "fsdp selective compiled": Case(recompute=Recompute.SELECTIVE, compiles=True),
    "fsdp full compiled": Case(recompute=Recompute.FULL, compiles=True),
    "fsdp reduces bf16": Case(reduction=Precision.BF16),
    "fsdp reduces fp16": Case(reduction=Precision.FP16),
    "fsdp bf16": Case(compute=Precision.BF16),
    "fsdp bf16 reduces bf16": Case(compute=Precision.BF16, reduction=Precision.BF16),
    "tp": Case(axis="tp"),
    "tp selective": Case(axis="tp", recompute=Recompute.SELECTIVE),
    "tp full": Case(axis="tp", recompute=Recompute.FULL),
}
for method in ContextMethod:
    CASES[f"{method}"] = Case(axis=method)
    CASES[f"{method} selective"] = Case(axis=method, recompute=Recompute.SELECTIVE)
    CASES[f"{method} full"] = Case(axis=method, recompute=Recompute.FULL)
    CASES[f"{method} full compiled"] = Case(axis=method, recompute=Recompute.FULL, compiles=True)


class Core(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.mix = nn.Linear(DIM, 3 * DIM)
        self.core = Core()
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if not is_recomputing():
            self.seen += x.shape[0] * x.shape[1]
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.mix(self.norm(x)).chunk(3, -1))
        x = x + self.core(q, k, v).transpose(1, 2).flatten(2)
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.place = nn.Embedding(TOKENS, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.place(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(case: Case, mesh: DeviceMesh) -> dict[str, list[float]]:
    """Losses of the global batch by step, and the counts of the blocks."""
    torch._dynamo.reset()
    torch.manual_seed(5)
    model = Net()
    names = list(model.state_dict())
    build(model, case, mesh)
    assert list(model.state_dict()) == names
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    text = torch.randint(VOCABULARY, (BATCH, TOKENS + 1))
    batch = {"tokens": text[:, :-1], "labels": text[:, 1:], "positions": torch.arange(TOKENS)}
    rank, degree = mesh.get_local_rank(), mesh.size()
    losses = []
    for _ in range(NUM_STEPS):
        if case.axis == "fsdp":
            part = {
                name: tensor if name == "positions" else tensor.chunk(degree)[rank] for name, tensor in batch.items()
            }
        else:
            part = batch
        loss = loss_of(model, part) / (degree if case.axis == "fsdp" else 1)
        loss.backward()
        reported = loss.detach()
        if case.axis == "fsdp":
            dist.all_reduce(reported)
        if case.axis in list(ContextMethod):
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        losses.append(reported.item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "counts": [float(block.seen) for block in model.blocks]}


def build(model: Net, case: Case, mesh: DeviceMesh) -> None:
    if case.axis == "tp":
        for block in model.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    elif case.axis != "fsdp":
        apply_context(model, PLAN, mesh, ContextMethod(case.axis))
        ContextCall(PLAN.sequence, mesh).install(model)
    apply_recompute(model, PLAN, case.recompute)
    if case.compiles:
        apply_compile(model, PLAN, backend="aot_eager")
    if case.axis == "fsdp":
        policy = mixed_precision(case.compute, case.reduction)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["tokens"], batch["positions"])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())


def find(_rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("only",))
    return {name: train(case, mesh) for name, case in CASES.items()}


if __name__ == "__main__":
    run_ranks(2, find)
