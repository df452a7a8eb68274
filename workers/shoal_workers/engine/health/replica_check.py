"""Compares the checksums of state that several ranks hold: parameters and their optimizer state.

    rank = ((((pp * dp_replicate) + r) * shards) + s) * tp + t

    values of a rank       held, bit for bit, by
    of sharded tensors     the ranks of the same pp, s and t: the replicas r
    of whole ones on tp    the ranks of the same pp and s: the replicas r and the tp ranks t

All ranks update these tensors with the same numbers, so the bits are equal; a bit that flips in one rank's memory stays
different. A replay (replay.py) cannot find it: its forward passes read what FSDP gathers, the same on every rank.

    after step s     the sums are computed, on the CPU by a thread of their own     |  step s + 1: forward, backward
    before the vote of step s + 1: two integers per rank are exchanged; nothing has been changed by then

It runs once in `health.checksum_every_steps` steps, after the last step, and before the group stops as planned. With
three or more holders the majority is right; with two, both are suspected. State that has one holder is not checked.
After a step that was not finite it runs as well (non_finite.py). Called by the trainer on every rank.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal_workers.checkpoint.save_plan import local_tensor
from shoal_workers.contract.layout import Layout, ShardLevel
from shoal_workers.contract.worker_reports import ReplicaMismatch, ReplicasEqual
from shoal_workers.engine.group.all_ranks import all_ranks
from shoal_workers.engine.group.mesh import TP
from shoal_workers.engine.health.replay import wait_for_removal
from shoal_workers.engine.schedule import is_due
from shoal_workers.engine.state.training_state import StateView
from shoal_workers.engine.step.generation import Generation

_MASK = 2**64 - 1
_FACTOR = 6364136223846793005
"""Odd, so that no information is lost; makes the order of the tensors count (Knuth's MMIX generator)."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Ranks of which at least one holds wrong values."""

    ranks: tuple[int, ...]
    is_certain: bool
    """Each of them was outvoted by others; otherwise one of them is right."""


class ReplicaCheck:
    """The comparisons of one rank in one generation. Training thread only."""

    def __init__(self, generation: Generation, view: StateView) -> None:
        self._generation = generation
        self._view = view
        self._groups = groups_of(generation.layout)
        every_steps = generation.spec.health.checksum_every_steps
        self._every_steps = every_steps if any(self._groups) else None
        self._sums: _Sums | None = None

    def begin(self, step: int) -> None:
        """Starts to sum up if a comparison is due. Called between two steps, when `step` steps are completed."""
        if step and is_due(step, self._every_steps):
            self._sums = self._start()

    def finish(self, step: int) -> None:
        """Compares what `begin` has begun, before anything is updated. It is a collective if `begin` began something.

        Raises:
            ComputesWrong: on all ranks, if ranks differ and the supervisor did not end the generation.
        """
        if self._sums is not None:
            sums, self._sums = self._sums, None
            self._compare(sums, step)

    def run(self, step: int) -> None:
        """`begin` and `finish` at once, whether due or not: nothing follows that would compare this state. A collective
        if ranks can be compared."""
        if self._every_steps is not None:
            self._compare(self._start(), step)

    def compare_values_that_are_not_finite(self, step: int) -> None:
        """A step was not finite: compare the state that it began with, whatever `health.checksum_every_steps` says. Of
        two holders, the one with finite values is right. A collective if ranks can be compared. Raises as `finish`."""
        if any(self._groups):
            self._compare(self._start(), step, are_finite=[_are_finite(tensors) for tensors in self._tensors()])

    def stop(self) -> None:
        """The generation is over. Waits for the thread, which reads memory that may be freed next."""
        if self._sums is not None:
            self._sums.values()
            self._sums = None

    def _start(self) -> _Sums:
        return _Sums(self._tensors())

    def _tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Returns this rank's parts of sharded tensors, and of those that are whole on tp; in the order of their names,
        because an optimizer that was made of a set has another order on each rank."""
        sharded: list[Tensor] = []
        whole: list[Tensor] = []
        is_plain = self._generation.layout.shard is ShardLevel.NONE
        for _, tensor in sorted(self._view.tensors().items()):
            if isinstance(tensor, DTensor):
                (whole if is_whole_on_tp(tensor) else sharded).append(local_tensor(tensor).detach())
            elif is_plain:
                whole.append(tensor.detach())
        return sharded, whole

    def _compare(self, sums: _Sums, step: int, *, are_finite: Sequence[bool] = (True, True)) -> None:
        generation = self._generation
        gathered = all_ranks().gather_values((sums.values(), are_finite))
        generation.check()
        values, finite = zip(*gathered, strict=True)
        difference = find_difference(values, self._groups, are_finite=finite)
        if difference is None:
            generation.report(ReplicasEqual(generation=generation.number, step=step, at=time.time(), cpu_s=sums.cpu_s))
            return
        names = ", ".join(map(str, difference.ranks))
        fault = "the others are right" if difference.is_certain else "no majority says which of them is wrong"
        message = f"after step {step}, ranks {names} hold other values of replicated state; {fault}"
        generation.report(
            ReplicaMismatch(
                generation=generation.number,
                step=step,
                at=time.time(),
                ranks=difference.ranks,
                is_certain=difference.is_certain,
                message=message,
            )
        )
        wait_for_removal(generation, f"{message}. Step {step + 1} was not applied.")


def groups_of(layout: Layout) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Returns, for sharded tensors and then for those that are whole on tp, the groups of ranks that hold the same
    values, without groups of one."""
    by_shard: dict[tuple[int, ...], list[int]] = {}
    by_stage: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        rest, tp = divmod(rank, layout.tp)
        rest, shard = divmod(rest, layout.num_shards)
        pp = rest // layout.dp_replicate
        by_shard.setdefault((pp, shard, tp), []).append(rank)
        by_stage.setdefault((pp, shard), []).append(rank)
    kinds = (by_shard.values(), by_stage.values())
    return tuple(tuple(tuple(ranks) for ranks in groups if len(ranks) > 1) for groups in kinds)


def find_difference(
    values: Sequence[Sequence[int]],
    groups: Sequence[Sequence[Sequence[int]]],
    *,
    are_finite: Sequence[Sequence[bool]] | None = None,
) -> Difference | None:
    """The ranks that differ within their group; None if all are equal.

    Args:
        values: [rank][kind of tensors].
        groups: [kind of tensors]: see `groups_of`.
        are_finite: [rank][kind of tensors]. Without a majority, ranks with values that are not finite are wrong, if
            others have finite ones.
    """
    certain: set[int] = set()
    suspects: set[int] = set()
    for kind, groups_of_kind in enumerate(groups):
        for ranks in groups_of_kind:
            counts = Counter(values[rank][kind] for rank in ranks)
            if len(counts) == 1:
                continue
            value, count = counts.most_common(1)[0]
            if 2 * count > len(ranks):
                certain |= {rank for rank in ranks if values[rank][kind] != value}
                continue
            bad = {rank for rank in ranks if are_finite is not None and not are_finite[rank][kind]}
            if bad and len(bad) < len(ranks):
                certain |= bad
            else:
                suspects |= set(ranks)
    if certain:
        return Difference(tuple(sorted(certain)), is_certain=True)
    return Difference(tuple(sorted(suspects)), is_certain=False) if suspects else None


class _Sums:
    """Sums of the bits of lists of tensors, which must not change until `values` has returned."""

    def __init__(self, lists: Sequence[Sequence[Tensor]]) -> None:
        self.cpu_s = 0.0
        self._lists = lists
        self._values: list[int] = []
        self._on_device: list[list[Tensor]] = []
        self._thread: threading.Thread | None = None
        if any(tensor.is_cuda for tensors in lists for tensor in tensors):
            self._on_device = [[_device_sum(tensor) for tensor in tensors] for tensors in lists]  # asynchronous
        else:
            self._thread = threading.Thread(target=self._run, name="shoal-checksums", daemon=True)
            self._thread.start()

    def values(self) -> list[int]:
        """Returns one sum per list. It waits for the device."""
        if self._thread is None:
            return [combine(int(total) for total in totals) for totals in self._on_device]
        self._thread.join()
        return self._values

    def _run(self) -> None:
        self._values = [combine(host_sum(tensor) for tensor in tensors) for tensors in self._lists]
        self.cpu_s = time.thread_time()


def combine(totals: Iterable[int]) -> int:
    """Returns 64 bits that depend on the sums and on their order."""
    result = 0
    for total in totals:
        result = (result * _FACTOR + total) & _MASK
    return result


def host_sum(tensor: Tensor) -> int:
    """The sum of its memory as 8-byte words, and then bytes. 120 MB take 7 ms on one core: numpy adds at the speed of
    memory, outside the interpreter's lock and without threads of its own."""
    octets = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    length = octets.size // 8 * 8
    of_eights = octets[:length].view(np.uint64).sum(dtype=np.uint64)
    return int(of_eights) + int(octets[length:].sum(dtype=np.uint64))


def _device_sum(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    width = next(width for width in (8, 4, 2, 1) if flat.numel() % width == 0)
    dtype = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[width]
    return flat.view(dtype).sum(dtype=torch.int64)


def is_whole_on_tp(tensor: DTensor) -> bool:
    """Return whether every rank of tp holds the same part. FSDP2 lays out a parameter that tp does not split over the
    data axes alone, so that its mesh has no tp at all."""
    names = tensor.device_mesh.mesh_dim_names or ()
    return TP not in names or tensor.placements[names.index(TP)].is_replicate()


def _are_finite(tensors: Iterable[Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
