"""Activation checkpointing and compilation of the blocks that the plan names, block by block.

    order      apply_recompute, then apply_compile, then FSDP2
    a call     FSDP's hooks gather the parameters  ->  compiled (  forward, recomputed in the backward pass  )

Both replace the forward of each block from outside, so no module is added and no name in a state_dict changes. A copy
of such a block would run the original's forward, so copies must be made before. One step of `assemble`, which alone
calls it, when a model is built.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from shoal_workers.contract.layout import Recompute
from shoal_workers.contract.model import ParallelPlan
from shoal_workers.torch_internals import RECOMPUTE, is_in_backward, skip_side_effects_of_recomputation

_aten = torch.ops.aten
_KEPT = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten._scaled_mm.default,
        _aten._grouped_mm.default,
        _aten._scaled_grouped_mm.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
        _aten._flash_attention_forward.default,
        _aten._efficient_attention_forward.default,
    }
)
"""Results that are kept: matrix products and attention, nearly all arithmetic of a block for a part of its memory."""


def apply_recompute(model: nn.Module, plan: ParallelPlan, mode: Recompute) -> None:
    """Make every block recompute in the backward pass what `mode` does not keep; gradients keep the same bits.

    FULL: Chen et al. 2016. SELECTIVE: after Korthikanti et al. 2022, who recompute what costs much memory and little
    arithmetic. Randomness is replayed, so dropout drops the same elements again. The forward pass of a block must do
    the same if it runs twice, except for what it leaves out if `is_recomputing()`. Under zero-bubble schedules a block
    is recomputed for the gradient of its input and again for that of each weight: right, but slow.

    Raises:
        ValueError: plan.blocks names no modules.
    """
    match mode:
        case Recompute.NONE:
            return
        case Recompute.FULL:
            run = functools.partial(checkpoint, use_reentrant=False)
        case Recompute.SELECTIVE:
            run = functools.partial(checkpoint, use_reentrant=False, context_fn=_selective_contexts)
    for block in _blocks(model, plan, f"recompute: {mode}"):
        block.forward = _recomputed(block.forward, run)


def apply_compile(model: nn.Module, plan: ParallelPlan, backend: str = "inductor") -> None:
    """Compile every block's forward in place; equal blocks share one compilation.

    Hooks of a block, such as FSDP2's gathering, stay outside of the graph. Side effects of a forward pass that is also
    recomputed (counters) happen once, in the forward pass.

    Raises:
        ValueError: plan.blocks names no modules.
    """
    skip_side_effects_of_recomputation()
    for block in _blocks(model, plan, "compile"):
        block.forward = torch.compile(block.forward, backend=backend)


def is_recomputing() -> bool:
    """Whether the caller's forward pass is the second one, which runs in the backward pass for its activations only.

    For modules that count their inputs. In compiled code it is False; side effects are left out there in any case.
    """
    return not torch.compiler.is_compiling() and is_in_backward()


def _recomputed(forward: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    def recomputed(*arguments: Any, **named: Any) -> Any:
        return run(forward, *arguments, **named)

    return recomputed


class _Calls(dict[int, Any]):
    """Results of the calls of one operation, by number, or the mark that a call is to be recomputed.

    Keeps the first value of each number. torch removes a value once it has been used, but a zero-bubble schedule splits
    the backward pass of a block into one for its input and several for its weights, and each recomputes.

    A call that the forward pass did not make is made. If a block contains FSDP modules (experts), FSDP makes other
    calls the second time, which torch treats as a mismatch; matrix products are not among them.
    """

    def __setitem__(self, index: int, value: Any) -> None:
        self.setdefault(index, value)

    def get(self, index: int, default: Any = None) -> Any:
        return super().get(index, RECOMPUTE if default is None else default)


class _CallsByOperation(defaultdict[Any, _Calls]):
    def get(self, key: Any, default: Any = None) -> Any:
        return self[key]


def _selective_contexts() -> tuple[Any, Any]:
    forward, backward = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    forward.storage = backward.storage = _CallsByOperation(_Calls)
    return forward, backward


def _policy(context: SelectiveCheckpointContext, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _blocks(model: nn.Module, plan: ParallelPlan, setting: str) -> list[nn.Module]:
    if not plan.blocks:
        raise ValueError(
            f"{setting} works block by block, and the plan names no blocks. Name the model's nn.ModuleList of equal "
            "blocks in plan.blocks, or turn the setting off."
        )
    try:
        return list(model.get_submodule(plan.blocks).children())
    except AttributeError as error:
        raise ValueError(
            f"plan.blocks {plan.blocks!r} names no module of the model: {error}. Correct plan.blocks."
        ) from None
