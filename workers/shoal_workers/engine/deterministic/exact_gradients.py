"""Gradients of deterministic mode: summed over micro-batches and ranks without rounding, so the order has no effect.
Hides the grid that gradients are rounded to, and the accumulators' layout.

    micro-batch   backward; each parameter's whole gradient, which has the same bits on any rank, is rounded to
                  multiples of one power of two (the grid), added to this rank's accumulator, and dropped
    step          all-to-all of the accumulators, sum, to the parameter's type: the shards of FSDP's own layout

Sums of such multiples are exact in float64, so they do not depend on which rank ran which micro-batch, on the number of
ranks, or on earlier failures. Padding of weight zero is not added. FSDP itself reduces nothing here.

The grid is a pure function of the largest gradient element:

    rung    for |gradient| of one micro-batch below    grid: the smallest difference kept
    0       2**6 = 64                                  2**-45 = 2.8e-14
    1       2**18                                      2**-33
    ...     ...                                        2**-51 of the limit
    11      2**138: all of fp32                        2**87

Multiples of the grid are added in float64 without any rounding as long as no sum exceeds 2**53 of them. The mean over
the n micro-batches is a sum of terms below limit / n, so no sum exceeds the limit, 2**51 of them, by more than what
rounding each term has added. Rung 0 holds every fp32 gradient between 2**-21 and 64 exactly, and smaller ones to
1.4e-14, far below Adam's default eps of 1e-8. The rung must not depend on the world size, so it follows from the
largest element over all micro-batches, which is known only after the pass. A pass that ran on another rung is repeated.
That is rare, because a pass begins with the rung of the pass before.

There is one accumulator per FSDP unit, divided among ranks as FSDP divides parameters:

    unit's accumulator, float64, world size 3          parameter of 7 rows: chunks of ceil(7 / 3) = 3 rows
    rank 0's chunk  | rows 0 1 2 of w | bias ... |
    rank 1's chunk  | rows 3 4 5 of w | bias ... |     columns beyond the last row stay zero
    rank 2's chunk  | row  6 - - of w | bias ... |     a complex number has two columns

So an all-to-all of the accumulator's rows brings each rank its own shard, without packing. Everything is done in pieces
that stay in the processor's cache, in memory that is used again. It needs memory: 8 bytes for each parameter of the
whole model on every rank, and the same for the largest unit.

`GradientPass` makes one instance for each model and generation; training thread only. docs/determinism.md has the
arithmetic and the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from shoal_workers.engine.deterministic.integer_sum import NUM_DIGITS, digits_of, row_squares, split_finite, value_of
from shoal_workers.engine.group.all_ranks import all_ranks
from shoal_workers.engine.parallel.cutting import shard_like


@dataclass(frozen=True, slots=True)
class ExactSums:
    """A step's totals over all ranks, the same on each; nan: something was not finite."""

    loss: float
    squared_norm: float


