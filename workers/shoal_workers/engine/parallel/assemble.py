"""Turns a whole model into one rank's part of it under a layout: one function per axis, in this order.

    0 plain        each parameter a dense block of memory of its own, with a dimension: `make_plain`
      precision    casts around modules of another type     precision.py
    1 pipeline     the rank's stages                    stages.py
    2 tensor       layers over tp                       tensor.py
      fp8          products of the blocks' layers       float8.py
    3 experts      whole experts over ep                experts.py
    4 context      attention over cp                    context.py
    5 recompute    blocks' forwards run twice           recompute.py
    6 compile      blocks' forwards as one graph        recompute.py
    7 data         parameters over the shards           sharding.py
                   or whole on each rank                plain.py

What every axis expects of a parameter:

    transposed, channels_last, a slice      copied to a contiguous one: the same values, names and shapes
    without a dimension                     one of shape (1,): FSDP2 shards no other
    without elements                        frozen: FSDP2 cannot reduce its gradient, and there is nothing to train
    expanded, sparse, two in one memory     refused by name: they cannot be trained in parts

The model's code is not involved: everything is applied from outside, by the names in its ParallelPlan. Needs no
communication, because every rank has built the same weights. A task without a plan has the data axes only. Called by
`build_runtime`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import NoReturn
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal_workers.contract.checks.legality import may_write_parameters
from shoal_workers.contract.layout import Recompute, ShardLevel, num_stages
from shoal_workers.contract.model import ParallelPlan
from shoal_workers.contract.spec import JobSpec
from shoal_workers.engine.group.mesh import Meshes
from shoal_workers.engine.group.rounded_sums import RoundedSums
from shoal_workers.engine.parallel.assembly import Assembly
from shoal_workers.engine.parallel.context import ContextCall, apply_context
from shoal_workers.engine.parallel.cutting import take_attributes
from shoal_workers.engine.parallel.data_axis import DataAxis
from shoal_workers.engine.parallel.experts import apply_experts
from shoal_workers.engine.parallel.float8 import apply_float8
from shoal_workers.engine.parallel.names import matching
from shoal_workers.engine.parallel.plain import PlainReplica
from shoal_workers.engine.parallel.precision import apply_precisions, make_policies
from shoal_workers.engine.parallel.recompute import apply_compile, apply_recompute
from shoal_workers.engine.parallel.sharding import (
    hooked_parameters,
    mixed_precision,
    move_additions,
    places_of,
    shard_model,
)
from shoal_workers.engine.parallel.stages import Stage, all_stages, split_into_stages
from shoal_workers.engine.parallel.tensor import apply_tensor, checked_plan
from shoal_workers.engine.parallel.ties import find_ties, refuse_mixed_cuts, stages_with
from shoal_workers.tasks.feed_forward import Router
from shoal_workers.torch_internals import gradient_hooks, has_hooks_after_accumulation, overlaps_itself


def assemble(
    model: nn.Module,
    spec: JobSpec,
    plan: ParallelPlan | None,
    meshes: Meshes,
    shard_units: Callable[[nn.Module], Sequence[nn.Module]],
) -> Assembly:
    """Consumes `model`.

    Raises:
        ValueError: the plan does not fit the model.
    """
    layout = meshes.layout
    plan = plan or ParallelPlan()
    _refuse_tables(model, cp=layout.cp)
    if layout.tp > 1:
        plan = checked_plan(model, plan)
    units = set(shard_units(model))
    hooked = hooked_parameters(model)
    is_plain = layout.shard is ShardLevel.NONE
    originals = (
        {}
        if is_plain
        else {name: ref(parameter) for name, parameter in model.named_parameters() if parameter.requires_grad}
    )
    ties = find_ties(model, plan)
    refuse_mixed_cuts(model, plan, ties, tp=layout.tp, ep=layout.ep)
    precisions = apply_precisions(model, spec, plan)
    stages, shared = [Stage(0, model)], {}
    buffers = tuple(
        ties.get(name, name)
        for prefix, module in model.named_modules()
        if not isinstance(module, Router)
        for name, _ in module.named_buffers(prefix, recurse=False)
    )
    if layout.pp > 1:
        whole = all_stages(model, plan, layout)
        shared = stages_with({index: stage.module for index, stage in whole.items()}, ties)
        stages = split_into_stages(model, plan, layout, layout.pipeline_rank(meshes.rank))
    partial: list[nn.Parameter] = []
    for stage in stages:
        partial += _apply(stage.module, spec, plan, meshes)
    context = ContextCall(plan.sequence, meshes.cp) if meshes.cp is not None and layout.cp > 1 else None
    if context is not None and layout.pp == 1:
        context.install(model)
    owners = _owners(stages, partial)
    policy = mixed_precision(spec.precision, spec.sum_precision)
    rounded = RoundedSums(spec.seed) if spec.rounds_sums else None
    axes: list[DataAxis] = []
    for stage in stages:
        if is_plain:
            may_write = may_write_parameters(layout, spec)
            axes.append(PlainReplica(stage.module, meshes.dense, may_write=may_write, rounded=rounded))
            continue
        experts = [module for _, module in matching(stage.module, plan.experts)] if plan.experts else []
        inside = [module for module in stage.module.modules() if module in units]
        places = places_of(hooked, stage.module)
        policies = make_policies(stage.module, precisions, spec.sum_precision)
        experts = experts if layout.ep > 1 else []
        axes.append(shard_model(stage.module, meshes, policy, inside, experts, policies, rounded))
        move_additions(places, stage.module)
        if stage.forward_pass is not None:
            stage.forward_pass.install_hooks(stage.module)
    del hooked
    _refuse_gradients(originals)
    return Assembly(
        layout=layout,
        parts=tuple(stage.module for stage in stages),
        stages=tuple(stage.index for stage in stages),
        num_stages=num_stages(layout) if layout.pp > 1 else 1,
        tied=ties,
        shared=shared,
        forward_passes=tuple(stage.forward_pass for stage in stages if stage.forward_pass is not None),
        context=context,
        partial=owners,
        data_axes=tuple(axes),
        buffers=tuple(dict.fromkeys(buffers)),
        rounded=rounded,
    )


def _refuse_gradients(originals: Mapping[str, ReferenceType[nn.Parameter]]) -> None:
    """Has a backward pass raise ValueError if it reaches a parameter that was replaced in its module, but that the
    task's code still refers to."""
    for name, reference in originals.items():
        if (parameter := reference()) is not None:
            parameter.register_hook(partial(_refuse_gradient, name))  # type: ignore[no-untyped-call]


