"""The tensor axis (Shoeybi et al. 2019), with sequence parallelism (Korthikanti et al. 2022) if the plan has any.

    residual stream     (B, T / tp, D) on each rank: norms and additions work on a part of the sequence
    gather              the whole sequence goes into attention and feed-forward; their input gradients are summed
    column, row         heads and hidden width are split; the sum of a row layer is split along the sequence again
    embedding, head     the vocabulary is split; to the loss the logits are whole (split_output.py)

Without `gather` and `sequence` in the plan, activations between the split layers are whole on every rank.

Split parameters become DTensors over the axis, so that FSDP2 and checkpoints know their layout; forward passes compute
on their local parts. Every rank has built the same weights, so splitting needs no communication. Called by `assemble`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shoal_workers.contract.model.plan import ParallelPlan, TensorStyle
from shoal_workers.engine.parallel.cutting import cut, local
from shoal_workers.engine.parallel.exchange import copy, gather_same, gather_sum, own_part, sum_scatter, total
from shoal_workers.engine.parallel.names import matching
from shoal_workers.engine.parallel.split_output import Split, split_output
from shoal_workers.engine.parallel.stage_forward import Elsewhere
from shoal_workers.engine.parallel.tensor_rules import cuts_sequence, is_below, modules_of, plain

_SEQUENCE_DIM = 1


def apply_tensor(model: nn.Module, plan: ParallelPlan, mesh: DeviceMesh) -> list[nn.Parameter]:
    """Split the modules that `plan.tensor` names over the 1-D `mesh`, in place. `plan` has passed `tensor_rules`.

    Returns:
        Parameters that are whole on every rank but were applied to a part of the sequence, or of the heads, only:
        their gradients must be summed over `mesh` before they are used.
    """
    cutter = _Cutter(mesh, is_sequential=cuts_sequence(plan))
    partial: list[nn.Parameter] = []
    gathers = modules_of(model, plan, TensorStyle.GATHER)
    for pattern, style in plan.tensor.items():
        for name, module in matching(model, pattern):
            if isinstance(module, Elsewhere):  # another pipeline stage has it
                continue
            match style:
                case TensorStyle.COLUMN:
                    cutter.column(plain(module, nn.Linear, name, style))
                case TensorStyle.ROW:
                    cutter.row(plain(module, nn.Linear, name, style))
                case TensorStyle.EMBEDDING:
                    cutter.embedding(plain(module, nn.Embedding, name, style))
                case TensorStyle.HEAD:
                    cutter.head(plain(module, nn.Linear, name, style), gets_whole=is_below(name, gathers))
                case TensorStyle.GATHER:
                    cutter.gather(module)
                case TensorStyle.WHOLE:
                    cutter.whole(module)
                case TensorStyle.SEQUENCE | TensorStyle.PARTIAL:
                    partial += module.parameters()
    cutter.forget_wholes()
    if cuts_sequence(plan):
        partial += _on_a_part(model, plan)
    return [parameter for parameter in partial if not isinstance(parameter, DTensor)]


def _on_a_part(model: nn.Module, plan: ParallelPlan) -> list[nn.Parameter]:
    """All parameters that no rank applies to the whole sequence: under sequence parallelism those of every module
    without the style `whole`. Also the bias of a row layer, which is added to a part of the sum; scales and gates of
    the blocks themselves; and what stands before a column layer, whose gradient is that of the rank's own columns.

    Experts have their own rule, see `apply_experts`."""
    wholes = modules_of(model, plan, TensorStyle.WHOLE)
    experts = dict(matching(model, plan.experts)) if plan.experts else {}
    return [
        parameter
        for name, module in model.named_modules()
        if not is_below(name, wholes) and not is_below(name, experts)
        for parameter in module.parameters(recurse=False)
    ]


class _Cutter:
    """Splits single modules over one group."""

    def __init__(self, mesh: DeviceMesh, *, is_sequential: bool) -> None:
        self._mesh = mesh
        self._is_sequential = is_sequential
        self._cut: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        """By id of the whole parameter, which is kept so that its id is not reused: tied weights stay one parameter."""

    def column(self, module: nn.Linear) -> None:
        self._split(module, "weight", 0)
        self._split(module, "bias", 0)

        def forward(x: Tensor) -> Tensor:
            return F.linear(self._shared(x), local(module.weight), _local_or_none(module.bias))

        _replace(module, forward)

    def row(self, module: nn.Linear) -> None:
        self._split(module, "weight", 1)

        def forward(x: Tensor) -> Tensor:
            summed = self._joined(F.linear(x, local(module.weight)))
            return summed if module.bias is None else summed + module.bias

        _replace(module, forward)

    def embedding(self, module: nn.Embedding) -> None:
        chunk = -(-module.num_embeddings // self._mesh.size())
        first = chunk * self._mesh.get_local_rank()
        self._split(module, "weight", 0)
        num_rows, padding, by_frequency = module.num_embeddings, module.padding_idx, module.scale_grad_by_freq

        def forward(tokens: Tensor) -> Tensor:
            rows = local(module.weight)
            index = tokens - first
            is_here = (index >= 0) & (index < rows.shape[0])
            found = F.embedding(index.where(is_here, 0), rows)
            if padding is not None:  # torch: this row gets no gradient
                found = _scaled_gradient(found, tokens != padding)
            if by_frequency:  # torch: of a token that occurs n times, each gradient counts 1 / n
                found = _scaled_gradient(found, 1 / torch.bincount(tokens.flatten(), minlength=num_rows)[tokens])
            return self._joined(found * is_here.unsqueeze(-1))

        _replace(module, forward)

    def head(self, module: nn.Linear, *, gets_whole: bool) -> None:
        """`gets_whole`: inside a `gather`, which has gathered the sequence and sums the gradient."""
        self._split(module, "weight", 0)
        self._split(module, "bias", 0)
        num_outputs = module.out_features

        def forward(x: Tensor) -> Tensor:
            if gets_whole:
                whole = x
            else:
                whole = gather_sum(x, _SEQUENCE_DIM, self._mesh) if self._is_sequential else copy(x, self._mesh)
            logits = F.linear(whole, local(module.weight), _local_or_none(module.bias))
            return split_output(logits, Split(tp=self._mesh, width=num_outputs))

        _replace(module, forward)

    def gather(self, module: nn.Module) -> None:
        """The module gets the whole sequence; the row layer in it splits the output."""
        _with_first_input(module, lambda part: gather_sum(part, _SEQUENCE_DIM, self._mesh))

    def whole(self, module: nn.Module) -> None:
        """Every rank computes the whole module, on the whole sequence."""
        _with_first_input(module, lambda part: gather_same(part, _SEQUENCE_DIM, self._mesh))
        module.register_forward_hook(lambda _module, _inputs, output: own_part(output, _SEQUENCE_DIM, self._mesh))

    def forget_wholes(self) -> None:
        """Free the whole parameters: the forwards that refer to this object would keep them in memory."""
        self._cut.clear()

    def _shared(self, x: Tensor) -> Tensor:
        """Input of a column layer. If the module is inside a `gather`, that one sums the gradient."""
        return x if self._is_sequential else copy(x, self._mesh)

    def _joined(self, partial: Tensor) -> Tensor:
        return sum_scatter(partial, _SEQUENCE_DIM, self._mesh) if self._is_sequential else total(partial, self._mesh)

    def _split(self, module: nn.Module, name: str, dim: int) -> None:
        parameter = getattr(module, name)
        if parameter is None:
            return
        if id(parameter) not in self._cut:
            self._cut[id(parameter)] = parameter, cut(parameter, [(self._mesh, dim)])
        setattr(module, name, self._cut[id(parameter)][1])


def _local_or_none(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else local(parameter)


def _replace(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
    module.forward = forward


def _with_first_input(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Before each call change the first argument, whether it is given by position or by name."""

    def before(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if inputs:
            return (change(inputs[0]), *inputs[1:]), named
        first = next(iter(named))
        return inputs, {**named, first: change(named[first])}

    module.register_forward_pre_hook(before, with_kwargs=True)


class _ScaledGradient(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (factor,) = ctx.saved_tensors
        return gradients[0] * factor.unsqueeze(-1).to(gradients[0].dtype), None


_apply_scaled_gradient: Callable[..., Tensor] = torch.compiler.disable(_ScaledGradient.apply)  # type: ignore[no-untyped-call]


def _scaled_gradient(rows: Tensor, factor: Tensor) -> Tensor:
    """`rows` (..., D); their gradient is multiplied by `factor` (...)."""
    return _apply_scaled_gradient(rows, factor)
