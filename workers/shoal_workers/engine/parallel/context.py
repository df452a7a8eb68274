"""The context axis: one sequence is split over cp ranks. Attention still sees all of it, and so does the task's loss.

    model        all of it works on T / cp tokens: rank r has chunks r and 2 x cp - 1 - r (head_tail.py)
    attention    alone uses other tokens than its own: apply_context replaces the forward of the modules that the plan
                 names as attention, from outside
    a call       `ContextCall`: loss() has the whole batch, and the model computes one rank's tokens of it

    arguments    tensors with the sequence's length along a dim of plan.sequence are cut there; the others stay
    output       with a dim of the rank's tokens    the whole tensor: a SplitOutput, or gathered if it cannot be one
                 floating-point, without one        the mean over the ranks, as of a mean over the sequence
                 any other                          as it is

So loss() computes what one process computes, whatever it does with labels, masks and metrics, and every rank has the
same loss. Exact: every output and gradient equals that of one process, up to the order of floating-point sums. A model
that itself mixes tokens outside its attention modules is another matter: the proof of the layout finds it.

Shapes: B samples, H query heads, G key and value heads, T tokens of the whole sequence, K and V widths of a head.
`assemble` applies the axis, and installs the `ContextCall` around a model that is not split into stages;
`PipelinePasses` applies it to the calls that it has caught.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.distributed.device_mesh import DeviceMesh

from shoal_workers.contract.layout import ContextMethod
from shoal_workers.contract.model import ParallelPlan
from shoal_workers.engine.parallel.exchange import gather_same, gather_sum, swap, total
from shoal_workers.engine.parallel.head_tail import by_rank, chunks_of, in_order, own_part
from shoal_workers.engine.parallel.names import matching
from shoal_workers.engine.parallel.split_output import Split, SplitOutput, split_output
from shoal_workers.torch_internals import tree_leaves, tree_map


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
    attentions = matching(model, plan.attention)
    if not attentions:
        raise ValueError(
            f"plan.attention {plan.attention!r} names no module of the model; with cp {mesh.size()} attention would "
            f"see only 1 / {mesh.size()} of the tokens. Name the modules called with (queries, keys, values), or set "
            "parallelism.cp to 1."
        )
    for _, module in attentions:
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


_TOKENS = 1
"""The dim that a SplitOutput can be split along."""


class ContextCall:
    """One rank's view of the calls of one model, one call at a time: `arguments`, the forward pass, then `output`."""

    def __init__(self, sequence: Mapping[str, int], mesh: DeviceMesh) -> None:
        self._dims = tuple(dict.fromkeys(sequence.values()))
        self._names = ", ".join(f"{name!r}: {dim}" for name, dim in sequence.items()) or "nothing"
        self._mesh = mesh
        self._degree = mesh.size()
        self._length = 0
        """Tokens of the whole sequence in the call that runs."""

    def install(self, model: nn.Module) -> None:
        """Surrounds the model's forward. The task's hooks see whole arguments before it, and the whole output after
        it."""
        model.register_forward_pre_hook(lambda _, args, kwargs: self.arguments(args, kwargs), with_kwargs=True)
        model.register_forward_hook(lambda _module, _args, output: self.output(output), prepend=True)

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns this rank's part of the arguments.

        Raises:
            ValueError: no tensor has a dim of plan.sequence, or the degree does not divide its length.
        """
        tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        lengths = (tensor.shape[dim] for tensor in tensors for dim in self._dims if -tensor.ndim <= dim < tensor.ndim)
        length = self._length = next(lengths, 0)
        if not length:
            raise ValueError(
                f"loss() calls the model with no tensor that has a dim of plan.sequence ({self._names}), along which "
                f"cp {self._degree} cuts it. Correct plan.sequence, or set parallelism.cp to 1."
            )
        num_chunks = 2 * self._degree
        if length % num_chunks:
            raise ValueError(
                f"loss() calls the model with {length} tokens (plan.sequence: {self._names}), which cp {self._degree} "
                f"cannot split into 2 x {self._degree} equal chunks: {length} = {length // num_chunks} x {num_chunks} "
                f"+ {length % num_chunks}. Use a multiple of {num_chunks}."
            )
        own_args, own_kwargs = tree_map(self.cut, (args, kwargs))
        return own_args, own_kwargs

    def output(self, output: Any) -> Any:
        """What one process would return."""
        if dataclasses.is_dataclass(output) and not isinstance(output, type | Mapping):
            fields = {field.name: self.output(getattr(output, field.name)) for field in dataclasses.fields(output)}
            return dataclasses.replace(output, **fields)
        return tree_map(self._joined, output)

    def cut(self, value: Any) -> Any:
        """Return this rank's part of one of the arguments."""
        if not isinstance(value, Tensor):
            return value
        for dim in self._dims:
            if -value.ndim <= dim < value.ndim and value.shape[dim] == self._length:
                return own_part(value, self._mesh.get_local_rank(), self._degree, dim)
        return value

    def _joined(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        own_length = self._length // self._degree
        if value.ndim > _TOKENS and value.shape[_TOKENS] == own_length and value.is_floating_point():
            return split_output(value, Split(cp=self._mesh))
        if isinstance(value, SplitOutput):
            value = value.whole()
        for dim in (_TOKENS, *self._dims):
            if -value.ndim <= dim < value.ndim and value.shape[dim] == own_length:
                parts = gather_same(value.unsqueeze(0), 0, self._mesh)
                return in_order(parts, dim if dim < 0 else dim - value.ndim)
        return total(value, self._mesh) / self._degree if value.is_floating_point() else value