class ExactGradients:
    """Collects the gradients of a sharded model's micro-batches, and reduces them once per step.

    Args:
        model: sharded by FSDP2 along dim 0 over one mesh axis; its gradient synchronisation must be off.
        num_micro_batches: of a step over all ranks; losses come with a weight of 1 / num_micro_batches.
    """

    def __init__(self, model: nn.Module, num_micro_batches: int) -> None:
        self._num_micro_batches = num_micro_batches
        self._units = units_of(model)
        self._slots = [slot for unit in self._units for slot in unit.slots]
        assert self._slots, "a model without trainable parameters cannot be trained"
        self._device = self._units[0].sums.device
        self._world_size = self._units[0].sums.shape[0]
        # Allocated once: the first touch of new pages costs more than the arithmetic in them.
        self._piece = torch.empty(PIECE, dtype=torch.float64, device=self._device)
        largest_unit = max(unit.sums.numel() for unit in self._units)
        self._incoming = self._zeros(largest_unit if self._world_size > 1 else 0)
        self._extremes: list[Tensor] = []
        self._rung = 0
        self.skipped: Collection[int] = ()
        """Ids of parameters of the model that the step does not update: their gradients are dropped."""

    def begin(self) -> None:
        """Called before the first micro-batch of a pass: resets what an earlier pass left, whether it completed or
        not."""
        self._extremes = []
        for slot in self._slots:
            slot.was_touched = False

    @contextmanager
    def collecting(self, *, is_padding: bool) -> Iterator[None]:
        """Surrounds the forward and backward pass of one micro-batch: takes each gradient as soon as it is complete.

        No hook stays on the model, even if the pass fails. The gradients of padding are dropped.
        """
        waiting = {unit.module: unit for unit in self._units}

        def watch(module: nn.Module, _: object) -> None:
            # FSDP's own hook has run: the attributes are the gathered parameters now, autograd's leaves.
            # Once per micro-batch, even if recomputation runs the unit's forward pass again.
            unit = waiting.pop(module, None)
            for slot in () if unit is None else unit.slots:
                whole = slot.owner._parameters[slot.name]
                assert whole is not None and not isinstance(whole, DTensor), f"{slot.name} is not gathered"
                taker = self._taker(slot, is_padding=is_padding)
                hooks.enter_context(whole.register_post_accumulate_grad_hook(taker))  # type: ignore[no-untyped-call]

        with ExitStack() as hooks:
            for unit in self._units:
                hooks.enter_context(unit.module.register_forward_pre_hook(watch))
            yield

    def reduce(self, weighted_losses: Sequence[Tensor]) -> ExactSums | None:
        """Called by all ranks after the last micro-batch: sets `grad` of every shard that any micro-batch had a
        gradient for.

        Args:
            weighted_losses: scalars, of this rank's real micro-batches.

        Returns:
            None: the gradients need another grid, which the next pass will use. Nothing was set; repeat the pass.
        """
        shards = [shard for unit in self._units for shard in self._received(unit)]
        own_rung = rung_of(self._largest())
        squares = torch.cat([row_squares(real_view(shard)) for shard in shards])
        loss, num_bad_losses = split_finite(self._stacked(weighted_losses))
        norm, num_bad_norms = split_finite(squares)
        bad = torch.stack([num_bad_losses, num_bad_norms + (own_rung is None)])
        # One number for each rung, not the rung: the sums over ranks then show the highest one, in the same all-reduce.
        flags = [*(index == own_rung for index in range(NUM_RUNGS)), *(slot.was_touched for slot in self._slots)]
        box = torch.cat([bad, digits_of(loss), digits_of(norm), torch.tensor(flags, device=self._device)])
        all_ranks().all_reduce(box)
        sizes = [1, 1, NUM_DIGITS, NUM_DIGITS, NUM_RUNGS, len(shards)]
        [bad_loss], [bad_norm], loss_digits, norm_digits, rungs, touched = (t.tolist() for t in torch.split(box, sizes))
        needed = max((rung for rung, num_ranks in enumerate(rungs) if num_ranks), default=0)
        # Values that are not finite have no rung: the pass is not repeated, and the vote refuses the step.
        if not bad_norm and needed != self._rung:
            self._rung = needed
            return None
        for slot, shard, num_ranks in zip(self._slots, shards, touched, strict=True):
            slot.shard.grad = shard_like(slot.shard, shard) if num_ranks else None
        return ExactSums(
            loss=math.nan if bad_loss else value_of(loss_digits),
            squared_norm=math.nan if bad_norm else value_of(norm_digits),
        )

    def _taker(self, slot: Slot, *, is_padding: bool) -> Callable[[Tensor], None]:
        def take(whole: Tensor) -> None:
            gradient, whole.grad = whole.grad, None
            if gradient is not None and not is_padding and id(slot.shard) not in self.skipped:
                self._add(slot, gradient)

        return take

    @torch.no_grad()
    def _add(self, slot: Slot, gradient: Tensor) -> None:
        is_first, slot.was_touched = not slot.was_touched, True
        for piece, sums in slot.pieces(real_view(gradient).reshape(-1)):
            # Scalars on the device: nothing waits for them before `reduce`.
            self._extremes += torch.aminmax(piece)
            # The first gradient overwrites what an earlier pass left, which is therefore never cleared.
            rounded = sums if is_first else self._piece[: piece.numel()]
            round_to_grid(rounded.copy_(piece), self._rung)
            if not is_first:
                sums += rounded

    @torch.no_grad()
    def _received(self, unit: Unit) -> list[Tensor]:
        """Returns this rank's shard of each of the unit's gradients, in the parameters' type. A collective."""
        for slot in unit.slots:
            slot.clear_if_untouched()
        sums = unit.sums
        if self._world_size > 1:
            sums = self._incoming[: unit.sums.numel()].view_as(unit.sums)
            group = unit.slots[0].shard.device_mesh.get_group()
            dist.all_to_all_single(sums, unit.sums, group=group)
        shards = []
        for slot, columns in zip(
            unit.slots, torch.split(sums, [slot.sums.shape[1] for slot in unit.slots], dim=1), strict=True
        ):
            local = slot.shard.to_local()
            shard = torch.empty_like(local, memory_format=torch.contiguous_format)
            self._convert(columns, real_view(shard).view(-1))
            shards.append(shard)
        return shards

    def _convert(self, sums: Tensor, values: Tensor) -> None:
        """`values` of shape (n,) becomes the sum of the ranks' first n columns."""
        for start in range(0, values.numel(), PIECE):
            piece = values[start : start + PIECE]
            rows = sums[:, start : start + piece.numel()]
            total = rows[0]
            if self._world_size > 1:
                total = torch.add(rows[0], rows[1], out=self._piece[: piece.numel()])
                for row in rows[2:]:
                    total += row
            piece.copy_(total)

    def _largest(self) -> float:
        """The largest gradient element of this rank in this pass, unweighted; nan if one is nan."""
        return float(self._stacked(self._extremes).abs().max()) * self._num_micro_batches if self._extremes else 0.0

    def _stacked(self, scalars: Sequence[Tensor]) -> Tensor:
        return torch.stack([s.detach().double().reshape(()) for s in scalars]) if scalars else self._zeros(0)

    def _zeros(self, num: int) -> Tensor:
        return torch.zeros(num, dtype=torch.float64, device=self._device)


