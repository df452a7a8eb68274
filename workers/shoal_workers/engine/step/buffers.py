"""When which values of buffers are in the modules of a task, and what travels with its votes. What they become: see
buffer_rule.py.

Every micro-batch works on copies, which are taken out of the modules right after its loss; then the originals are back.
So activation recomputation, validation, replays and padding change nothing, the backward pass finds what it has saved,
and until the vote nothing is mutated: a step that is skipped or repeated leaves and finds B.

Which buffers have changed on which stage of a pipeline, and how often each norm was called on which rank, travels with
the vote; only if there are any, an all-reduce of their changes follows. Once a buffer has changed it is exchanged in
every step. What was written without torch's notice is found at the end of a pass, too late to say by which micro-batch:
then the step is repeated, in which it is known. Nothing here waits for a GPU. Buffers of `tasks.router` have a rule of
their own (tasks/feed_forward.py). Called by the passes, `GradientPass` and, through it, the trainer.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from shoal_workers.contract.batch_partition import MicroBatch
from shoal_workers.engine.parallel.assembly import Assembly
from shoal_workers.engine.parallel.device_copies import to_device
from shoal_workers.engine.parallel.names import matching
from shoal_workers.engine.step.buffer_rule import (
    Buffer,
    as_sum,
    compute_values,
    find_buffers,
    find_norms,
    folds_statistics,
    from_sum,
    is_real,
    unequal,
)
from shoal_workers.engine.step.generation import Generation
from shoal_workers.engine.step.task_state import TaskState
from shoal_workers.tasks.feed_forward import Router

_NUM_FRAMES = 8
_TOLERANCE = 1e-4
"""Relative, between tp ranks, which compute the same."""


@dataclass(slots=True, eq=False)
class _Slot(Buffer):
    """A buffer of a task."""

    copy: Tensor | None = None
    """The copy that the modules have while a forward pass runs."""
    values: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)
    """(micro-batch, V, calls of a norm) in deterministic mode. The calls are an int64 scalar."""

    @property
    def installed(self) -> Tensor:
        return self.original if self.copy is None else self.copy

    @property
    def is_copied(self) -> bool:
        """False if a change is refused anyway, and noticed without a copy."""
        is_plain = self.original.layout is torch.strided and not isinstance(self.original, DTensor)
        return is_plain and not self.original.requires_grad and (self.is_saved or self.is_small)

    @property
    def is_written(self) -> bool:
        """True if it is exchanged in every step, or torch has counted a change since the forward pass began. It does
        not count those of statistics."""
        if self.is_changing or (self.norm is not None and self.norm.module.training):
            return True
        now = self.current
        return now is not self.installed or now is None or now._version != self.version


class StepBuffers:
    """The buffers of one rank's part of the model in one generation. Training thread only."""

    def __init__(self, generation: Generation, assembly: Assembly) -> None:
        self._generation = generation
        self._assembly = assembly
        layout = generation.layout
        self._num_micro_batches = generation.spec.batch.num_micro_batches
        self._share = 1.0 / (self._num_micro_batches * layout.cp)
        self._keeps_values = generation.spec.deterministic
        parts = [("", part) for part in assembly.parts]
        self._slots, self._norms = find_buffers(
            parts,
            lambda _, name, buffer: _Slot(name, buffer),
            lambda module, *_: not isinstance(module, Router),
            folds_statistics,
        )
        self._known_attach_points = {(id(module), key) for slot in self._slots for module, key in slot.attach_points}
        self._registered: list[tuple[nn.Module, str]] = []
        """Buffers that the running forward pass has registered, beside those that are known."""
        numbers = {name: number for number, name in enumerate(assembly.buffers)}
        self._numbers = {id(slot): numbers[assembly.tied.get(slot.name, slot.name)] for slot in self._slots}
        """The number of each buffer in the whole model, by the slot's id."""
        norms = [name for name in assembly.buffers if name.rpartition(".")[2] == "running_mean"]
        self._num_norms = len(norms)
        self._norm_numbers = {
            id(norm): norms.index(assembly.buffers[self._numbers[id(norm.buffers[0])]]) for norm in self._norms
        }
        self._calls = torch.zeros(0, dtype=torch.int64)
        """Calls of each norm of the whole model on each data rank in the step that was voted on."""
        modules = (module for part in assembly.parts for module in part.modules())
        self._task_state = next((module for module in modules if isinstance(module, TaskState)), None)
        self._in_experts: set[int] = set()
        if layout.ep > 1 and generation.plan.experts:
            experts = [module for part in assembly.parts for _, module in matching(part, generation.plan.experts)]
            self._in_experts = {id(module) for expert in experts for module in expert.modules()}

    def begin(self) -> None:
        """Called before the first micro-batch of a pass: forgets what an earlier pass has found, complete or not."""
        for slot in self._slots:
            slot.total, slot.has_changed, slot.values = None, None, []
        for norm in self._norms:
            norm.num_calls = None

    @contextmanager
    def forward(self, micro_batch: MicroBatch, part: int = 0) -> Iterator[None]:
        """Surrounds a micro-batch's forward pass and loss, or that of one part of the model."""
        slots = [slot for slot in self._slots if part in slot.parts]
        with self._copies_installed(slots):
            yield
            if self._task_state is not None:
                with self._generation.user_code:
                    self._task_state.store()
            # A padding micro-batch also changes copies only. They are dropped.
            if micro_batch.weight:
                with self._generation.user_code:
                    self._collect_changes(micro_batch, part, slots)

    @contextmanager
    def backward(self, part: int = 0) -> Iterator[None]:
        """Surrounds a backward pass, which may run forward passes again."""
        changed = [slot for slot in self._slots if slot.is_changing or slot.has_changed is not None]
        with self._copies_installed([slot for slot in changed if part in slot.parts]):
            yield

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Surrounds any other forward pass."""
        with self._copies_installed(self._slots):
            yield
        for slot in self._slots:
            if slot.is_small:
                slot.copy = None

    @torch.no_grad()
    def send(self) -> Tensor:
        """Called after the last micro-batch of a pass. Returns this rank's numbers for the vote, equally many on all
        ranks: float64 on the device."""
        layout, rank, num = self._generation.layout, self._generation.rank, len(self._assembly.buffers)
        numbers = torch.zeros(
            1 + layout.pp * num + layout.num_data_ranks * self._num_norms,
            dtype=torch.float64,
            device=self._generation.device,
        )
        row, first = numbers[1:][layout.pipeline_rank(rank) * num :], 1 + layout.pp * num
        for slot in self._slots:
            if slot.copy is not None and not slot.is_changing:
                is_missed = unequal(slot.copy, slot.original)
                numbers[0] += to_device(is_missed, numbers.device)
                slot.note_change(is_missed)
            if slot.is_changing:
                row[self._numbers[id(slot)]] = 1.0
            elif slot.has_changed is not None:
                row[self._numbers[id(slot)]] = to_device(slot.has_changed, row.device)
        if rank % (layout.tp * layout.cp) == 0:  # the others call the same
            calls = numbers[first:][layout.data_rank(rank) * self._num_norms :]
            for norm in self._norms:
                if norm.num_calls is not None:
                    calls[self._norm_numbers[id(norm)]] = to_device(norm.num_calls, calls.device)
        return numbers

    def learn(self, totals: Sequence[float]) -> bool:
        """Called by all ranks with the sum of their numbers. Returns whether a buffer has changed without torch's
        notice, so that the step must be repeated.

        Raises:
            ValueError: a buffer changes to which the rule cannot be applied, or that several stages of a pipeline have.
        """
        layout, num = self._generation.layout, len(self._assembly.buffers)
        is_missed, flags, calls = totals[0] > 0, totals[1 : 1 + layout.pp * num], totals[1 + layout.pp * num :]
        own = layout.pipeline_rank(self._generation.rank)
        for slot in self._slots:
            by_stage = flags[self._numbers[id(slot)] :: num]
            if not any(by_stage):
                continue
            if len(slot.parts) > 1 or any(count for stage, count in enumerate(by_stage) if stage != own):
                raise ValueError(
                    f"{_describe(slot)}, and several stages of the pipeline have it, so each would change its own. "
                    "Move it into a block, or into a module of plan.first or plan.last; or set parallelism.pp to 1."
                )
            if not slot.is_changing:
                self._refuse(slot)
            for buffer in [slot] if slot.norm is None else slot.norm.buffers:
                buffer.is_changing = True
        for slot in self._slots:
            if slot.is_changing:
                slot.copy = None  # it may have the changes of a pass that is repeated
        self._calls = torch.tensor(calls, dtype=torch.int64).view(layout.num_data_ranks, self._num_norms)
        return is_missed

    @torch.no_grad()
    def apply(self) -> None:
        """Called by all ranks when the update is sure: B' is in the modules, after a sum over the ranks if a buffer
        changes.

        Raises:
            ValueError: a buffer changes otherwise on each tp rank.
        """
        known = [slot for slot in self._slots if slot.is_changing]
        if not known:
            return
        values = (self._values_by_micro_batch if self._keeps_values else self._values)(known)
        self._generation.check()
        for slot, value in zip(known, self._equal_over_tp(known, values), strict=True):
            slot.original.copy_(value)
            slot.copy = None

    @contextmanager
    def _copies_installed(self, slots: Sequence[_Slot]) -> Iterator[None]:
        """Surrounds what works on copies of buffers. Afterwards the originals are back in the modules, and what was
        registered meanwhile is gone."""
        self._registered = []
        try:
            with (
                register_module_buffer_registration_hook(self._note_registered),
                register_module_parameter_registration_hook(_refuse_registered),
            ):
                for slot in slots:
                    self._install_copy(slot)
                if self._task_state is not None:
                    with self._generation.user_code:
                        self._task_state.load()
                yield
        finally:
            for slot in slots:
                slot.install(slot.original)
                # A copy that looks unchanged is installed again, and compared once at the end of the pass.
                if slot.copy is not None and (slot.is_changing or slot.copy._version != slot.version):
                    slot.copy = None
            for module, key in self._registered:
                module._buffers.pop(key, None)
                module._non_persistent_buffers_set.discard(key)

    def _note_registered(self, module: nn.Module, key: str, _: Tensor | None) -> None:
        if (id(module), key) not in self._known_attach_points and not isinstance(module, Router):
            self._registered.append((module, key))

    def _install_copy(self, slot: _Slot) -> None:
        if not slot.is_copied:
            slot.version = slot.original._version
            return
        if slot.copy is None:
            slot.copy = slot.original.detach().clone()
        slot.install(slot.copy)
        slot.version = slot.copy._version

    @torch.no_grad()
    def _collect_changes(self, micro_batch: MicroBatch, part: int, slots: Sequence[_Slot]) -> None:
        for module, key in self._registered:
            self._refuse_kept(part, module, key)
        changed = [slot for slot in slots if slot.is_written]
        calls = {id(norm): norm.count_calls() for norm in find_norms(changed)}
        for slot in changed:
            now = slot.current
            if slot.copy is None:
                slot.note_change(torch.ones((), dtype=torch.bool))
                continue
            slot.copy = None
            if now is None or now.shape != slot.original.shape or now.dtype != slot.original.dtype:
                self._refuse_other_shape(slot, now)
                continue
            if not slot.is_changing:
                slot.note_change(unequal(now, slot.original))
            # A norm that was not called has V = B, which adds nothing.
            called = calls.get(id(slot.norm))
            if self._keeps_values:
                number = called if called is not None else now.new_ones((), dtype=torch.int64)
                slot.values.append((micro_batch.index, now, number))
            else:
                slot.add(now, micro_batch.weight * self._share, called)

    def _values(self, known: Sequence[_Slot]) -> list[Tensor]:
        """B' of each buffer."""
        norms, device = find_norms(known), self._generation.device
        calls = to_device(self._calls[:, [self._norm_numbers[id(norm)] for norm in norms]], device)
        data_rank = self._generation.layout.data_rank(self._generation.rank)
        return compute_values(known, norms, calls, data_rank, self._generation.meshes.sum_over_data_ranks)

    def _values_by_micro_batch(self, known: Sequence[_Slot]) -> list[Tensor]:
        """The same in deterministic mode: each rank fills the rows of its micro-batches, so the sum over ranks is
        exact, and all add up the rows in their order."""
        rows: list[Tensor] = []
        for slot in known:
            original = as_sum(slot.original)
            values = original.new_zeros(self._num_micro_batches, original.numel())
            calls = torch.zeros(self._num_micro_batches, dtype=torch.int64, device=original.device)
            for index, now, number in slot.values:
                values[index] = as_sum(now).reshape(-1)
                calls[index] = number
            rows += [values, calls]
        integers = iter(self._sum_over_ranks([row for row in rows if not row.is_floating_point()]))
        reals = iter(self._sum_over_ranks([row for row in rows if row.is_floating_point()]))
        results = []
        for slot in known:
            original = as_sum(slot.original)  # V of a micro-batch that did not change it
            values = next(reals) if is_real(slot.original) else next(integers)
            calls = next(integers)
            for row, called in zip(values, calls, strict=True):  # not torch's own sum, whose order depends on the shape
                slot.add(torch.where(called > 0, row.view(original.shape), original), self._share, called)
            results.append(slot.compute_value(slot.compute_share(), calls.sum()))
        return results

    def _sum_over_ranks(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the sums over the ranks that have the same part of the model and other samples or tokens."""
        if not tensors or not sum(tensor.numel() for tensor in tensors):
            return list(tensors)
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._generation.meshes.sum_over_data_ranks(flat)
        self._generation.check()
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def _equal_over_tp(self, known: Sequence[_Slot], values: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns the values with the same bits on all ranks along tp, which compute the same. ValueError: they do
        not."""
        tp = self._generation.meshes.tp
        if tp is None:
            return values
        sums = [as_sum(value) for value in values]
        flat = torch.cat([value.double().reshape(-1) for value in sums])
        # The largest of the negatives is the negative of the smallest: one all-reduce finds both.
        box = torch.cat([flat, -flat])
        dist.all_reduce(box, op=dist.ReduceOp.MAX, group=tp.get_group())
        self._generation.check()
        sizes = [value.numel() for value in sums]
        equal = []
        for slot, value, high, low in zip(
            known, sums, torch.split(box[: len(flat)], sizes), torch.split(-box[len(flat) :], sizes), strict=True
        ):
            if high.numel() and (high - low).max() > _TOLERANCE * torch.maximum(high.abs(), low.abs()).max():
                raise ValueError(
                    f"{_describe(slot)}, to other values on each rank of the tensor axis: it is computed from a part "
                    "of the tokens or features. Set parallelism.tp to 1, or leave its module out of the plan."
                )
            equal.append(from_sum(high.view(value.shape), slot.original) if value.is_floating_point() else value)
        return equal

    def _refuse(self, slot: _Slot) -> None:
        """Raises ValueError if the rule cannot be applied to a buffer that changes."""
        layout, original = self._generation.layout, slot.original
        way_out = ""
        if not slot.is_saved:
            way_out = (
                "and checkpoints do not hold it (persistent=False), so it would begin anew after each restore. "
                "Register it with persistent=True."
            )
        elif not slot.is_copied:
            way_out = "and it is no plain tensor. Make it a dense one that needs no gradient."
        elif any(id(module) in self._in_experts for module, _ in slot.attach_points):
            way_out = "and its module is an expert, of which each rank has others. Set parallelism.ep to 1."
        elif layout.cp > 1 and (slot.norm is not None or not is_real(original)):
            way_out = (
                "and each rank of the context axis has a part of the sequence, whose statistics or counts cannot be "
                "added up. Set parallelism.cp to 1."
            )
        elif original.is_floating_point() and not bool(torch.isfinite(original).all()):
            way_out = (
                "and it has values that are not finite, to which no change can be added. A micro-batch's change counts "
                "with its share of the step: begin with finite values."
            )
        if way_out:
            raise ValueError(f"{_describe(slot)}, {way_out}")

    def _refuse_kept(self, part: int, module: nn.Module, key: str) -> None:
        """Raises ValueError for a buffer that a forward pass has registered, unless it is a cache: those are dropped
        after each micro-batch, and made again."""
        if module._buffers.get(key) is None or key in module._non_persistent_buffers_set:
            return
        named = self._assembly.parts[part].named_modules()
        name = ".".join(filter(None, (next((name for name, submodule in named if submodule is module), ""), key)))
        raise ValueError(
            f"the forward pass registers the buffer {name!r} of {_name_class(module)}, which checkpoints would hold, "
            "but a new worker would not have. Register it in __init__, or with persistent=False if it is a cache."
        )

    @staticmethod
    def _refuse_other_shape(slot: _Slot, now: Tensor | None) -> None:
        """Raises ValueError, unless it is a cache that was resized: it is dropped, and made again."""
        if slot.is_saved or now is None:
            original, shape = slot.original, "nothing"
            if now is not None:
                shape = f"{str(now.dtype).removeprefix('torch.')} {list(now.shape)}"
            raise ValueError(
                f"{_describe(slot)} from {str(original.dtype).removeprefix('torch.')} {list(original.shape)} to "
                f"{shape}, and changes of different shapes cannot be added up. Give it its final shape in __init__, or "
                "register it with persistent=False if it is a cache."
            )


def _refuse_registered(module: nn.Module, key: str, parameter: nn.Parameter | None) -> None:
    """Raises ValueError for a parameter that the forward pass makes. FSDP exchanges those of some modules so, too."""
    frames = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(None))
    if parameter is not None and not any(f"distributed{os.sep}fsdp" in file for file in islice(frames, _NUM_FRAMES)):
        raise ValueError(
            f"the forward pass makes the parameter {key!r} of {_name_class(module)}: no optimizer has it, and a new "
            "worker would not have it. Make it in __init__ with its final shape."
        )


def _describe(slot: _Slot) -> str:
    module, _ = slot.attach_points[0]
    return f"the forward pass changes the buffer {slot.name!r} of {_name_class(module)}"


def _name_class(module: nn.Module) -> str:
    """Returns the name of a module's class, in front of which FSDP2 puts one of its own."""
    return next(base.__name__ for base in type(module).__mro__ if not issubclass(base, FSDPModule))
