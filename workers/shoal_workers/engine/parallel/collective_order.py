"""The order of FSDP2's collectives: the same on every rank, whatever blocks and parameters a forward pass uses.

FSDP2 gathers a unit (a module with a fully_shard of its own) when its forward begins, and sums its gradients when its
backward ends. If a model runs other blocks for other samples, ranks call other collectives: they wait for ever, or add
up gradients of different parameters without an error (pytorch#158719). Two orders prevent that:

    whole    parameters stay whole during a step. All units are gathered when the root's forward begins, in the order of
             the modules, and summed when the backward pass has ended, in the reverse order, once each, with zeros for
             what this rank has not used. On a GPU a unit is gathered while the one before it runs, and summed as soon
             as those before it in the order are, so that communication and computation overlap
    unit     ShardLevel.FULL: units are gathered one by one, so every pass must run the same units in the same order.
    by unit  The first pass of each kind compares every collective with the other ranks before it is called; later ones
             compare with the first. A rank that deviates leaves its pass, calls what the others call, and then all of
             them repeat the step with whole parameters

`used_parameters` says what had a gradient at all on this rank: torch's optimizers skip a parameter that has none, so
the vote has to find out what no rank has used.

What it uses of FSDP2 is private; test_branches.py fails if a torch version changes it. Made by `assemble`;
training thread, and on a GPU autograd's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from shoal_workers.engine.group.all_ranks import all_ranks
from shoal_workers.engine.group.direct_collectives import DirectAllGather, DirectReduceScatter
from shoal_workers.engine.group.rounded_sums import RoundedReduceScatter, RoundedSums
from shoal_workers.engine.parallel.data_axis import DataAxis, OrderVaries
from shoal_workers.engine.parallel.written import HASHED_STEPS, first_written, mark_of, marks_of
from shoal_workers.torch_internals import (
    DefaultAllGather,
    DefaultReduceScatter,
    at_end_of_backward,
    equalise_gradients,
    forget_gather,
    forget_gradients,
    fsdp_groups,
    gathered,
    groups_by_name,
    has_gradient,
    has_run,
    is_in_backward,
    keep_gradients_as_computed,
    mark_backward_done,
    parameter_name,
    replicas_of,
    root_mesh,
    run_fsdp_hook_first,
    set_collectives,
    sum_replicas,
)

_END = -1
_LEFT = -2
"""In place of a call: this rank has left an earlier pass of the step."""
_GROUPS = ("shard_process_group", "reduce_scatter_process_group", "replicate_process_group")
T = TypeVar("T")


class CollectiveOrder(DataAxis):
    """Orders the collectives of one part of a model, which it hooks into. Outlives generations, as the model does.

    Args:
        root: sharded; no part has been run yet.
        is_whole: parameters stay whole from their first forward pass in a step to its last backward pass.
        streams: communicate while the passes compute.
        reduces_once: gradients stay whole until the last micro-batch of a step.
        rounded: adds up gradients over the shards; if there are replicas and gradients are reduced once, over those.
    """

    def __init__(
        self,
        root: nn.Module,
        mesh: DeviceMesh,
        *,
        is_whole: bool,
        streams: bool,
        reduces_once: bool = False,
        rounded: RoundedSums | None = None,
    ) -> None:
        assert isinstance(root, FSDPModule)
        self._root: FSDPModule = root
        self._units = [module for module in root.modules() if isinstance(module, FSDPModule)]
        self._groups: list[Any] = [group for unit in reversed(self._units) for group in fsdp_groups(unit)]
        """FSDP's records of the units, in the order in which gradients are summed."""
        # with one shard no parameter is ever gathered: only sums must be in order
        self._layout_is_whole = self.is_whole = is_whole or mesh.size(mesh.ndim - 1) == 1
        self._streams = streams
        # one shard sends nothing, so its replicas have to round, which they do once
        self._reduces_once = reduces_once or (rounded is not None and mesh.size(mesh.ndim - 1) == 1)
        self._sums_nothing = False
        self._rounded = rounded
        self._mesh = mesh
        self._passes: _Passes | None = None
        self._num_calls: dict[int, int] = {}
        self._ended: set[int] = set()
        self._num_gathered = self._num_summed = 0
        self._is_in_loss = False
        self._sums: dict[int, Callable[[], None]] = {}
        self._versions: dict[int, tuple[Any, int]] = {}
        """FSDP's record of a parameter, by the record's id, with the version that the gathered parameter had as its
        unit's first forward in this pass began."""
        self._marks: dict[int, tuple[int, int, int]] = {}
        """By the id of FSDP's record: the mark of the gathered parameter as its unit's forward began."""
        self._written: str | None = None
        """A parameter whose mark was another one as its unit's forward ended."""
        self._num_steps = 0
        """Passes of this generation."""
        self._used: set[int] = set()
        """Ids of FSDP's records of parameters."""
        self._hook()

    def begin_generation(self) -> None:
        self._passes, self._num_steps, self._sums_nothing = None, 0, False
        if self.is_whole and not self._layout_is_whole:
            self.is_whole = False
            self._root.set_reshard_after_forward(True)
        if not self.is_whole:
            self._passes = _Passes(self._mesh)

    def park(self) -> None:
        self._passes = None
        for group in self._groups:
            forget_gather(group)
        if has_run(self._root):
            self._root.reset_iter_state()
        for group in self._groups:
            for record in group.fsdp_params:
                # `reset_iter_state` leaves these gradients, and the next step would add to them without an error.
                forget_gradients(record)
            for info in _mesh_infos(group):
                for name in _GROUPS:
                    if hasattr(info, name):
                        setattr(info, name, None)
                groups_by_name(root_mesh(info.mesh)).clear()

    def revive(self) -> None:
        for info in (info for group in self._groups for info in _mesh_infos(group)):
            # Resolves the groups again, by the names that the mesh has.
            info.__post_init__()
        # A step that was broken off has left these as they were in the middle of it.
        self._root.set_requires_gradient_sync(True)
        self._root.set_requires_all_reduce(True)
        self._root.set_is_last_backward(True)
        self._root.set_reshard_after_backward(True)

    def begin_step(self) -> None:
        self._used.clear()
        self._num_steps += 1

    @contextmanager
    def in_loss(self) -> Iterator[None]:
        """A backward pass within it sums nothing, and parameters stay, because its own derivative needs them."""
        self._is_in_loss = True
        records = [record for group in self._groups for record in group.fsdp_params]
        shards = [record.sharded_param for record in records]
        before = marks_of(shards, is_hashed=self._is_hashed)
        try:
            yield
        finally:
            self._is_in_loss = False
        if (number := first_written(before, marks_of(shards, is_hashed=self._is_hashed))) is not None:
            self._written = parameter_name(records[number])

    def used_parameters(self) -> set[int]:
        return {
            id(param.sharded_param) for group in self._groups for param in group.fsdp_params if id(param) in self._used
        }

    def run(self, kind: str, one_pass: Callable[[], T]) -> T | None:
        return one_pass() if self._passes is None else self._passes.run(kind, one_pass, self._reset)

    def prepare_backward(self, *, is_last: bool) -> None:
        """FSDP does everything after the last backward pass, else less."""
        self._root.set_is_last_backward(is_last)
        if not self._sums_nothing:
            self._root.set_requires_gradient_sync(is_last or not self._reduces_once)
        if self.is_whole:
            self._root.set_reshard_after_backward(is_last)
        if self._mesh.ndim > 1:
            self._root.set_requires_all_reduce(is_last)

    def sum_nothing(self) -> None:
        self._sums_nothing = True
        self._root.set_requires_gradient_sync(False)

    def reshard(self) -> None:
        for unit in self._units:
            unit.reshard()

    def records(self) -> Mapping[int, Any]:
        return {id(record.sharded_param): record for group in self._groups for record in group.fsdp_params}

    def written_parameter(self) -> str | None:
        """What is written to a gathered parameter is lost, and only this rank would have it. To a shard the task may
        write between forward passes of modules: to that of a teacher, for example."""
        versions, written = self._versions, self._written
        self._versions, self._written = {}, None
        return next(
            (
                parameter_name(parameter)
                for parameter, version in versions.values()
                if gathered(parameter)._version != version
            ),
            written,
        )

    @property
    def has_deviated(self) -> bool:
        return self._passes is not None and self._passes.has_deviated

    def any_deviated(self) -> bool:
        """A small collective, for which the host waits; none if parameters are whole."""
        if self._passes is None:
            return False
        flag = torch.tensor([float(self._passes.has_deviated)], device=self._mesh.device_type)
        all_ranks().all_reduce_small(flag)
        return bool(flag.item())

    def keep_whole(self) -> None:
        if has_run(self._root):
            self._reset()
        self.is_whole, self._passes = True, None
        self._root.set_reshard_after_forward(False)
        for group in self._groups:
            for param in group.fsdp_params:
                param.sharded_param.grad = None

    def _reset(self) -> None:
        """Called after a pass was left in the middle."""
        self._root.reset_iter_state()
        self._ended.clear()
        self._num_calls.clear()
        self._num_summed = 0
        for group in self._groups:
            for param in group.fsdp_params:
                # `reset_iter_state` leaves these gradients, and the repeated pass would add to them without an error.
                forget_gradients(param)

    def _hook(self) -> None:
        root = self._root
        root.set_reduce_scatter_unused_params(True)
        assert isinstance(root, nn.Module)
        is_cpu = self._mesh.device_type == "cpu"
        scatter: DefaultReduceScatter = DirectReduceScatter() if is_cpu else DefaultReduceScatter()
        is_between_replicas = self._mesh.ndim > 1 and self._reduces_once
        if self._rounded is not None and not is_between_replicas:
            scatter = RoundedReduceScatter(self._rounded, scatter)
        for number, group in enumerate(self._groups):
            # not through FSDP's setters: they refuse a unit with several groups, see sharding.py
            set_collectives(
                group,
                _Gather(DirectAllGather() if is_cpu else DefaultAllGather(), self, number),
                _Scatter(scatter, self, number),
            )
            if self._rounded is not None and is_between_replicas:
                sum_replicas(group, self._rounded.all_reduce)
            keep_gradients_as_computed(group)
            self._sums[id(group)] = group.post_backward
            group.post_backward = partial(self._after_backward, group)
        for index, unit in enumerate(self._units):
            assert isinstance(unit, nn.Module)
            at_end_of_backward(unit, lambda finish: partial(self._end_backward, finish))
            unit.register_forward_pre_hook(partial(self._enter, fsdp_groups(unit)), prepend=True)
            unit.register_forward_hook(partial(self._leave, fsdp_groups(unit)), prepend=True)
            if id(unit) == id(root):
                unit.register_forward_pre_hook(self._gather_all, prepend=True)
            # FSDP's own hook comes first, since it sets everything up; those of the task come last
            run_fsdp_hook_first(unit)
            if self._streams and id(unit) != id(root):
                unit.register_forward_pre_hook(partial(self._gather_before, index), prepend=True)
        if self._streams:
            root.register_forward_hook(self._gather_rest)

    def _gather_all(self, *_: object) -> None:
        if not self.is_whole:
            return
        if self._streams:
            self._num_gathered = 0
            # The root and the first unit below it; from there each unit begins to gather the next one.
            self._gather_to(1)
        else:
            self._gather_rest()

    def _gather_before(self, index: int, *_: object) -> None:
        if self.is_whole:
            self._gather_to(index + 1)

    def _gather_to(self, index: int) -> None:
        """Begin to gather the units up to this one. FSDP waits for a unit right before its forward."""
        for unit in self._units[self._num_gathered : index + 1]:
            unit.unshard(async_op=True)
        self._num_gathered = max(self._num_gathered, index + 1)

    def _gather_rest(self, *_: object) -> None:
        """Gathers all units. If one that this rank does not use were left out, the next pass would gather it on other
        ranks only."""
        if self.is_whole:
            for unit in self._units:
                unit.unshard()

    def _enter(self, groups: list[Any], *_: object) -> None:
        """A unit's forward begins. If it runs twice, or again in a backward pass, it has its gradients only when that
        pass has ended."""
        for group in groups:
            for param in group.fsdp_params:
                self._versions.setdefault(id(param), (param, gathered(param)._version))
                self._marks[id(param)] = mark_of(gathered(param), is_hashed=self._is_hashed)
        if torch.is_grad_enabled():
            again = 2 if is_in_backward() else 1
            for group in groups:
                self._num_calls[id(group)] = self._num_calls.get(id(group), 0) + again

    def _leave(self, groups: list[Any], *_: object) -> None:
        """A unit's forward ends, and its parameters are still there: looks for writes that torch does not count."""
        for group in groups:
            for param in group.fsdp_params:
                if self._marks[id(param)] != mark_of(gathered(param), is_hashed=self._is_hashed):
                    self._written = parameter_name(param)

    @property
    def _is_hashed(self) -> bool:
        return self._num_steps <= HASHED_STEPS

    def _after_backward(self, group: Any, *_: object) -> None:
        """Replaces FSDP's `post_backward` of a unit."""
        if self._is_in_loss:
            if not self.is_whole:
                raise OrderVaries  # on all ranks alike: the step is repeated with whole parameters
            self._num_calls[id(group)] = 2  # its gradients are complete at the end of the micro-batch's own pass only
            mark_backward_done(group)
            return
        if not group.reduce_grads or not self.is_whole:
            self._sum(group)
            return
        mark_backward_done(group)
        # A unit that ran once has all of its gradients now; for the others see `_enter`.
        if self._streams and self._num_calls.get(id(group)) == 1:
            self._ended.add(id(group))
            while self._num_summed < len(self._groups) and id(self._groups[self._num_summed]) in self._ended:
                self._sum(self._groups[self._num_summed])
                self._num_summed += 1

    def _end_backward(self, finish: Callable[[], None]) -> None:
        """Replaces FSDP's callback at the end of a backward pass."""
        if self._is_in_loss:
            finish()
            return
        if self.is_whole:
            for group in self._groups[self._num_summed :]:
                if group.reduce_grads:
                    self._sum(group)
        self._ended.clear()
        self._num_calls.clear()
        self._num_summed = 0
        finish()

    def _sum(self, group: Any) -> None:
        """FSDP's own `post_backward`: drops, keeps or sums the gradients of a unit."""
        parameters = [param for param in group.fsdp_params if gathered(param) is not None]
        for parameter in parameters:
            if has_gradient(parameter):
                self._used.add(id(parameter))
        if not parameters:  # level full: a unit that no pass has used
            mark_backward_done(group)
            return
        if group.reduce_grads:
            equalise_gradients(parameters)
        self._sums[id(group)]()

    def expect(
        self, number: int, output: Tensor, given: Tensor, run: Callable[[Tensor, Tensor], Any], *, is_sum: bool
    ) -> None:
        """Right before a collective of a unit. Raises OrderVaries if the other ranks do not call it."""
        if self._passes is not None:
            replicas = replicas_of(self._groups[number]) if is_sum else None
            call = _Call(number, is_sum, output.numel(), given.numel(), output.new_empty(0), run, replicas)
            self._passes.expect(call)


