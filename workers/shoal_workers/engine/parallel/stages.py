"""The pipeline axis: splits a model into stages, each with placeholders for the modules of the others, and runs the
model's own forward in each. Hides how forward is entered where the stage before left it, and left where the next one
begins.

    model             embedding  block 0  block 1  block 2  block 3  norm  head
    stage 0 of 2      embedding  block 0  block 1     .        .       .     .
    stage 1 of 2          .         .        .     block 2  block 3  norm  head

    model        tokens   embedding   block 0   block 1   block 2   block 3   norm   head   logits
    stage 0      runs     runs        runs      runs      hands its input over
    stage 1      runs     unknown     unknown   received  runs      runs      runs   runs   returned

Every stage calls the whole model's forward with the arguments that the task gives it, so what forward computes from
those (positions, masks) is there in each. What only earlier stages have is unknown here: a tensor of the right shape
that holds nan, and that the first own block does not get to see. The first call of a module of a later stage leaves
forward, and its first argument is what the next stage's first own module gets in place of its own: so also arithmetic
between blocks, and blocks that forward leaves out, are as in the whole model. What cannot be right is refused: that
something unknown is used after all, or that forward goes back to an earlier stage.

The random generators go along: the next stage continues with those of this one. The names of parameters are those of
the whole model. Made by `assemble`, after FSDP; driven by `PipelinePasses`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal_workers.checkpoint.save_plan import local_tensor
from shoal_workers.contract.layout import Layout
from shoal_workers.contract.model import ParallelPlan
from shoal_workers.engine.parallel.split_output import SplitOutput
from shoal_workers.engine.parallel.ties import shallow_copy, untie_parts
from shoal_workers.engine.randomness import generator_states, set_generator_states
from shoal_workers.torch_internals import tree_leaves


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a pipeline."""

    index: int
    module: nn.Module
    forward_pass: StageForward | None = None
    """None if the model is not split into stages."""


def split_into_stages(model: nn.Module, plan: ParallelPlan, layout: Layout, pipeline_rank: int) -> list[Stage]:
    """The stages of one pipeline rank, in order. `model` must not be used afterwards: the stages share its modules."""
    stages = all_stages(model, plan, layout)
    local_stages = [stages[index] for index in stages_of(layout, pipeline_rank, len(stages))]
    untie_parts([stage.module for stage in local_stages])
    return local_stages


def all_stages(model: nn.Module, plan: ParallelPlan, layout: Layout) -> dict[int, Stage]:
    """Every stage of the pipeline by index; they share the modules of `model`, and its parameters."""
    sizes = stage_sizes(layout, plan.num_blocks)
    blocks = [f"{plan.blocks}.{number}" for number in range(plan.num_blocks)]
    stages = {}
    for index, size in enumerate(sizes):
        begin = sum(sizes[:index])
        own_blocks, before, after = blocks[begin : begin + size], blocks[:begin], blocks[begin + size :]
        forward_pass = StageForward(index, len(sizes), tuple(own_blocks), plan.last)
        if before:
            forward_pass.set_entrance(before[-1])
        earlier = {*before, *(plan.first if index else ())}
        later = {*after, *(plan.last if index < len(sizes) - 1 else ())}
        module = _without(model, earlier, later, "", forward_pass)
        forward_pass.take_over(module)
        stages[index] = Stage(index, module, forward_pass)
    return stages


def stage_sizes(layout: Layout, num_blocks: int) -> tuple[int, ...]:
    """Blocks of each stage; if the layout does not define them, split evenly, with the longer stages first."""
    base, extra = divmod(num_blocks, layout.pp)
    return layout.stages or tuple(base + (index < extra) for index in range(layout.pp))


def stages_of(layout: Layout, pipeline_rank: int, num_stages: int) -> Sequence[int]:
    """The stages of a pipeline rank."""
    if layout.schedule.is_v_shaped:
        return pipeline_rank, num_stages - 1 - pipeline_rank
    return range(pipeline_rank, num_stages, layout.pp)


def owner_of(layout: Layout, stage: int, num_stages: int) -> int:
    """The pipeline rank that has a stage."""
    if layout.schedule.is_v_shaped:
        return min(stage, num_stages - 1 - stage)
    return stage % layout.pp


def _without(
    module: nn.Module, earlier: Collection[str], later: Collection[str], prefix: str, forward_pass: StageForward
) -> nn.Module:
    """`module` itself if another stage has none of its submodules, else a copy of it with other children."""
    if not any(name.startswith(prefix) for name in (*earlier, *later)):
        return module
    clone = shallow_copy(module)
    for name, child in module._modules.items():
        full_name = prefix + name
        if child is None:
            continue
        if full_name in earlier or full_name in later:
            clone._modules[name] = Elsewhere(forward_pass, full_name, child, is_earlier=full_name in earlier)
        else:
            clone._modules[name] = _without(child, earlier, later, f"{full_name}.", forward_pass)
    return clone


_MODULE_STATE = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


@dataclass(frozen=True, slots=True)
class Handover:
    """What one stage gives to the next."""

    hidden: Tensor
    generators: Tensor
    """State of the random generators."""


