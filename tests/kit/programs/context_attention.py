"""Program of four gloo processes: attention over split sequences, compared with attention over full sequences.

    python context_attention.py STORE_FILE

Rank 0 prints one JSON line {case: largest difference over all ranks, outputs and gradients}. The ranks are forked from
one process that has imported everything and has no thread yet.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import largest, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal_workers.contract.layout import ContextMethod
from shoal_workers.contract.model import ParallelPlan
from shoal_workers.engine.parallel.context import ContextCall, apply_context
from shoal_workers.engine.parallel.head_tail import own_part

HEADS = ((4, 4), (4, 2), (4, 1), (12, 3))
BATCH, TOKENS, WIDTH = 2, 32, 8
PLAN = ParallelPlan(attention="layers.*.core", sequence={"tokens": 1, "labels": 1, "positions": 0})


class Core(nn.Module):
    """Causal attention of (B, H, T, K), (B, G, T, K), (B, G, T, V)."""

    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=gqa)


class Layer(nn.Module):
    """Attention and a feed-forward layer, without any code for ranks."""

    def __init__(self, dim: int = 32, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        self.sizes = (dim, dim // heads * kv_heads, dim // heads * kv_heads)
        self.head_dim = dim // heads
        self.mix = nn.Linear(dim, sum(self.sizes))
        self.core = Core()
        self.out = nn.Linear(dim, dim)
        self.feed = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in self.mix(x).split(self.sizes, -1)
        )
        mixed = self.core(rotate(q, rotation), rotate(k, rotation), v)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.feed(x)


class Net(nn.Module):
    """A tiny language model with the positions of its tokens as input."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(32, 50)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        frequency = 100.0 ** -(torch.arange(4) / 4)
        rotation = torch.polar(torch.ones(()), positions[:, None] * frequency)  # (T, K / 2)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, rotation)
        return self.head(x)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * rotation).flatten(-2)


def attention_differs(mesh: DeviceMesh, method: ContextMethod, heads: tuple[int, int], dtype: torch.dtype) -> float:
    """Largest difference of one rank's outputs and gradients from those of the full sequence in fp32."""
    rank, degree = mesh.get_local_rank(), mesh.size()
    torch.manual_seed(7)
    shapes = [(BATCH, count, TOKENS, WIDTH) for count in (heads[0], heads[1], heads[1])]
    shapes[2] = (*shapes[2][:3], WIDTH - 2)  # values of another width
    operands = [torch.randn(shape).to(dtype) for shape in shapes]
    upstream = torch.randn(BATCH, heads[0], TOKENS, WIDTH - 2).to(dtype) / 4
    wholes = [operand.float().clone().requires_grad_() for operand in operands]
    expected = Core(scale=0.3)(*wholes)
    expected.backward(upstream.float())
    parts = [own_part(operand, rank, degree, 2).requires_grad_() for operand in operands]
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"core": Core(scale=0.3)})])})
    apply_context(model, PLAN, mesh, method)
    found = model.get_submodule("layers.0.core")(*parts)
    assert found.dtype == dtype
    found.backward(own_part(upstream, rank, degree, 2))
    pairs = [(own_part(expected, rank, degree, 2), found)]
    pairs += [(own_part(w.grad, rank, degree, 2), p.grad) for w, p in zip(wholes, parts, strict=True)]
    return max((a - b.float()).abs().max().item() for a, b in pairs)


def model_differs(mesh: DeviceMesh, method: ContextMethod) -> float:
    """By how much the loss over all ranks, and the sum of their gradients, differ from those of one process."""
    torch.manual_seed(8)
    model = Net()
    text = torch.randint(50, (BATCH, TOKENS + 1))
    batch = {"tokens": text[:, :-1], "labels": text[:, 1:], "positions": torch.arange(TOKENS)}
    expected = loss_of(model, batch)
    desired = torch.autograd.grad(expected, list(model.parameters()))
    names = list(model.state_dict())
    apply_context(model, PLAN, mesh, method)
    ContextCall(PLAN.sequence, mesh).install(model)
    loss = loss_of(model, batch)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    assert list(model.state_dict()) == names
    for gradient in gradients:
        dist.all_reduce(gradient, group=mesh.get_group())
    pairs = [(expected, loss), *zip(desired, gradients, strict=True)]
    return max((a - b).abs().max().item() for a, b in pairs)


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["tokens"], batch["positions"]).flatten(0, 1), batch["labels"].flatten())


def cases() -> Iterator[tuple[str, float]]:
    meshes = [init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))["cp"]]
    meshes.append(init_device_mesh("cpu", (4,), mesh_dim_names=("cp",)))
    for mesh in meshes:
        for method in ContextMethod:
            for heads in HEADS:
                for dtype in (torch.float32, torch.bfloat16):
                    name = f"{method} cp{mesh.size()} {heads[0]}/{heads[1]} {str(dtype).removeprefix('torch.')}"
                    yield name, attention_differs(mesh, method, heads, dtype)
            yield f"{method} cp{mesh.size()} model", model_differs(mesh, method)


if __name__ == "__main__":
    run_ranks(4, lambda _rank: largest(cases()))
