"""Program: experts that are called as those of transformers are, on one rank and over ep 2; prints the largest
differences of outputs and gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from ranks import largest, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from shoal_workers.contract.model import ParallelPlan
from shoal_workers.engine.parallel.experts import apply_experts

EXPERTS, WIDTH, TOKENS = 4, 8, 6


class Experts(nn.Module):
    """As transformers has them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        assert len(self.down) == self.num_experts
        out = torch.zeros_like(tokens)
        for expert in chosen.unique().tolist():
            rows, place = torch.where(chosen == expert)
            out = out.index_add(0, rows, (tokens[rows] @ self.down[expert]).tanh() * weights[rows, place, None])
        return out


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.experts = Experts()


def _difference(ep: DeviceMesh, rank: int, chosen: Tensor, *, is_frozen: bool = False) -> float:
    """Each rank has half of the tokens."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randn(2 * TOKENS, WIDTH, generator=generator)
    weights = torch.rand(2 * TOKENS, chosen.shape[1], generator=generator)
    own = slice(rank * TOKENS, (rank + 1) * TOKENS)
    whole, cut = Layer(), Layer()
    apply_experts(cut, ParallelPlan(experts="experts", num_experts=EXPERTS), ep)
    given, given_own = (part.clone().requires_grad_(not is_frozen) for part in (tokens, tokens[own]))
    heavy, heavy_own = (part.clone().requires_grad_() for part in (weights, weights[own]))
    expected = whole.experts(given, chosen, heavy)
    expected.square().sum().backward()
    found = cut.experts(given_own, chosen[own], heavy_own)
    found.square().sum().backward()
    pairs = [(expected[own], found), (heavy.grad[own], heavy_own.grad)]  # type: ignore[index]
    if not is_frozen:
        pairs.append((given.grad[own], given_own.grad))  # type: ignore[index,arg-type]
    gradient = cut.experts.down.grad
    assert isinstance(gradient, DTensor)
    parts = EXPERTS // 2
    pairs.append((whole.experts.down.grad[rank * parts : (rank + 1) * parts], gradient.to_local()))  # type: ignore[index]
    return max(float((one.detach() - other.detach()).abs().max()) for one, other in pairs)


def find(rank: int) -> dict[str, float]:
    ep = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    generator = torch.Generator().manual_seed(3)
    anywhere = torch.stack([torch.randperm(EXPERTS, generator=generator)[:2] for _ in range(2 * TOKENS)])
    cases = {
        "all experts": _difference(ep, rank, anywhere),
        "one rank has all tokens": _difference(ep, rank, anywhere % 2 + torch.zeros_like(anywhere)),
        "frozen tokens": _difference(ep, rank, torch.zeros(2 * TOKENS, 1, dtype=torch.int64), is_frozen=True),
    }
    dist.barrier()
    return largest(cases.items())


if __name__ == "__main__":
    run_ranks(2, find)