class Elsewhere(nn.Module):
    """Takes the place of a module that another stage has. Its plain attributes (numbers, texts) are the module's."""

    def __init__(self, forward_pass: StageForward, name: str, original: nn.Module, *, is_earlier: bool) -> None:
        super().__init__()
        for key, value in vars(original).items():
            if key not in _MODULE_STATE and isinstance(value, _PLAIN):
                self.__dict__[key] = value
        self.__dict__["_forward_pass"] = forward_pass
        self.__dict__["_name_in_model"] = name
        self.__dict__["_is_earlier"] = is_earlier

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_earlier:
            return self._forward_pass.earlier(self._name_in_model)
        return self._forward_pass.later(self._name_in_model, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__
        if name in values:
            return values[name]
        where = "an earlier" if values.get("_is_earlier") else "a later"
        raise AttributeError(
            f"forward() uses {values.get('_name_in_model')}.{name}, which {where} pipeline stage has. A stage can only "
            "call modules: make it part of a module that plan.first, plan.blocks or plan.last names (for a tied head, "
            "an nn.Linear whose weight is the embedding's), or use a layout without pp."
        )


class StageForward:
    """The forward passes of one stage, one at a time: `expect`, then a call of the module, then `handed_over`."""

    def __init__(self, index: int, num_stages: int, own_blocks: tuple[str, ...], last: tuple[str, ...]) -> None:
        self.index = index
        self.is_last = index == num_stages - 1
        self._own = (*own_blocks, *(last if self.is_last else ()))
        self._first_block = own_blocks[0]
        self._entrance = ""
        self._forward: Callable[..., Any] | None = None
        self._is_proven = False
        """A whole pass has used nothing unknown."""
        self._replaces = False
        """The first own module gets something else than what the entrance returns: forward changes it in between."""
        self._received: Handover | None = None
        self._expected = torch.empty(0, device="meta")
        self._unknown: Tensor | None = None
        self._is_running = False
        self._has_entered = False
        self._has_grad = False
        self._left: Handover | None = None

    def begin_generation(self) -> None:
        """Called on all ranks of a group that has just formed: no pass counts as proven, on a new rank or on any
        other."""
        self._is_proven = False

    def set_entrance(self, name: str) -> None:
        """The block whose place passes on what has been received: the last one before this stage's own."""
        self._entrance = name

    def take_over(self, module: nn.Module) -> None:
        """`module`: the stage, a copy of the model, before any axis is applied to it."""
        method: Any = module.forward
        function = getattr(method, "__func__", None)  # of an instance's own forward: bound to the model, not its copy
        self._forward = method if function is None else types.MethodType(function, module)
        module.forward = self._run
        if not self.is_last:  # what they get is the model's output
            module._forward_hooks.clear()
            module._forward_hooks_with_kwargs.clear()

    def install_hooks(self, module: nn.Module) -> None:
        """Applied after all axes, so that it runs before FSDP's own hook, which then sees what the module really
        gets."""
        for own in {
            id(submodule): submodule for submodule in (module.get_submodule(name) for name in self._own)
        }.values():
            own.register_forward_pre_hook(self._before_own, prepend=True, with_kwargs=True)

    def expect(self, expected: Tensor, received: Handover | None) -> None:
        """Called before each call. `expected`: has shape and dtype of what stages hand over; `received`: None for the
        first stage."""
        self._expected, self._received = expected, received

    def handed_over(self) -> Handover:
        """Called after a call of a stage that is not the last one."""
        left, self._left = self._left, None
        assert left is not None
        return left

    def earlier(self, name: str) -> Tensor:
        """Replaces a module of an earlier stage."""
        assert self._received is not None and self._unknown is not None
        if self._has_entered:
            raise TypeError(
                f"forward() calls {name} after {self._first_block}, which a later pipeline stage has. A pipeline goes "
                "through the modules of plan.first, plan.blocks and plan.last once, in this order: use a layout "
                "without pp."
            )
        return self._received.hidden if name == self._entrance else self._unknown

    def later(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replaces a module of a later stage: forward ends here."""
        self._check_grad_mode(name)
        if self._received is not None and not self._has_entered:  # forward left out all blocks of this stage
            raise _Left(name, self._received.hidden, self._received.generators)
        raise _Left(name, first_argument(args, kwargs), generator_states())

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        output = self._once(args, kwargs, float("nan"))
        if self._received is None or self._is_proven:
            self._is_proven = True
            return output
        # nan may have other causes; a second run with zeros as the unknown values distinguishes them.
        if _has_nan(output) and not _has_nan(self._received.hidden):
            self._refuse_if_unknown_is_used(args, kwargs)
        self._is_proven = True
        return output

    def _once(self, args: tuple[Any, ...], kwargs: dict[str, Any], filling: float) -> Any:
        assert self._forward is not None, "take_over comes first"
        if self._received is not None:
            self._unknown = self._received.hidden.detach().new_full(self._expected.shape, filling)
        self._is_running, self._has_entered, self._has_grad = True, False, torch.is_grad_enabled()
        try:
            output = self._forward(*args, **kwargs)
        except _Left as left:
            return self._leave(left)
        finally:
            self._is_running, self._unknown = False, None
        if not self.is_last:
            raise TypeError(
                f"forward() ended in pipeline stage {self.index} without a call of a block or of a module of plan.last "
                "that a later stage has. Does plan.blocks name the modules that forward calls?"
            )
        if not self._has_entered:
            raise TypeError(
                f"forward() called no block of pipeline stage {self.index}, the last one, and no module of plan.last."
            )
        return output

    def _leave(self, left: _Left) -> Tensor:
        hidden = left.value
        if not isinstance(hidden, Tensor):
            raise TypeError(
                f"forward() calls {left.name} with {type(hidden).__name__} as its first argument; stages of a pipeline "
                "hand one tensor over. Let blocks take and return a tensor, or use a layout without pp."
            )
        if hidden.shape != self._expected.shape:
            raise TypeError(
                f"forward() calls {left.name} with a tensor of shape {tuple(hidden.shape)}, and pipeline stages hand "
                f"over {tuple(self._expected.shape)}: the shape of the first micro-batch's input with "
                "plan.hidden_size. All micro-batches must have one shape, and blocks must keep it."
            )
        dtype = self._expected.dtype
        if hidden.dtype != dtype:
            if not (hidden.is_floating_point() and dtype in (torch.bfloat16, torch.float16)):
                raise TypeError(
                    f"forward() calls {left.name} with a tensor of {hidden.dtype}, and pipeline stages hand over "
                    f"{dtype}."
                )
            hidden = hidden.to(dtype)  # as FSDP casts what a block gets
        if self._has_grad and not hidden.requires_grad:
            hidden = hidden.detach().requires_grad_()  # only frozen parameters up to here: the backward pass ends here
        self._left = Handover(hidden, left.generators)
        return hidden

    def _before_own(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        received = self._received
        if received is None:
            self._has_entered = True
            return None
        given = first_argument(args, kwargs)
        if not self._is_running:  # recomputed by a checkpoint of the task's own
            if self._replaces:
                raise TypeError(
                    "a block is recomputed by a checkpoint that the task's own code makes around it, and its input is "
                    "changed between blocks. Set parallelism.recompute instead."
                )
            return None
        if not self._is_proven:
            self._refuse_unknown_arguments(module, args, kwargs)
        if self._has_entered:
            return None
        self._has_entered = True
        self._check_grad_mode(self._first_block)
        set_generator_states(received.generators)
        self._replaces = given is not received.hidden
        return with_first(args, kwargs, received.hidden) if self._replaces else None

    def _check_grad_mode(self, name: str) -> None:
        if self._has_grad and not torch.is_grad_enabled():
            raise TypeError(
                f"forward() calls {name} while gradients are disabled, as in torch.no_grad() or a checkpoint with "
                "use_reentrant=True. No gradient would reach the pipeline stage before. Use use_reentrant=False, or "
                "parallelism.recompute."
            )

    def _refuse_unknown_arguments(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The first argument of the first own module is replaced; nothing else may come from an earlier stage."""
        own = [*args, *kwargs.values()][0 if self._has_entered else 1 :]
        if any(_has_nan(value) for value in own) and self._received and not _has_nan(self._received.hidden):
            raise TypeError(
                f"{type(module).__name__} in pipeline stage {self.index} gets a value that forward() computes in an "
                "earlier stage, beside the output of the block before. Stages hand over one tensor: compute the value "
                "from forward's arguments, or in each block, or use a layout without pp."
            )

    def _refuse_if_unknown_is_used(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The second run must leave no trace: results and random numbers are those of the first.
        left, generators = self._left, generator_states()
        with torch.no_grad():
            is_used = not _has_nan(self._once(args, kwargs, 0.0))
        self._left = left
        set_generator_states(generators)
        if is_used:
            raise TypeError(
                f"forward() uses in pipeline stage {self.index} a value that an earlier stage has computed, beside the "
                f"output of the block before {self._first_block}: a skip connection from the embedding, for example. "
                "Stages hand over one tensor: use a layout without pp."
            )


class _Left(BaseException):
    """Ends a forward pass where a later stage begins. It is no Exception, because a model may catch those."""

    def __init__(self, name: str, value: Any, generators: Tensor) -> None:
        self.name = name
        self.value = value
        self.generators = generators


def first_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the first argument, whether it is given by position or by name; None if there is none."""
    return args[0] if args else next(iter(kwargs.values()), None)


def with_first(args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with another first one."""
    if args:
        return (value, *args[1:]), kwargs
    return args, {name: value if number == 0 else argument for number, (name, argument) in enumerate(kwargs.items())}


def _has_nan(values: Any) -> bool:
    """Looks in this rank's parts, without a collective: another rank of the stage may have proven its part before."""
    tensors = [value for value in tree_leaves(values) if isinstance(value, Tensor) and value.is_floating_point()]
    parts = [value.part if isinstance(value, SplitOutput) else local_tensor(value) for value in tensors]
    return any(bool(torch.isnan(part.detach()).any()) for part in parts)
