"""The tensor axis (Shoeybi et al. 2019), with sequence parallelism (Korthikanti et al. 2022) if the plan has any.

    residual stream     (B, T / tp, D) on each rank: norms and additions work on a part of the sequence
    gather              the whole sequence goes into attention and feed-forward; their input gradients are summed
    column, row         heads and hidden width are split; the sum of a row layer is split along the sequence again
    embedding, head     the vocabulary is split; to the loss the logits are whole (split_output.py)

Without `gather` and `sequence` in the plan, activations between the split layers are whole on every rank.

Split parameters become DTensors over the axis, so that FSDP2 and checkpoints know their layout; forward passes compute
on their local parts. Every rank has built the same weights, so splitting needs no communication.

What a model's modules must be so that they can be split as `plan.tensor` says is checked first (`checked_plan`), and
everything else is refused by the name of the module:

    modules     each pattern names at least one; nn.Linear and nn.Embedding that compute as torch's own do
    pairs       a column layer has a row layer to sum its outputs; one weight is cut in one way
    sequence    with `gather` or `sequence` the stream is split from an `embedding` to a `head`, and column and row
                layers are inside a `gather`

What these rules cannot see (arithmetic between a column and a row layer, what a reshape makes of features) is for the
proof of the layout (engine/proof). Called by `assemble`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
import torch.nn.utils.parametrize as parametrize
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from shoal_workers.contract.model import ParallelPlan, TensorStyle
from shoal_workers.engine.parallel.cutting import cut, local
from shoal_workers.engine.parallel.exchange import copy, gather_same, gather_sum, own_part, sum_scatter, total
from shoal_workers.engine.parallel.float8 import multiply
from shoal_workers.engine.parallel.names import fits, matching
from shoal_workers.engine.parallel.split_output import Split, split_output
from shoal_workers.engine.parallel.stages import Elsewhere, first_argument, with_first

_SEQUENCE_DIM = 1


def apply_tensor(model: nn.Module, plan: ParallelPlan, mesh: DeviceMesh) -> list[nn.Parameter]:
    """Split the modules that `plan.tensor` names over the 1-D `mesh`, in place. `plan` comes from `checked_plan`.

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
        """Parts by the id of the whole parameter, so that tied weights stay one parameter. The whole one is kept so
        that its id is not reused."""

    def column(self, module: nn.Linear) -> None:
        self._split(module, "weight", 0)
        self._split(module, "bias", 0)

        def forward(x: Tensor) -> Tensor:
            return multiply(module, self._shared(x), local(module.weight), _local_or_none(module.bias))

        _replace(module, forward)

    def row(self, module: nn.Linear) -> None:
        self._split(module, "weight", 1)

        def forward(x: Tensor) -> Tensor:
            summed = self._joined(multiply(module, x, local(module.weight), None))
            # The bias is added after the sum; before it, it would count once for each rank.
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
            # Tokens in other ranks' rows look up row 0, and contribute zeros to the sum below.
            embedded = F.embedding(index.where(is_here, 0), rows)
            if padding is not None:  # torch: this row gets no gradient
                embedded = _scaled_gradient(embedded, tokens != padding)
            if by_frequency:  # torch: of a token that occurs n times, each gradient counts 1 / n
                embedded = _scaled_gradient(embedded, 1 / torch.bincount(tokens.flatten(), minlength=num_rows)[tokens])
            return self._joined(embedded * is_here.unsqueeze(-1))

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
    """Changes the first argument before each call, whether it is given by position or by name."""

    def before(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return with_first(inputs, named, change(first_argument(inputs, named)))

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


_scaled_gradient: Callable[..., Tensor] = torch.compiler.disable(_ScaledGradient.apply)  # type: ignore[no-untyped-call]
"""Called with rows (..., D), whose gradient is multiplied by the factor (...)."""


M = TypeVar("M", bound=nn.Module)

_KINDS: dict[TensorStyle, type[nn.Module]] = {
    TensorStyle.COLUMN: nn.Linear,
    TensorStyle.ROW: nn.Linear,
    TensorStyle.HEAD: nn.Linear,
    TensorStyle.EMBEDDING: nn.Embedding,
}


def checked_plan(model: nn.Module, plan: ParallelPlan) -> ParallelPlan:
    """`plan`, with a style also for each layer that shares the weight of a split one (a tied head).

    `model` is whole: no stage of a pipeline, and nothing is split.

    Raises:
        TypeError, ValueError: the tensor axis would compute something else than the model does.
    """
    _refuse_patterns_without_module(model, plan)
    plan = _with_tied_layers(model, plan)
    cut: dict[str, TensorStyle] = {}
    for pattern, style in plan.tensor.items():
        for name, module in matching(model, pattern):
            if style in _KINDS:
                plain(module, _KINDS[style], name, style)
                if name in cut:
                    raise ValueError(
                        f"plan.tensor gives {name!r} the styles {cut[name]!r} and {style!r}, by two patterns. One "
                        "module is split in one way: take it out of one of them."
                    )
                cut[name] = style
    _refuse_unpaired(cut)
    if cuts_sequence(plan):
        _refuse_uncut_sequence(model, plan, cut)
    return plan


def cuts_sequence(plan: ParallelPlan) -> bool:
    """Return whether each rank has only a part of the sequence between the split layers."""
    return not {TensorStyle.SEQUENCE, TensorStyle.GATHER}.isdisjoint(plan.tensor.values())


def modules_of(model: nn.Module, plan: ParallelPlan, style: TensorStyle) -> set[str]:
    """Names of the modules with a style."""
    return {
        name for pattern, cut_style in plan.tensor.items() if cut_style is style for name, _ in matching(model, pattern)
    }


def is_below(name: str, owners: Collection[str]) -> bool:
    """Return whether a module is one of `owners`, or inside one."""
    return name in owners or any(prefix in owners for prefix in _prefixes(name))


def plain(module: nn.Module, kind: type[M], name: str, style: TensorStyle) -> M:
    """`module`, if it computes what a `kind` of torch computes from `weight` and `bias`: a split module's forward is
    replaced.

    Raises:
        TypeError, ValueError: it is another module, or computes something else.
    """
    where = f"plan.tensor gives {name!r} the style {str(style)!r}, which is for {kind.__name__}"
    if not isinstance(module, kind):
        raise TypeError(f"{where}; it is a {type(module).__name__}.")
    if reason := _difference(module, kind):
        raise ValueError(
            f"{where} as torch has it: the engine computes a part of it on each rank, and would drop the rest. This "
            f"{type(module).__name__} {reason}. Leave {name!r} out of plan.tensor (it is then computed whole), put the "
            "rest into a module of its own around it, or set parallelism.tp to 1."
        )
    return module


def _difference(module: nn.Module, kind: type[nn.Module]) -> str:
    """What a module has that torch's own `kind` has not; empty: nothing."""
    if parametrize.is_parametrized(module):
        names = ", ".join(map(repr, module.parametrizations))  # type: ignore[arg-type]
        return f"computes {names} by a parametrization (weight_norm, spectral_norm, pruning)"
    if type(module).forward is not kind.forward or type(module).__call__ is not nn.Module.__call__:
        return "has a forward of its own"
    if "forward" in vars(module):
        return "has a forward that was set on the module"
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "is a part of nn.MultiheadAttention, which reads its weight and never calls it"
    if module._parameters.get("weight") is None:
        return "computes its weight before each call (weight_norm, spectral_norm, pruning)"
    if further := [name for name, _ in module.named_parameters() if name not in ("weight", "bias")]:
        return f"has further parameters: {', '.join(map(repr, further))}"
    return ""


def _refuse_patterns_without_module(model: nn.Module, plan: ParallelPlan) -> None:
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for pattern, style in plan.tensor.items():
        if not any(fits(name, pattern) for name in names):
            raise ValueError(
                f"plan.tensor gives {pattern!r} the style {str(style)!r}, and the model has no module with this name. "
                "Correct the name (model.named_modules() has all of them), or take it out of the plan."
            )


def _with_tied_layers(model: nn.Module, plan: ParallelPlan) -> ParallelPlan:
    """Returns the plan with a style for every module that shares a cut weight. ValueError: there is no such style."""
    styles = {
        name: (pattern, style)
        for pattern, style in plan.tensor.items()
        if style in _KINDS
        for name, _ in matching(model, pattern)
    }
    holders: dict[int, list[str]] = {}
    for full_name, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), []).append(full_name)
    tied = [names for names in holders.values() if len(names) > 1]
    tied += [list(pair) for pair in plan.tied.items()]
    modules = dict(model.named_modules(remove_duplicate=False))
    further: dict[str, TensorStyle] = {}
    for group in ([_split_name(full_name) for full_name in names] for names in tied):
        cuts = {name: styles[name][1] for name, _ in group if name in styles}
        if not cuts:
            continue
        for name, attribute in group:
            module = modules.get(name)
            if (
                name in cuts
                or name in further
                or module is None
                or any(module is modules.get(tied_cut) for tied_cut in cuts)
            ):
                continue
            if attribute == "weight" and isinstance(module, nn.Linear) and TensorStyle.EMBEDDING in cuts.values():
                further[name] = TensorStyle.HEAD
            elif attribute == "weight" and isinstance(module, nn.Embedding) and TensorStyle.HEAD in cuts.values():
                further[name] = TensorStyle.EMBEDDING
            else:
                owner = next(iter(cuts))
                raise ValueError(
                    f"plan.tensor splits {owner!r}, and {name or 'the model itself'!r} ({type(module).__name__}) uses "
                    f"the same parameter as {attribute!r}, which would then be a part. Give it a style, or leave "
                    f"{owner!r} out of plan.tensor."
                )
    return plan.model_copy(update={"tensor": {**plan.tensor, **further}}) if further else plan