PIECE = 1 << 17
"""Elements: few enough for the processor's caches, and enough that the calls cost little."""


@dataclass(slots=True, eq=False)
class Slot:
    """One trainable parameter's columns in its unit's accumulator."""

    owner: nn.Module
    name: str
    """The owner's attribute: the whole parameter while the unit is gathered, the shard otherwise."""
    shard: DTensor
    sums: Tensor
    """View of the accumulator: [world size, elements per rank with FSDP's padding]."""
    was_touched: bool = False
    """True if a micro-batch of this step had a gradient for it on this rank."""

    def pieces(self, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """`flat`: one real number for each of the whole parameter. Pieces of it, each with its part of the sums."""
        width = self.sums.shape[1]
        for rank, sums in enumerate(self.sums):
            local_piece = flat[rank * width : (rank + 1) * width]
            for start in range(0, local_piece.numel(), PIECE):
                piece = local_piece[start : start + PIECE]
                yield piece, sums[start : start + piece.numel()]

    def clear_if_untouched(self) -> None:
        """Drop what is left of an earlier pass; what lies beyond the last row is always zero."""
        if not self.was_touched:
            self.sums.zero_()


@dataclass(slots=True, eq=False)
class Unit:
    """An FSDP module and the parameters that it gathers."""

    module: nn.Module
    slots: list[Slot]
    sums: Tensor
    """The accumulator: [world size, elements per rank], contiguous."""


def units_of(model: nn.Module) -> list[Unit]:
    """The units of a model sharded by FSDP2 along dim 0 of every parameter over one mesh axis; accumulators zeroed."""
    units: list[Unit] = []
    seen: set[int] = set()
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        sharded: list[tuple[nn.Module, str, DTensor]] = []
        for owner, name, shard in _own_parameters(module):
            if shard.requires_grad and shard.numel() and id(shard) not in seen:
                seen.add(id(shard))
                sharded.append((owner, name, _checked(name, shard)))
        if sharded:
            units.append(_unit(module, sharded))
    return units


def _own_parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Parameters that no inner unit gathers."""
    for name, parameter in module.named_parameters(recurse=False):
        yield module, name, parameter
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _own_parameters(child)


def _checked(name: str, parameter: nn.Parameter) -> DTensor:
    placements = parameter.placements if isinstance(parameter, DTensor) else None
    if placements != (Shard(0),):
        raise NotImplementedError(
            f"deterministic: true needs every parameter sharded by rows over one axis; {name!r} is laid out as "
            f"{placements or 'a plain tensor'}. Set deterministic to false, or use data-parallel sharding only."
        )
    assert isinstance(parameter, DTensor)
    return parameter


def _unit(module: nn.Module, units: list[tuple[nn.Module, str, DTensor]]) -> Unit:
    world_size = units[0][2].device_mesh.size()
    device = units[0][2].to_local().device
    widths = [numel_of_real(shard, chunk_numel(shard.shape, world_size)) for *_, shard in units]
    sums = torch.zeros(world_size, sum(widths), dtype=torch.float64, device=device)
    views = torch.split(sums, widths, dim=1)
    return Unit(module, [Slot(*gradient, view) for gradient, view in zip(units, views, strict=True)], sums)


def chunk_numel(shape: torch.Size, world_size: int) -> int:
    """Elements of the largest chunk of rows that FSDP2 gives to a rank."""
    return -(-shape[0] // world_size) * shape[1:].numel()


def real_view(tensor: Tensor) -> Tensor:
    """A view of a complex tensor that has real and imaginary parts in one more dimension; any other tensor as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def numel_of_real(tensor: Tensor, num_elements: int) -> int:
    return num_elements * (2 if tensor.is_complex() else 1)


NUM_RUNGS = 12
_LIMIT_BITS = 6
_STEP_BITS = 12
_BITS = 51
"""A value just below the limit is this many powers of two above the grid."""


def grid_of(rung: int) -> float:
    """What all gradients on this rung become multiples of."""
    return float(2.0 ** (_LIMIT_BITS + _STEP_BITS * rung - _BITS))


def round_to_grid(values: Tensor, rung: int) -> Tensor:
    """Rounds float64 values below the rung's limit in place, each to the nearest multiple; halfway to the even one.

    Next to 1.5 x 2**52 of them, float64 has no numbers between the multiples."""
    constant = 1.5 * 2.0**52 * grid_of(rung)
    return values.add_(constant).sub_(constant)


def rung_of(largest: float) -> int | None:
    """The rung for a step whose largest gradient element of any micro-batch, unweighted, is `largest`.

    None if it is not finite, or above the range of fp32.
    """
    for rung in range(NUM_RUNGS):
        if largest < 2.0 ** (_LIMIT_BITS + _STEP_BITS * rung):  # false for nan
            return rung
    return None
