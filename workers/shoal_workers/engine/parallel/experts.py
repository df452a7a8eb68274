"""The expert axis: whole experts over ep, and each expert's width over tp.

    every rank of ep     routes its own tokens, and has num_experts / ep experts
    forward              tokens sorted by expert -> all-to-all to the experts' ranks -> computed -> all-to-all back
    every rank of tp     routes the same tokens, and computes a summand of each output with its part of the width

After GShard (Lepikhin et al. 2020), dropless as MegaBlocks (Gale et al. 2022): splits are uneven and may be zero.
Parameters become DTensors on ep, tp or both. FSDP then splits them along another dim over the rest of the shards.
Gradients need no sum over ep, because the rank that has an expert processes the tokens of all ranks for it.

Called by `assemble` when a model is built, before recomputation and FSDP; needs no communication then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shoal_workers.contract.model import ParallelPlan
from shoal_workers.engine.parallel.cutting import cut, local
from shoal_workers.engine.parallel.exchange import copy, exchange_rows, gather_same, sum_scatter, swap, total
from shoal_workers.engine.parallel.head_tail import in_order, own_part
from shoal_workers.engine.parallel.names import matching


def apply_experts(
    model: nn.Module,
    plan: ParallelPlan,
    ep: DeviceMesh | None,
    tp: DeviceMesh | None = None,
    cp: DeviceMesh | None = None,
) -> list[nn.Parameter]:
    """Spread the modules that plan.experts names over the 1-D meshes; None is a degree of one.

    Such a module is called in one of two ways, and returns (N, D):
    - with tokens (N, D) sorted by expert, and counts (E,) int64;
    - as those of transformers: with tokens (N, D), the experts (N, k) int64 of each, and their weights (N, k). It sums
      over k, and its `num_experts` says how many experts its parameters have.
    Its own parameters have one slice per expert along dim 0, the same on all ranks. A stage of a pipeline may hold
    none.

    Under tp the module that contains it gets the whole sequence on every rank, and
    - with a pass-through `merge` (B, T, D) after its weighted sum it has the style `gather`: the sum over tp is
      computed and split along the sequence there, in one collective for all k experts of a token;
    - without `merge` it has the style `whole`: the sum over tp is computed at the experts' output.
    Experts without `hidden_dims`, {parameter: its dim that is as wide as an expert}, are whole on every rank of tp.

    A router in the same module may have `num_copies` and `token_counts`: see tasks/feed_forward.py.

    Returns:
        Parameters that are whole on every rank of tp, and whose gradient must be summed over tp before it is used.

    Raises:
        ValueError: parameters are in submodules, or ep does not divide the experts, or hidden_dims lacks a parameter.
    """
    partial: list[nn.Parameter] = []
    for name, module in matching(model, plan.experts) if plan.experts else []:
        owner = model.get_submodule(name.rpartition(".")[0])
        split = tp if hasattr(module, "hidden_dims") else None
        _cut_parameters(name, module, ep, split)
        merge = getattr(owner, "merge", None)
        if split is not None and isinstance(merge, nn.Module):
            _replace(merge, functools.partial(sum_scatter, dim=1, mesh=split))
            partial += _whole_parameters(model, plan, owner, module)
            for part in owner.modules():
                if hasattr(part, "num_copies"):
                    part.num_copies = split.size()  # type: ignore[assignment]
            split = None
        if ep is not None or tp is not None:
            _replace(module, _ExpertsForward(module, ep, split))
        if cp is not None:
            for part in owner.modules():
                if isinstance(token_counts := getattr(part, "token_counts", None), nn.Module):
                    _replace(token_counts, _WholeTokenCounts(token_counts, cp))
    return partial


class _ExpertsForward:
    """Replaces the forward of one module of experts. Sums the outputs over `tp` if it is given."""

    def __init__(self, module: nn.Module, ep: DeviceMesh | None, tp: DeviceMesh | None) -> None:
        self._module = module
        self._kind = type(module)  # before FSDP replaces the class by one that cannot be instantiated
        self._ep = ep
        self._tp = tp

    def __call__(self, tokens: Tensor, *routing: Tensor) -> Tensor:
        """`routing`: the counts, or the experts of each token and their weights."""
        if self._tp is None:
            return self._dispatch(tokens, *routing)
        return total(self._dispatch(copy(tokens, self._tp), *routing), self._tp)

    def _dispatch(self, tokens: Tensor, *routing: Tensor) -> Tensor:
        if self._ep is None:
            return self._compute(tokens, *routing)
        if len(routing) == 1:
            return self._exchange(tokens, routing[0], self._ep, self._compute)
        experts, weights = routing
        # Pair i is token i // k at its expert number i % k.
        expert_of = experts.flatten()
        pairs = expert_of.argsort(stable=True)
        counts = torch.bincount(expert_of, minlength=self._module.num_experts)  # type: ignore[arg-type]
        # Copies first: a gather that reads a token k times would add k gradients to one address, in no fixed order.
        copies = tokens.unsqueeze(1).expand(-1, experts.shape[1], -1).flatten(0, 1)
        outputs = self._exchange(copies.index_select(0, pairs), counts, self._ep, self._compute_unweighted)
        by_pair = outputs.new_zeros(copies.shape).index_copy(0, pairs, outputs)
        return (by_pair.view(*experts.shape, -1) * weights.unsqueeze(-1)).sum(1).to(tokens.dtype)

    def _exchange(
        self, tokens: Tensor, counts: Tensor, ep: DeviceMesh, compute: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Tokens sorted by expert -> the outputs of their experts, which other ranks compute."""
        wanted = counts.view(ep.size(), -1)  # tokens for each rank, for each of its experts
        given = swap(wanted, ep)  # tokens from each rank, for each expert of this rank
        # One copy to the host for both: the sizes of an exchange must be numbers.
        num_sent, num_received = torch.stack((wanted.sum(1), given.sum(1))).tolist()
        received = exchange_rows(tokens, num_sent, num_received, ep)
        by_expert = order_by_expert(given)
        answers = compute(received.index_select(0, by_expert), given.sum(0))
        # The argsort of a permutation is its inverse.
        by_sender = answers.index_select(0, by_expert.argsort())
        return exchange_rows(by_sender, num_received, num_sent, ep)

    def _compute_unweighted(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Tokens sorted by this rank's experts, each with one expert, whose weight its sender knows."""
        if not len(tokens):
            # The module would use none of its parameters, and this rank would take no part in the backward exchange.
            used = [local(parameter).flatten()[:0].sum() for parameter in self._module.parameters(recurse=False)]
            return tokens + torch.stack(used).sum()
        experts = torch.arange(len(counts), device=counts.device).repeat_interleave(counts).unsqueeze(1)
        return self._compute(tokens, experts, tokens.new_ones(len(tokens), 1))

    def _compute(self, tokens: Tensor, *routing: Tensor) -> Tensor:
        """The module's own forward, with plain tensors in the place of its DTensors.

        Calls the class's forward, because the module's hooks are running already, on a view that shares all other
        attributes with the module.
        """
        view = self._kind.__new__(self._kind)
        view.__dict__.update(self._module.__dict__, _parameters={})
        for name, parameter in self._module.named_parameters(recurse=False):
            part = local(parameter)
            view.__dict__[name] = part
            if self._ep is not None and "num_experts" in view.__dict__:
                view.__dict__["num_experts"] = len(part)
        out: Tensor = self._kind.forward(view, tokens, *routing)
        return out


class _WholeTokenCounts:
    """Counts over the whole sequence, of which each rank of cp has a part: chosen experts (..., T / cp, k)."""

    def __init__(self, token_counts: nn.Module, cp: DeviceMesh) -> None:
        self._count: Callable[[Tensor], tuple[Tensor, Tensor]] = token_counts.forward
        self._cp = cp

    def __call__(self, experts: Tensor) -> tuple[Tensor, Tensor]:
        load, positions = self._count(in_order(gather_same(experts.unsqueeze(0), 0, self._cp), -2))
        return load, own_part(positions, self._cp.get_local_rank(), self._cp.size(), -2)


def order_by_expert(given: Tensor) -> Tensor:
    """The order that sorts rows by expert. They are sorted by sender and then by expert; `given` (ep, experts) counts
    them."""
    experts = torch.arange(given.shape[1], device=given.device).repeat(given.shape[0])
    return experts.repeat_interleave(given.flatten()).argsort(stable=True)


def _cut_parameters(name: str, module: nn.Module, ep: DeviceMesh | None, tp: DeviceMesh | None) -> None:
    """Replace every parameter by this rank's part, as a DTensor."""
    if ep is None and tp is None:
        return
    parameters = dict(module.named_parameters(recurse=False))
    if below := [key for key, _ in module.named_parameters() if key not in parameters]:
        raise ValueError(
            f"plan.experts: {name} has the parameter {below[0]!r} in a submodule. Stack the experts' weights in "
            "parameters of its own, with one slice per expert along dim 0, or set parallelism.ep and tp to 1."
        )
    for key, parameter in parameters.items():
        cuts = [] if ep is None else [(ep, 0)]
        if tp is not None:
            cuts.append((tp, _hidden_dim(name, module, key)))
        if ep is not None and parameter.shape[0] % ep.size():
            count, degree = parameter.shape[0], ep.size()
            raise ValueError(
                f"plan.experts: {name}.{key} has {count} experts, which ep {degree} does not divide: "
                f"{count} = {count // degree} x {degree} + {count % degree}. Use an ep that divides {count}."
            )
        setattr(module, key, cut(parameter, cuts))


def _hidden_dim(name: str, module: nn.Module, key: str) -> int:
    dims: dict[str, int] = module.hidden_dims  # type: ignore[assignment]
    if key not in dims:
        raise ValueError(
            f"plan.experts: hidden_dims of {name} ({type(module).__name__}) lacks {key!r}; it has "
            f"{', '.join(dims) or 'no entries'}. Add the dim along which tp splits the width of an expert, or leave "
            "hidden_dims out to have the experts whole on every rank of tp."
        )
    return dims[key]


def _whole_parameters(model: nn.Module, plan: ParallelPlan, owner: nn.Module, experts: nn.Module) -> list[nn.Parameter]:
    """Parameters beside the experts that work on whole sequences and have no style of their own: the router's."""
    styled = {module for pattern in plan.tensor for _, module in matching(model, pattern)} - {owner}
    return [
        parameter
        for module in owner.modules()
        if module is not experts and module not in styled
        for parameter in module.parameters(recurse=False)
    ]


def _replace(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Replaces a module's forward. It is not compiled: a wait inside a compiled graph could not be left."""
    module.forward = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]
