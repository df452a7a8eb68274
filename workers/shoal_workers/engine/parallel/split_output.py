"""A model's output of which each rank has a part: some of the tokens (cp), some of the vocabulary (tp), or both. To
the task's loss it is the whole tensor.

    shape, dtype, ...       those of the whole
    float, flatten, x / 2   stay split; so do the views that losses use: (B, T, V) as (B x T, V) or (B, V, T)
    F.cross_entropy, argmax over the last dim    are computed on the parts; their result is whole, one value per token
    everything else         gathers the whole tensor, once, and computes on it: slower, and always right

Every rank of the axes runs the same loss on the same batch, so all of them gather at the same places and get the same
loss. A gradient of the whole is taken apart again: each rank goes on with its own part of it, so that the sum of all
ranks' gradients is that of one process. Made by the layers with the style `head` and, under cp, around the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function
from torch.distributed.device_mesh import DeviceMesh

from shoal_workers.engine.parallel.exchange import gather_same, total
from shoal_workers.engine.parallel.head_tail import in_order, own_part
from shoal_workers.torch_internals import tree_map, without_torch_function, wrapper_tensor

_TOKENS = 1
"""The dim of the sequence."""


@dataclass(frozen=True, slots=True)
class Split:
    """How the whole tensor (B, T, ..., V) is split over ranks. At least one mesh is given."""

    tp: DeviceMesh | None = None
    """The last dim is split as torch.chunk splits it."""
    width: int = 0
    """The whole width of the last dim, if tp splits it."""
    cp: DeviceMesh | None = None
    """Dim 1 is split, see head_tail.py."""

    def shape(self, part: Sequence[int]) -> torch.Size:
        """The shape of the whole."""
        whole = list(part)
        if self.tp is not None:
            whole[-1] = self.width
        if self.cp is not None:
            whole[_TOKENS] *= self.cp.size()
        return torch.Size(whole)

    @property
    def first(self) -> int:
        """This rank's first place in the last dim."""
        return 0 if self.tp is None else min(self.width, self.tp.get_local_rank() * self._chunk)

    @property
    def _chunk(self) -> int:
        assert self.tp is not None
        return -(-self.width // self.tp.size())

    def gathered(self, part: Tensor) -> Tensor:
        """The whole tensor, on every rank."""
        whole = part
        if self.tp is not None:
            padded = F.pad(whole, (0, self._chunk - whole.shape[-1]))
            whole = gather_same(padded, -1, self.tp).narrow(-1, 0, self.width)
        return self.all_tokens(whole).contiguous()

    def own(self, whole: Tensor) -> Tensor:
        """This rank's part of the whole."""
        part = self.own_tokens(whole)
        if self.tp is None:
            return part
        last = min(self.width, (self.tp.get_local_rank() + 1) * self._chunk)
        return part[..., self.first : last]

    def all_tokens(self, part: Tensor) -> Tensor:
        """(B, T / cp, ...) of each rank -> (B, T, ...)."""
        if self.cp is None:
            return part
        parts = gather_same(part.unsqueeze(0), 0, self.cp)
        return in_order(parts, _TOKENS - part.ndim)

    def own_tokens(self, whole: Tensor) -> Tensor:
        """Inverse of `all_tokens`, of a tensor that every rank has."""
        if self.cp is None:
            return whole
        return own_part(whole, self.cp.get_local_rank(), self.cp.size(), _TOKENS)


class SplitOutput(Tensor):
    """See the module. Made by `split_output`."""

    part: Tensor
    """This rank's part, in the dims of the model's output, with its graph."""
    _split: Split
    _view: str
    """What the model's output (B, T, ..., V) is shown as: "as it is", "rows" (B x T x ..., V), or "classes second" (B,
    V, T, ...)."""
    _of: SplitOutput | None
    """What this is a view of: the two share the whole's memory, once it is gathered."""
    _whole: Tensor | None

    @staticmethod
    def __new__(cls, part: Tensor, split: Split, view: str) -> SplitOutput:
        shape = _shape_of(split.shape(part.shape), view)
        output: SplitOutput = wrapper_tensor(
            cls, shape, dtype=part.dtype, device=part.device, requires_grad=part.requires_grad
        )
        return output

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        is_attribute = name == "__get__"
        if is_attribute:
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in _OF_THE_WRAPPER or (is_attribute and name not in _VALUES):
            with without_torch_function():
                return func(*args, **kwargs)
        first = args[0] if args else None
        own = first if name in _ON_PARTS and isinstance(first, SplitOutput) else None
        if own is not None and (not own._is_gathered or name in ("register_hook", "detach_")):
            result = _ON_PARTS[name](func, own, args[1:], kwargs)
            if result is not NotImplemented:
                return result
        return func(*tree_map(_whole_of, list(args)), **tree_map(_whole_of, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called only for what reaches torch without `__torch_function__`, such as a Function of the task's own."""
        return func(*tree_map(_whole_of, list(args)), **tree_map(_whole_of, kwargs or {}))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"SplitOutput(shape={tuple(self.shape)}, part={tuple(self.part.shape)})"

    @property
    def _is_gathered(self) -> bool:
        return self._whole is not None or (self._of is not None and self._of._is_gathered)

    def whole(self) -> Tensor:
        """Gathered at the first call: a collective over the axes that split it."""
        if self._whole is None:
            if self._of is not None:
                whole = self._of.whole()
                with torch.enable_grad():
                    self._whole = _viewed(whole, self._view)
            else:
                with torch.enable_grad():  # kept for what follows, also if this call is under no_grad
                    self._whole = self._split.gathered(self.part)
        return self._whole


def split_output(part: Tensor, split: Split) -> Tensor:
    """The whole tensor, of which this rank has `part`; a part that tp splits already may be split by cp as well."""
    if isinstance(part, SplitOutput):
        if part._is_gathered or part._of is not None or part._view != "as it is":
            return _wrapped(part.whole(), split, "as it is", None)
        return _wrapped(part.part, replace(part._split, cp=split.cp), "as it is", None)
    return _wrapped(part, split, "as it is", None)


def _wrapped(part: Tensor, split: Split, view: str, of: SplitOutput | None) -> SplitOutput:
    output: SplitOutput = _Wrap.apply(part, split, view)  # type: ignore[no-untyped-call]
    output.part, output._split, output._view, output._of, output._whole = part, split, view, of, None
    return output


class _Wrap(Function):
    """Part -> wrapper. Its gradient, if any, is one of the whole: of a computation that this module has not seen."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, split: Split, view: str) -> Tensor:
        ctx.split, ctx.view, ctx.part_shape = split, view, part.shape
        return SplitOutput(part.detach(), split, view)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        whole = ctx.split.shape(ctx.part_shape)
        return ctx.split.own(_unviewed(gradients[0], whole, ctx.view)), None, None


def _whole_of(value: Any) -> Any:
    return value.whole() if isinstance(value, SplitOutput) else value


def _shape_of(whole: torch.Size, view: str) -> torch.Size:
    match view:
        case "rows":
            return torch.Size((math.prod(whole[:-1]), whole[-1]))
        case "classes second":
            return torch.Size((whole[0], whole[-1], *whole[1:-1]))
        case _:
            return whole


def _viewed(whole: Tensor, view: str) -> Tensor:
    match view:
        case "rows":
            return whole.view(-1, whole.shape[-1])
        case "classes second":
            return whole.movedim(-1, 1)
        case _:
            return whole.view(whole.shape)


def _unviewed(tensor: Tensor, whole: torch.Size, view: str) -> Tensor:
    return tensor.movedim(1, -1) if view == "classes second" else tensor.reshape(whole)


def _elementwise(func: Callable[..., Any], first: SplitOutput, others: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Calls it with numbers only: a tensor might have a gradient of its own, which would be that of a part."""
    if any(isinstance(other, Tensor) for other in (*others, *kwargs.values())):
        return NotImplemented
    part = func(first.part, *others, **kwargs)
    if part is first.part:
        return first
    if not isinstance(part, Tensor) or part.shape != first.part.shape:
        return NotImplemented
    return _wrapped(part, first._split, first._view, None)


def _reshaped(func: Callable[..., Any], first: SplitOutput, others: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """One of the known views, found by what the function does to a tensor without memory."""
    whole = first._split.shape(first.part.shape)
    try:
        result = func(_viewed(torch.empty(whole, device="meta"), first._view), *others, **kwargs)
    except (RuntimeError, TypeError, ValueError):
        return NotImplemented
    for view in ("as it is", "rows", "classes second"):
        expected = _viewed(torch.empty(whole, device="meta"), view)
        if (result.dtype, result.shape, result.stride()) == (expected.dtype, expected.shape, expected.stride()):
            return first if view == first._view else _wrapped(first.part, first._split, view, first._of or first)
    return NotImplemented


def _hook(func: Callable[..., Any], first: SplitOutput, others: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """torch's own hooks (FSDP2) only want to know when the backward pass arrives."""
    hook = others[0] if others else None
    if not str(getattr(hook, "__module__", "")).startswith("torch."):
        return NotImplemented
    return func(first.part, *others, **kwargs)


def _detached_in_place(
    func: Callable[..., Any], first: SplitOutput, others: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Detaches the part: a pipeline frees the graph of its last stage's output in this way."""
    first.part, first._of, first._whole = first.part.detach(), None, None
    return first


def _largest(func: Callable[..., Any], first: SplitOutput, others: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """argmax over the last dim; where several are the largest, the first of them."""
    given = dict(zip(("dim", "keepdim"), others, strict=False)) | kwargs
    dim, keepdim = given.pop("dim", None), given.pop("keepdim", False)
    if given or dim is None or keepdim or first._view == "classes second" or dim not in (-1, first.ndim - 1):
        return NotImplemented
    split, part = first._split, first.part.detach()
    if split.tp is None:
        places = part.argmax(-1)
    else:
        if part.shape[-1]:
            values, own = part.max(-1)
        else:  # more ranks than places
            values = part.new_full(part.shape[:-1], -math.inf)
            own = torch.zeros_like(values, dtype=torch.int64)
        both = torch.stack((values.double(), (own + split.first).double()))
        every = gather_same(both.unsqueeze(0), 0, split.tp)
        winner = every[:, 0].max(0).indices.unsqueeze(0)
        places = every[:, 1].gather(0, winner).squeeze(0).long()
    whole = split.all_tokens(places)
    return whole.reshape(-1) if first._view == "rows" else whole


def _cross_entropy(
    func: Callable[..., Any],
    first: SplitOutput,
    others: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """F.cross_entropy of class indices: each rank computes the losses of its tokens, all together."""
    names = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given: dict[str, Any] = {"weight": None, "ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0}
    given |= dict(zip(names, others, strict=False)) | kwargs
    target, reduction, ignored = given["target"], given["reduction"], given["ignore_index"]
    split = first._split
    whole = split.shape(first.part.shape)
    expected = first.shape[:-1] if first._view != "classes second" else whole[:-1]
    if (
        first.ndim < 2
        or (first._view == "as it is" and first.ndim > 2)  # dim 1 would be the classes
        or given.get("size_average") is not None
        or given.get("reduce") is not None
        or not isinstance(target, Tensor)
        or isinstance(target, SplitOutput)
        or target.is_floating_point()
        or target.shape != expected
        or (given["weight"] is not None and given["label_smoothing"])
    ):
        return NotImplemented
    own = split.own_tokens(target.reshape(whole[:-1]))
    is_counted = own != ignored
    # Any class will do for the others: their losses are masked below.
    classes = own.where(is_counted, 0)
    if classes.is_cpu and bool(((classes < 0) | (classes >= whole[-1])).any()):
        raise IndexError(f"Target {int(own[(classes < 0) | (classes >= whole[-1])][0])} is out of bounds.")
    part = first.part.float() if first.dtype in (torch.float16, torch.bfloat16) else first.part
    losses = _token_losses(part, classes, split, float(given["label_smoothing"]))
    counts = is_counted.to(losses.dtype)
    if given["weight"] is not None:
        counts = counts * given["weight"].to(losses.dtype)[classes]
    each = split.all_tokens((losses * counts).masked_fill(~is_counted, 0.0))
    match reduction:
        case "none":
            return each.reshape(target.shape).to(first.dtype)
        case "sum":
            return each.sum().to(first.dtype)
        case "mean":
            return (each.sum() / split.all_tokens(counts).sum()).to(first.dtype)
        case _:
            return NotImplemented


def _token_losses(part: Tensor, classes: Tensor, split: Split, smoothing: float) -> Tensor:
    """-log p of each own token's class (B, T / cp, ...), with label smoothing, from a part of the vocabulary."""
    log_sum, picked, summed = _Statistics.apply(part, classes, split)  # type: ignore[no-untyped-call]
    losses: Tensor = log_sum - picked
    if smoothing:
        width = split.width if split.tp is not None else part.shape[-1]
        losses = losses * (1 - smoothing) + (log_sum - summed / width) * smoothing
    return losses


class _Statistics(Function):
    """log of the sum of exp, the chosen logit, and the sum of the logits of each token, over all of the vocabulary."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, classes: Tensor, split: Split) -> tuple[Tensor, Tensor, Tensor]:
        largest = part.amax(-1) if part.shape[-1] else part.new_full(part.shape[:-1], -math.inf)
        if split.tp is not None:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=split.tp.get_group())
        powers = (part - largest.unsqueeze(-1)).exp()
        index = classes - split.first
        is_here = (index >= 0) & (index < part.shape[-1])
        index = index.where(is_here, 0).unsqueeze(-1)
        picked = part.gather(-1, index).squeeze(-1) * is_here if part.shape[-1] else torch.zeros_like(largest)
        sums = torch.stack((powers.sum(-1), picked, part.sum(-1)))
        if split.tp is not None:
            sums = total(sums, split.tp)
        # In place, because the probabilities are as large as this rank's logits.
        ctx.save_for_backward(powers.div_(sums[0].unsqueeze(-1)), index, is_here)
        return sums[0].log() + largest, sums[1].clone(), sums[2].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        probabilities, index, is_here = ctx.saved_tensors
        of_log_sum, of_picked, of_sum = gradients
        gradient = probabilities * of_log_sum.unsqueeze(-1) + of_sum.unsqueeze(-1)
        if probabilities.shape[-1]:
            gradient.scatter_add_(-1, index, (of_picked * is_here).unsqueeze(-1))
        return gradient, None, None


_OF_THE_WRAPPER = frozenset(
    {
        *("size", "dim", "numel", "nelement", "__len__", "is_floating_point", "is_complex", "element_size", "_is_view"),
        *("is_contiguous", "stride", "get_device", "is_same_size", "is_inference", "has_names", "__hash__", "__repr__"),
        *("__str__", "__format__"),
    }
)
"""Functions of the shape and the type; beside all attributes but these:"""
_VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag", "grad"})
_ON_PARTS: dict[str, Callable[[Callable[..., Any], SplitOutput, Sequence[Any], dict[str, Any]], Any]] = {
    **dict.fromkeys(
        ("float", "double", "half", "bfloat16", "to", "type", "clone", "detach", "neg", "tanh"), _elementwise
    ),
    **dict.fromkeys(("mul", "__mul__", "__rmul__", "div", "true_divide", "__truediv__", "add", "sub"), _elementwise),
    **dict.fromkeys(("__add__", "__radd__", "__sub__", "__div__", "__neg__", "contiguous"), _elementwise),
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten", "transpose", "permute", "movedim"), _reshaped),
    **dict.fromkeys(("swapaxes", "swapdims", "moveaxis", "mT"), _reshaped),
    "register_hook": _hook,
    "detach_": _detached_in_place,
    "argmax": _largest,
    "cross_entropy": _cross_entropy,
}
"""What is computed on parts. NotImplemented: not with these arguments."""