def _refuse_gradient(name: str, _: Tensor) -> NoReturn:
    raise ValueError(
        f"forward() or loss() uses the parameter {name} through a reference beside its module (a list, tuple, dict or "
        "closure), which no optimizer would change. Read it from the module each time it is used, or assign it to a "
        "second module or attribute, which ties both."
    )


def _refuse_tables(model: nn.Module, *, cp: int) -> None:
    """Options of tables that no sharded model can have: ValueError, by name."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        where = f"{name!r} is an {type(module).__name__}"
        if module.max_norm is not None:
            raise ValueError(
                f"{where} with max_norm={module.max_norm}: each forward pass would change the parameter in place, and "
                "what a worker computes with is a gathered copy. Scale its output in forward() instead, for example by "
                "(max_norm / x.norm(dim=-1, keepdim=True)).clamp(max=1)."
            )
        if module.sparse:
            raise ValueError(f"{where} with sparse=True: sparse gradients cannot be sharded. Leave sparse out.")
        if cp > 1 and module.scale_grad_by_freq:
            raise ValueError(
                f"{where} with scale_grad_by_freq=True: it counts tokens in the whole sequence, of which cp {cp} gives "
                "each rank a part. Leave it out, or set parallelism.cp to 1."
            )


def _apply(module: nn.Module, spec: JobSpec, plan: ParallelPlan, meshes: Meshes) -> list[nn.Parameter]:
    """Apply all axes but pipeline and data. Returns the parameters whose gradient is a sum over tp ranks."""
    layout = meshes.layout
    partial = apply_tensor(module, plan, meshes.tp) if meshes.tp is not None else []
    if spec.fp8 is not None:
        apply_float8(module, plan, spec.fp8, meshes.root.device_type)
    partial += apply_experts(module, plan, meshes.ep, meshes.tp, meshes.cp)
    if meshes.cp is not None:
        apply_context(module, plan, meshes.cp, layout.context)
    if layout.recompute is not Recompute.NONE:
        apply_recompute(module, plan, layout.recompute)
    if spec.compile:
        apply_compile(module, plan)
    return partial


def _owners(stages: Sequence[Stage], parameters: Sequence[nn.Parameter]) -> tuple[tuple[nn.Module, str], ...]:
    """Module and attribute of each parameter: FSDP replaces the parameter objects."""
    wanted = {id(parameter) for parameter in parameters}
    return tuple(
        (module, name)
        for stage in stages
        for module in stage.module.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if id(parameter) in wanted
    )


@torch.no_grad()
def make_plain(model: nn.Module, line: str) -> list[str]:
    """Changes the model in place. Returns all names of its scalar parameters, which have one dimension from now on; the
    model's own code still gets them without it.

    Raises ValueError with the name of a parameter that cannot be trained in parts. `line`: of the task, where the model
    is built."""
    named = list(model.named_parameters())
    for name, parameter in named:
        if (what := _refused(parameter)) is not None:
            raise ValueError(f"{line}: the parameter {name}, {_shown(parameter)}, {what}.")
    for name, other in _overlapping(named):
        raise ValueError(
            f"{line}: the parameters {name} and {other} share memory but are two parameters, so each would be trained "
            "on its own. Assign the same nn.Parameter to both modules if the weights are tied, else clone one of them."
        )
    for alias, name in _aliases(model, named):
        raise ValueError(
            f"{line}: {alias} shares the memory of the parameter {name}. It would keep the initial values, since "
            "workers train parts of a parameter. Read the parameter itself where it is used, or clone() it."
        )
    for _, parameter in named:
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
        if not parameter.numel():
            parameter.requires_grad_(False)
    scalars = [name for name, parameter in model.named_parameters(remove_duplicate=False) if not parameter.ndim]
    given: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module in model.modules() if scalars else ():
        _give_dimension(module, given)
    return scalars


def _give_dimension(module: nn.Module, given: dict[int, tuple[nn.Parameter, nn.Parameter]]) -> None:
    """`given`: by id, each scalar and what took its place, so that ties stay ties."""
    names = tuple(
        name for name, parameter in module._parameters.items() if parameter is not None and not parameter.ndim
    )
    for name in names:
        scalar = module._parameters[name]
        assert scalar is not None
        if id(scalar) not in given:
            fresh = nn.Parameter(scalar.data.view(1), requires_grad=scalar.requires_grad)
            given[id(scalar)] = scalar, take_attributes(fresh, scalar)
            _take_hooks(*given[id(scalar)])
        module._parameters[name] = given[id(scalar)][1]
    if names:
        module.__class__ = _with_scalars(type(module), names)  # type: ignore[arg-type]  # classes can be hashed


def _take_hooks(scalar: nn.Parameter, parameter: nn.Parameter) -> None:
    for hook in gradient_hooks(scalar):

        def of_scalar(gradient: Tensor, hook: Callable[[Tensor], Tensor | None] = hook) -> Tensor | None:
            changed = hook(gradient.view(()))
            return None if changed is None else changed.view(1)

        parameter.register_hook(of_scalar)  # type: ignore[no-untyped-call]
    if has_hooks_after_accumulation(scalar):  # the data axis refuses it, with its name
        parameter.register_post_accumulate_grad_hook(lambda _: None)  # type: ignore[no-untyped-call]


@cache
def _with_scalars(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """Blocks of one class stay blocks of one class."""
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, **{name: _scalar(name) for name in names}})


def _scalar(name: str) -> property:
    """FSDP exchanges a parameter in `_parameters`, so it is looked up with each use."""

    def scalar(module: nn.Module) -> Tensor | None:
        parameter = module._parameters[name]
        return parameter if parameter is None or isinstance(parameter, DTensor) else parameter.view(())

    return property(scalar)


def _refused(parameter: Tensor) -> str | None:
    if parameter.layout is not torch.strided:
        return "is not dense and cannot be sharded; build it with .to_dense()"
    if overlaps_itself(parameter):
        return "is expanded: several of its elements are one number in memory; build it with .clone()"
    return None


def _shown(parameter: Tensor) -> str:
    return f"{str(parameter.dtype).removeprefix('torch.')} {list(parameter.shape)}"


def _overlapping(named: list[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, str]]:
    spans = sorted(
        (parameter.data_ptr(), parameter.data_ptr() + _span_bytes(parameter), name, parameter)
        for name, parameter in named
        if parameter.numel() and not parameter.is_meta
    )
    earlier: list[tuple[int, str, nn.Parameter]] = []
    for start, end, name, parameter in spans:
        earlier = [sibling for sibling in earlier if sibling[0] > start]
        for _, other, before in earlier:
            are_blocks = before.is_contiguous() and parameter.is_contiguous()
            if are_blocks or _places(before) & _places(parameter):
                yield other, name
        earlier.append((end, name, parameter))


def _aliases(model: nn.Module, named: list[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, str]]:
    """Buffers and plain tensor attributes in the memory of a parameter that is trained. Not those that torch's own
    spectral_norm and pruning compute before each forward pass, from a parameter with `_orig` in its name."""
    trained = {
        parameter.untyped_storage().data_ptr(): name
        for name, parameter in named
        if parameter.requires_grad and parameter.numel() and not parameter.is_meta
    }
    for prefix, module in model.named_modules():
        for key, value in {**vars(module), **module._buffers}.items():
            is_plain = type(value) is Tensor and value.layout is torch.strided and value.numel()
            is_kept = is_plain and f"{key}_orig" not in module._parameters
            if is_kept and (name := trained.get(value.untyped_storage().data_ptr())) is not None:
                yield f"{prefix}.{key}" if prefix else key, name


def _span_bytes(tensor: Tensor) -> int:
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()


def _places(tensor: Tensor) -> set[int]:
    """Addresses of the elements. Only for two that lie within each other, of which one is not contiguous."""
    places = torch.tensor(tensor.data_ptr())
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = places.unsqueeze(-1) + torch.arange(size) * (stride * tensor.element_size())
    return set(places.reshape(-1).tolist())