_PAIRS = {
    TensorStyle.COLUMN: (
        TensorStyle.ROW,
        "nothing would sum what the ranks compute from its outputs. Give the layer that gets them the style 'row', or "
        "leave both out.",
    ),
    TensorStyle.ROW: (
        TensorStyle.COLUMN,
        "its inputs would not be split. Give the layers before it the style 'column', or leave it out.",
    ),
}
"""The style that each of these needs, and what is wrong without it."""


def _refuse_unpaired(cut: dict[str, TensorStyle]) -> None:
    for name, style in cut.items():
        if style in _PAIRS and _PAIRS[style][0] not in cut.values():
            other, reason = _PAIRS[style]
            raise ValueError(
                f"plan.tensor gives {name!r} the style {str(style)!r}, and no module the style {str(other)!r}: {reason}"
            )


def _refuse_uncut_sequence(model: nn.Module, plan: ParallelPlan, cut: dict[str, TensorStyle]) -> None:
    """Raises ValueError unless every rank has a part of the sequence from the embedding to the head, as sequence
    parallelism requires."""
    for style in (TensorStyle.EMBEDDING, TensorStyle.HEAD):
        if style not in cut.values():
            raise ValueError(
                f"plan.tensor has the styles 'gather' or 'sequence', which split the sequence over tp, and no module "
                f"with the style {str(style)!r}, which {_ENDS[style]}. Add it, or leave 'gather' and 'sequence' out: "
                "then every rank has the whole sequence between the split layers."
            )
    gathers = modules_of(model, plan, TensorStyle.GATHER)
    wholes = modules_of(model, plan, TensorStyle.WHOLE)
    for name, style in cut.items():
        if style in (TensorStyle.COLUMN, TensorStyle.ROW) and not is_below(name, gathers):
            raise ValueError(
                f"plan.tensor gives {name!r} the style {str(style)!r} outside of a module with the style 'gather'. "
                "With sequence parallelism its input is a part of the sequence, and each rank would sum other tokens. "
                "Give the module around the column and row layers the style 'gather'."
            )
        if is_below(name, wholes):
            raise ValueError(
                f"plan.tensor gives {name!r} the style {str(style)!r} inside a module with the style 'whole', which "
                "every rank computes whole. Use 'gather' for the module around it, or leave it out."
            )
    for name in gathers:
        if any(prefix in gathers for prefix in _prefixes(name)):
            raise ValueError(f"plan.tensor gives {name!r} the style 'gather' inside a module that has it already.")
        splits_output = [
            split for split, style in cut.items() if style is not TensorStyle.COLUMN and is_below(split, {name})
        ]
        experts = matching(model, plan.experts) if plan.experts else []
        if not splits_output and not any(is_below(expert, {name}) for expert, _ in experts):
            raise ValueError(
                f"plan.tensor gives {name!r} the style 'gather', and no layer in it the style 'row', which would split "
                "the sequence again. Give its last layer the style 'row', or use 'whole' to compute it on every rank."
            )


_ENDS = {
    TensorStyle.EMBEDDING: "splits it first",
    TensorStyle.HEAD: "gives the loss all of it",
}


def _prefixes(name: str) -> Iterator[str]:
    """The names of the modules around a module, the nearest first; without the model itself."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _split_name(parameter: str) -> tuple[str, str]:
    module, _, attribute = parameter.rpartition(".")
    return module, attribute
