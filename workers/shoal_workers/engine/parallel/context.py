"""The context axis: one sequence is split over cp ranks, and attention still sees all of it.

    model        all of it works on T / cp tokens: rank r has chunks r and 2 x cp - 1 - r (head_tail, context_call)
    attention    alone uses other tokens than its own: apply_context replaces the forward of the modules that the plan
                 names as attention, from outside

Shapes: B samples, H query heads, G key and value heads, T tokens of the whole sequence, K and V widths of a head.
Exact: every output and gradient equals that of one process, up to the order of floating-point sums. Called by
`assemble`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.distributed.device_mesh import DeviceMesh

from shoal_workers.contract.layout import ContextMethod
from shoal_workers.contract.model.plan import ParallelPlan
from shoal_workers.engine.parallel.exchange import gather_sum, swap
from shoal_workers.engine.parallel.head_tail import by_rank, chunks_of, in_order
from shoal_workers.engine.parallel.names import matching


def apply_context(model: nn.Module, plan: ParallelPlan, mesh: DeviceMesh, method: ContextMethod) -> None:
    """Make every module that plan.attention names compute this rank's rows of the whole sequence's causal attention.

    Such a module is called with queries (B, H, T / cp, K), keys (B, G, T / cp, K) and values (B, G, T / cp, V), rotated
    by their positions in the whole sequence, and returns (B, H, T / cp, V). Scores are scaled by 1 / sqrt(K), or by the
    module's attribute `scale`. `mesh` is 1-D; all its ranks must run the same modules in the same order. Needs no
    communication.

    Raises:
        ValueError: plan.attention matches no module.
    """
    if mesh.size() == 1:
        return
    found = matching(model, plan.attention)
    if not found:
        raise ValueError(
            f"plan.attention {plan.attention!r} names no module of the model; with cp {mesh.size()} attention would "
            f"see only 1 / {mesh.size()} of the tokens. Name the modules called with (queries, keys, values), or set "
            "parallelism.cp to 1."
        )
    for _, module in found:
        core = _Core(mesh, method, getattr(module, "scale", None))
        # Not compiled: a wait inside a compiled graph could not be left.
        module.forward = torch.compiler.disable(core)  # type: ignore[no-untyped-call]


class _Core:
    """Replaces the forward of one attention module."""

    def __init__(self, mesh: DeviceMesh, method: ContextMethod, scale: float | None) -> None:
        self._mesh = mesh
        self._method = method
        self._scale = scale

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        match self._method:
            case ContextMethod.ALL_GATHER:
                return self._all_gather(q, k, v)
            case ContextMethod.ULYSSES:
                return self._ulysses(q, k, v)

    def _all_gather(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Own queries, and keys and values of all ranks (Dubey et al. 2024, section 3.3.2)."""
        both = in_order(gather_sum(torch.cat((k, v), -1).unsqueeze(0), 0, self._mesh), -2)  # (B, G, T, K + V)
        keys, values = both.split((k.shape[-1], v.shape[-1]), -1)  # type: ignore[no-untyped-call]
        return attend(q, keys, values, self._mesh.get_local_rank(), self._mesh.size(), self._scale)

    def _ulysses(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """All tokens of H / cp heads, between two exchanges (DeepSpeed-Ulysses, Jacobs et al. 2023)."""
        degree = self._mesh.size()
        if q.shape[1] % degree:
            raise ValueError(
                f"context: ulysses divides a rank's heads among cp ranks, and {q.shape[1]} heads are not a multiple of "
                f"cp {degree}: {q.shape[1]} = {q.shape[1] // degree} x {degree} + {q.shape[1] % degree}. Use context: "
                f"all_gather, or a cp of {math.gcd(q.shape[1], degree)}."
            )
        # lcm(G, cp) heads divide by cp, and divide H, which is a multiple of both: each query head keeps its own keys.
        copies = math.lcm(k.shape[1], degree) // k.shape[1]
        operands = [q, *(x.repeat_interleave(copies, 1) if copies > 1 else x for x in (k, v))]
        # Each (cp, B, heads / cp, T / cp, .).
        mine = [x.unflatten(1, (degree, -1)).transpose(0, 1) for x in operands]  # type: ignore[no-untyped-call]
        rows = torch.cat([x.flatten(1) for x in mine], 1)  # one exchange for all three
        parts = swap(rows, self._mesh).split([x[0].numel() for x in mine], 1)  # type: ignore[no-untyped-call]
        q, k, v = (in_order(part.reshape(x.shape), -2) for part, x in zip(parts, mine, strict=True))
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self._scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return swap(by_rank(mixed, degree, -2), self._mesh).transpose(0, 1).flatten(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, rank: int, degree: int, scale: float | None = None) -> Tensor:
    """Causal attention of one rank's queries (B, H, T / degree, K) to all keys (B, G, T, K) and values (B, G, T, V).

    Chunk by chunk, each over the keys up to its own end only: about half of all scores are never computed, and every
    rank computes the same number.
    """
    size = k.shape[2] // (2 * degree)
    rows = [
        _attend_from_the_end(chunk, k[:, :, : (index + 1) * size], v[:, :, : (index + 1) * size], scale)
        for index, chunk in zip(chunks_of(rank, degree), q.chunk(2, 2), strict=True)
    ]
    return torch.cat(rows, 2)


def _attend_from_the_end(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Causal attention of queries that belong to the last tokens of `k` and `v`."""
    num_queries, num_keys = q.shape[2], k.shape[2]
    enable_gqa = q.shape[1] != k.shape[1]
    if num_queries == num_keys:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa)
    if _has_flash_kernel(q, k, v, enable_gqa):
        # On a GPU this kernel's causal mask ends at the last key, unlike that of scaled_dot_product_attention.
        # torch.nn.attention.bias.causal_lower_right uses it too, but cannot be created under selective recomputation.
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out: Tensor = flash(q, k, v, 0.0, is_causal=True, return_debug_mask=False, scale=scale)[0]
        return out
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device).tril(num_keys - num_queries)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)


def _has_flash_kernel(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> bool:
    if q.device.type != "cuda" or q.shape[-1] % 8 or q.shape[-1] != v.shape[-1]:
        return False
    return can_use_flash_attention(SDPAParams(q, k, v, None, 0.0, False, enable_gqa))
