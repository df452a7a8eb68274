"""When which values of buffers are in the modules of a task, and what is exchanged of them. What they become: see
buffer_rule.py.

Every micro-batch works on copies, which are taken out of the modules right after its loss; then the originals are back.
So activation recomputation, validation, replays and padding change nothing, the backward pass finds what it has saved,
and until the vote nothing is mutated: a step that is skipped or repeated leaves and finds B.

Which buffers change is agreed by all ranks after the first pass of a generation, and again when a rank meets another
one: it says so in the vote, and the step is repeated. Only those are exchanged. After the first passes nothing here
waits for a GPU: whether another buffer has changed is a number on the device, the doubt, which travels with the vote;
so are the calls of a norm. Buffers of `tasks.router` have a rule of their own (tasks/feed_forward.py). Called by the
passes, `GradientPass` and, through it, the trainer.
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
from shoal_workers.engine.group.all_ranks import all_ranks
from shoal_workers.engine.parallel.assembly import Assembly
from shoal_workers.engine.parallel.device_copies import any_of, to_device
from shoal_workers.engine.parallel.names import matching
from shoal_workers.engine.step.buffer_rule import (
    NUM_THOROUGH,
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
    pending: Tensor | None = None
    is_missed: bool = False
    """True if it was found changed too late to say by which micro-batch."""

    @property
    def installed(self) -> Tensor:
        return self.original if self.copy is None else self.copy

    @property
    def is_copied(self) -> bool:
        """False if a change is refused anyway, and noticed without a copy."""
        is_plain = self.original.layout is torch.strided and not isinstance(self.original, DTensor)
        return is_plain and not self.original.requires_grad and (self.is_saved or self.is_small)

    @property
    def has_changed(self) -> bool:
        """True if the buffer has changed in this pass, or is known to change."""
        return self.is_changing or self.is_missed or self.total is not None or bool(self.values)


@dataclass(frozen=True, slots=True, eq=False)
class _Doubt:
    """What nobody has waited for yet."""

    slot: _Slot
    is_true: Tensor
    """A bool scalar on the device: the buffer has changed, and is not known to change."""
    is_of_tp: bool = False
    """The buffer has other values on each tp rank."""


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
        self._num_passes = 0
        self._has_agreed = False
        self.has_new_changes = False
        """Whether, for the ballot, a buffer changed that the ranks have not agreed on; the step must be repeated. If
        there is a `doubt`, that counts, too."""
        self._doubts: list[_Doubt] = []
        """What the newest pass has left to be read."""
        modules = (module for part in assembly.parts for module in part.modules())
        self._task_state = next((module for module in modules if isinstance(module, TaskState)), None)
        self._in_experts: set[int] = set()
        if layout.ep > 1 and generation.plan.experts:
            experts = [module for part in assembly.parts for _, module in matching(part, generation.plan.experts)]
            self._in_experts = {id(module) for expert in experts for module in expert.modules()}

    def begin(self) -> None:
        """Called before the first micro-batch of a pass: forgets what an earlier pass has found, complete or not."""
        self._num_passes += 1
        self._doubts = []
        for slot in self._slots:
            slot.total, slot.values, slot.pending = None, [], None
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
        with self._copies_installed([slot for slot in self._slots if part in slot.parts and slot.has_changed]):
            yield

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Surrounds any other forward pass."""
        with self._copies_installed(self._slots):
            yield
        for slot in self._slots:
            if slot.is_small:
                slot.copy = None

    def add_up(self) -> None:
        """Computes, on all ranks after the last micro-batch of a pass, the buffers that the step ends with."""
        if not self._assembly.has_buffers:
            return
        self._compare_copies()
        if not self._has_agreed:
            self.agree()
        known = [slot for slot in self._slots if slot.is_changing]
        if known:
            (self._add_up_by_micro_batch if self._keeps_values else self._add_up)(known)

    def agree(self) -> None:
        """A collective, on all ranks: which buffers change. Waits for the device.

        Raises:
            ValueError: one changes that is in several stages of a pipeline, or otherwise on each tp rank.
        """
        self._resolve_doubts()
        layout, rank = self._generation.layout, self._generation.rank
        changed_names = [slot.name for slot in self._slots if slot.has_changed]
        names_by_rank = all_ranks().gather_values(changed_names)
        by_name = {slot.name: slot for slot in self._slots}
        with self._generation.user_code:
            for other, names in enumerate(names_by_rank):
                for slot in (by_name[name] for name in names if name in by_name):
                    if layout.pipeline_rank(other) != layout.pipeline_rank(rank) or len(slot.parts) > 1:
                        raise ValueError(
                            f"{_describe(slot)}, and several stages of the pipeline have it, so each would change its "
                            "own. Move it into a block, or into a module of plan.first or plan.last; or set "
                            "parallelism.pp to 1."
                        )
                    for buffer in [slot] if slot.norm is None else slot.norm.buffers:
                        buffer.is_changing = True
        self._has_agreed, self.has_new_changes = True, False
        self._generation.check()

    def doubt(self) -> Tensor | None:
        """A bool scalar on the device: a buffer has changed in this pass that the ranks have not agreed on, or
        otherwise on each tp rank. None if that is sure not to be. Read by the vote, after which all ranks `agree`."""
        return any_of([doubt.is_true for doubt in self._doubts], self._generation.device)

    @torch.no_grad()
    def apply(self) -> None:
        """Called after a finite vote, on all ranks."""
        for slot in self._slots:
            if slot.pending is not None:
                slot.original.copy_(slot.pending)
                slot.pending = slot.copy = None

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
        buffers = {id(slot): slot.current for slot in slots}
        changed = self._find_changed(slots, buffers)
        calls = {id(norm): norm.count_calls() for norm in find_norms(changed)}
        for slot in changed:
            now, slot.copy = buffers[id(slot)], None
            if now is None or now.shape != slot.original.shape or now.dtype != slot.original.dtype:
                self._refuse_other_shape(slot, now)
                continue
            if not slot.is_changing:
                self._refuse(slot)
                self.has_new_changes = self.has_new_changes or self._has_agreed
            # A norm that was not called has V = B, which adds nothing.
            called = calls.get(id(slot.norm))
            if self._keeps_values:
                number = called if called is not None else now.new_ones((), dtype=torch.int64)
                slot.values.append((micro_batch.index, now, number))
            else:
                slot.add(now, micro_batch.weight * self._share, called)

    def _find_changed(self, slots: Sequence[_Slot], buffers: dict[int, Tensor | None]) -> list[_Slot]:
        """Returns the slots whose values differ, and those that all ranks exchange in any case: all of a norm, or none.
        After the first passes, those that may differ and are not known become doubts."""
        is_thorough = self._num_passes <= NUM_THOROUGH
        compared = [
            slot
            for slot in slots
            if not slot.is_changing
            and (
                (now := buffers[id(slot)]) is not slot.installed
                or now is None
                or now._version != slot.version
                or (slot.copy is not None and is_thorough)
            )
        ]
        if not is_thorough:
            compared = [slot for slot in compared if not self._defer_comparison(slot, buffers[id(slot)])]
        differs = _compare([(buffers[id(slot)], slot.original, slot.copy is None) for slot in compared])
        chosen = {id(slot) for slot, is_different in zip(compared, differs, strict=True) if is_different}
        chosen |= {id(other) for slot in compared if slot.norm and id(slot) in chosen for other in slot.norm.buffers}
        return [slot for slot in slots if slot.is_changing or id(slot) in chosen]

    def _defer_comparison(self, slot: _Slot, now: Tensor | None) -> bool:
        """False if it can be told without waiting for the device that a buffer has changed."""
        if now is None or now is slot.original or now.shape != slot.original.shape or now.dtype != slot.original.dtype:
            return False
        self._doubts.append(_Doubt(slot, unequal(now, slot.original)))
        slot.copy = None
        return True

    @torch.no_grad()
    def _add_up(self, known: Sequence[_Slot]) -> None:
        generation, layout = self._generation, self._generation.layout
        norms, data_rank = find_norms(known), layout.data_rank(generation.rank)
        calls = torch.zeros(layout.num_data_ranks, len(norms), dtype=torch.int64, device=generation.device)
        for column, norm in enumerate(norms):
            if norm.num_calls is not None:
                calls[data_rank, column] = norm.num_calls
        # Calls first: what a rank adds to a norm depends on how often the ranks after it have called the norm.
        (calls,) = self._sum_over_ranks([calls])
        values = compute_values(known, norms, calls, data_rank, generation.meshes.sum_over_data_ranks)
        generation.check()
        for slot, value in zip(known, values, strict=True):
            slot.pending = value
        self._compare_over_tp(known)

    @torch.no_grad()
    def _add_up_by_micro_batch(self, known: Sequence[_Slot]) -> None:
        """Sums in deterministic mode: each rank fills the rows of its micro-batches, so the sum over ranks is exact,
        and all add up the rows in their order."""
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
        for slot in known:
            original = as_sum(slot.original)  # V of a micro-batch that did not change it
            values = next(reals) if is_real(slot.original) else next(integers)
            calls = next(integers)
            for row, called in zip(values, calls, strict=True):  # not torch's own sum, whose order depends on the shape
                slot.add(torch.where(called > 0, row.view(original.shape), original), self._share, called)
            slot.pending = slot.compute_value(slot.compute_share(), calls.sum())

    def _compare_copies(self) -> None:
        """Find what was written without torch's knowledge; when the step is repeated, it is known."""
        for slot in self._slots:
            now = slot.copy
            if now is None or slot.is_changing:
                continue
            if now.is_cpu and not slot.is_small:
                if _compare([(now, slot.original, False)])[0]:
                    self._note_missed(slot)
            else:
                self._doubts.append(_Doubt(slot, unequal(now, slot.original)))

    def _note_missed(self, slot: _Slot) -> None:
        with self._generation.user_code:
            self._refuse(slot)
        slot.copy, slot.is_missed, self.has_new_changes = None, True, True

    def _resolve_doubts(self) -> None:
        doubts, self._doubts = self._doubts, []
        device = self._generation.device
        are_true = torch.stack([to_device(doubt.is_true, device) for doubt in doubts]).tolist() if doubts else []
        for doubt, is_true in zip(doubts, are_true, strict=True):
            if is_true and doubt.is_of_tp:
                with self._generation.user_code:
                    raise ValueError(
                        f"{_describe(doubt.slot)}, to other values on each rank of the tensor axis: it is computed "
                        "from a part of the tokens or features. Set parallelism.tp to 1, or leave its module out of "
                        "the plan."
                    )
            if is_true:
                self._note_missed(doubt.slot)

    def _sum_over_ranks(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the sums over the ranks that have the same part of the model and other samples or tokens."""
        if not tensors or not sum(tensor.numel() for tensor in tensors):
            return list(tensors)
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._generation.meshes.sum_over_data_ranks(flat)
        self._generation.check()
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def _compare_over_tp(self, known: Sequence[_Slot]) -> None:
        """The ranks along tp compute the same; from here on they have the same bits."""
        tp = self._generation.meshes.tp
        values = [(slot, as_sum(slot.pending)) for slot in known if slot.pending is not None]
        if tp is None or not values:
            return
        flat = torch.cat([value.double().reshape(-1) for _, value in values])
        # The largest of the negatives is the negative of the smallest: one all-reduce finds both.
        box = torch.cat([flat, -flat])
        dist.all_reduce(box, op=dist.ReduceOp.MAX, group=tp.get_group())
        self._generation.check()
        largest, smallest = box[: len(flat)], -box[len(flat) :]
        sizes = [value.numel() for _, value in values]
        for (slot, value), high, low in zip(
            values, torch.split(largest, sizes), torch.split(smallest, sizes), strict=True
        ):
            if not high.numel():
                continue
            is_other = (high - low).max() > _TOLERANCE * torch.maximum(high.abs(), low.abs()).max()
            self._doubts.append(_Doubt(slot, is_other, is_of_tp=True))
            if value.is_floating_point():
                slot.pending = from_sum(high.view(value.shape), slot.original)

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


def _compare(pairs: Sequence[tuple[Tensor | None, Tensor, bool]]) -> list[bool]:
    """Return whether the values of each two tensors differ. The third says that both may share their memory, so that a
    version was the only witness. It waits once for all tensors of a GPU."""
    known: list[bool | Tensor] = []
    for now, before, is_shared in pairs:
        if now is None or now.shape != before.shape or now.dtype != before.dtype or (is_shared and now is before):
            known.append(True)
        elif now.is_cpu:
            # torch.equal makes no temporary tensors, but finds nan different from nan.
            known.append(not torch.equal(now, before) and bool(unequal(now, before)))
        else:
            known.append(unequal(now, before))
    waited = iter(
        torch.stack(tensors).tolist()
        if (tensors := [known_slot for known_slot in known if isinstance(known_slot, Tensor)])
        else []
    )
    return [next(waited) if isinstance(known_slot, Tensor) else known_slot for known_slot in known]