def _mesh_infos(group: Any) -> list[Any]:
    infos = [group.mesh_info, group.post_forward_mesh_info]
    for record in group.fsdp_params:
        infos += [record.mesh_info, record.post_forward_mesh_info]
    return list({id(info): info for info in infos if info is not None}.values())


@dataclass(frozen=True, slots=True)
class _Call:
    """One collective of a pass, with what a rank needs to take part in it without a model."""

    number: int
    """The number of FSDP's record of the unit's parameters."""
    is_sum: bool
    output_numel: int
    input_numel: int
    like: Tensor
    """Empty; of the type and on the device of the tensors."""
    run: Callable[[Tensor, Tensor], Any]
    replicas: dist.ProcessGroup | None
    """The ranks among which FSDP sums the sum over shards afterwards, if it does so now."""

    @property
    def code(self) -> int:
        return 2 * self.number + self.is_sum

    def join_without_model(self) -> None:
        output = self.like.new_empty(self.output_numel)
        self.run(output, self.like.new_zeros(self.input_numel))
        if self.replicas is not None:
            dist.all_reduce(output, group=self.replicas)


class _Passes:
    """Compares the collectives of a generation's passes, by kind of pass. Only with ShardLevel.FULL."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._known: dict[str, list[_Call]] = {}
        self._expected: list[_Call] | None = None
        self._now: list[_Call] | None = None
        """The calls of the current pass; None if there is none."""
        self.has_deviated = False

    def run(self, kind: str, one_pass: Callable[[], T], reset: Callable[[], None]) -> T | None:
        expected = self._expected = self._known.get(kind)
        now = self._now = []
        result: T | None = None
        try:
            if not self.has_deviated:  # else the step will be repeated
                result = one_pass()
                if expected is None:
                    # The end is compared, too: a rank whose pass has fewer collectives must not go on alone.
                    self._agree(_END)
                    self._known[kind] = now
            elif expected is None:
                # The others compare the first pass of a kind call by call, and are waiting for this rank's first one.
                self._agree(_LEFT)
        except OrderVaries:
            reset()
            # In the first pass of a kind all ranks compare each call, so all of them leave the pass here.
            if expected is None:
                raise
            self.has_deviated = True
        finally:
            self._expected = self._now = None
        if expected is not None and len(now) < len(expected):
            self.has_deviated = True
            # The other ranks wait in the rest of the pass's collectives: this one takes part without a model.
            for call in expected[len(now) :]:
                call.join_without_model()
        return None if self.has_deviated else result

    def expect(self, call: _Call) -> None:
        if self._now is None:
            return
        if self._expected is None:
            self._agree(call.code)
        elif len(self._now) >= len(self._expected) or self._expected[len(self._now)].code != call.code:
            raise OrderVaries
        self._now.append(call)

    def _agree(self, code: int) -> None:
        pair = torch.tensor([code, -code], device=self._mesh.device_type)
        for axis in range(self._mesh.ndim):
            if self._mesh.size(axis) > 1:
                dist.all_reduce(pair, dist.ReduceOp.MAX, group=self._mesh.get_group(axis))
        largest, smallest = pair.tolist()
        if largest != -smallest:
            raise OrderVaries


class _Ordered:
    """A collective of one unit, which the order knows before it is called."""

    def __init__(self, inner: Any, order: CollectiveOrder, number: int) -> None:
        self._inner, self._order, self._number = inner, order, number


class _Gather(_Ordered, DefaultAllGather):
    """Given to FSDPModule.set_custom_all_gather."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        run = partial(self._inner, group=group)
        self._order.expect(self._number, output_tensor, input_tensor, run, is_sum=False)
        return self._inner(output_tensor, input_tensor, group, async_op)  # type: ignore[no-any-return]


class _Scatter(_Ordered, DefaultReduceScatter):
    """Given to FSDPModule.set_custom_reduce_scatter."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        run = partial(self._inner, group=group, op=op)
        self._order.expect(self._number, output_tensor, input_tensor, run, is_sum=True)
        return self._inner(output_tensor, input_tensor, group, op, async_op)
