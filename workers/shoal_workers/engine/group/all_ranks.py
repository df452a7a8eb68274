"""Collectives of all ranks of a generation: nothing else in the engine calls one on torch's default group.

With gloo all ranks are one group, which sends small tensors directly (direct_collectives.py). A communicator of NCCL
takes minutes to form with 100,000 ranks (docs/measured/twin.md). So with NCCL a collective of all ranks goes along each
axis of the mesh in turn, the innermost first, which has the fastest links:

    all-reduce    a b      along tp    a+b a+b      along shards    a+b+c+d a+b+c+d
                  c d                  c+d c+d                      a+b+c+d a+b+c+d
    all-gather    the same; ranks are numbered with tp innermost, so the rows come in the order of the ranks
    broadcast     from rank 0, the outermost axis first

torch makes a communicator of NCCL in the first collective of its group, so the default group gets none. If a layout has
one axis only, this axis is the default group, and its communicator has all ranks.

Two groups of one axis may add the same values in different orders, because NCCL chooses the order by the wiring. So a
floating-point sum over several axes ends with broadcasts from the first rank of each axis but the last. Then all ranks
have the same bits, on which clipping, replicas and the conditions of loops rely. A summand that all other ranks have
zeros for is exact on any path; sums of others have the rounding of another order than in one group.

A collective of the user's own on the default group makes a communicator of all ranks: in a loop, or `torch.equal` of
two DTensors in a task. Training thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shoal_workers.engine.group.direct_collectives import begin_all_reduce_small

T = TypeVar("T")
AxisGroup = dist.ProcessGroup | None
"""None stands for torch's default group."""


class RankGrid:
    """Ranks that lie on a grid. All methods are collectives of all of them.

    Args:
        axis_groups: for each axis with several ranks the group of the ranks that differ from this one along it; the
            innermost first.
    """

    def __init__(self, axis_groups: Sequence[AxisGroup]) -> None:
        self.axis_groups = tuple(axis_groups)

    @classmethod
    def from_default_group(cls) -> RankGrid:
        """Return all ranks as one axis."""
        group = dist.group.WORLD
        return cls(() if group is not None and group.size() == 1 else (group,))

    @classmethod
    def from_mesh(cls, root: DeviceMesh) -> RankGrid:
        """Return the ranks of a mesh along its axes."""
        return cls([root.get_group(axis) for axis in reversed(range(root.ndim)) if root.size(axis) > 1])

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Replace a tensor by its sum over all ranks, or by what `op` says."""
        self.begin_all_reduce(tensor, op).wait()

    def begin_all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Reduction:
        """Begin `all_reduce`."""

        def begin(axis_group: AxisGroup) -> Callable[[], object]:
            work = dist.all_reduce(tensor, op=op, group=axis_group, async_op=True)
            return (lambda: None) if work is None else work.wait

        return Reduction(tensor, self.axis_groups, begin, is_sum=op == dist.ReduceOp.SUM)

    def all_reduce_small(self, tensor: Tensor) -> None:
        """Replace a small 1-D tensor by its sum over all ranks."""
        self.begin_all_reduce_small(tensor).wait()

    def begin_all_reduce_small(self, tensor: Tensor) -> Reduction:
        """Begin `all_reduce_small`."""
        return Reduction(
            tensor, self.axis_groups, lambda axis_group: begin_all_reduce_small(tensor, axis_group), is_sum=True
        )

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, by rank. They have the same shape and type."""
        rows = [tensor]
        for group in self.axis_groups:
            local_rows = torch.stack(rows)
            gathered = [torch.empty_like(local_rows) for _ in range(dist.get_world_size(group))]
            dist.all_gather(gathered, local_rows, group=group)
            rows = [row for other_rows in gathered for row in other_rows]
        return rows

    def gather_values(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank. For values that are small, or exchanged rarely."""
        values = [value]
        for group in self.axis_groups:
            gathered: list[list[T]] = [[]] * dist.get_world_size(group)
            dist.all_gather_object(gathered, values, group=group)
            values = [other for others in gathered for other in others]
        return values

    def broadcast(self, tensor: Tensor) -> None:
        """Replace a tensor by that of rank 0."""
        for group in reversed(self.axis_groups):
            dist.broadcast(tensor, group=group, group_src=0)

    def broadcast_objects(self, objects: list[Any], device: torch.device) -> None:
        """Replace the objects by those of rank 0, which travel on `device`. All ranks give equally many."""
        for group in reversed(self.axis_groups):
            dist.broadcast_object_list(objects, group=group, group_src=0, device=device)


class Reduction:
    """An all-reduce along one axis after the other. The first axis has begun when this is made."""

    def __init__(
        self,
        tensor: Tensor,
        axis_groups: Sequence[AxisGroup],
        begin: Callable[[AxisGroup], Callable[[], object]],
        *,
        is_sum: bool,
    ) -> None:
        self._tensor = tensor
        self._begin = begin
        self._axis_groups = axis_groups
        self._is_rounded = is_sum and (tensor.is_floating_point() or tensor.is_complex())
        self._complete = begin(axis_groups[0]) if axis_groups else None

    def wait(self) -> None:
        """Complete it: the tensor is the result. Idempotent."""
        complete, self._complete = self._complete, None
        if complete is None:
            return
        complete()
        for group in self._axis_groups[1:]:
            self._begin(group)()
        for group in self._axis_groups[:-1] if self._is_rounded else ():
            dist.broadcast(self._tensor, group=group, group_src=0)


_current: RankGrid | None = None


def all_ranks() -> RankGrid:
    """Return the grid of the ranks of the default group.

    One for the process, as the default group is. Before `set_all_ranks`, and for a group that was not formed by
    `Group`, all ranks are one group.
    """
    return RankGrid.from_default_group() if _current is None else _current


def set_all_ranks(grid: RankGrid | None) -> None:
    """Called by `Group`, when the default group is up and before it is destroyed (None)."""
    global _current
    _current = grid


def make_separate_groups(grid: RankGrid, root: DeviceMesh, timeout: timedelta) -> RankGrid:
    """Return the ranks of `grid`, which is that of the default group or of `root`, in groups that nothing else uses. A
    collective."""
    if len(grid.axis_groups) < 2:
        return RankGrid([dist.new_group(timeout=timeout) for _ in grid.axis_groups])
    groups: list[AxisGroup] = []
    for axis in reversed(range(root.ndim)):
        size = root.size(axis)
        if size > 1:
            lines = root.mesh.movedim(axis, -1).reshape(-1, size).tolist()
            name = f"mesh_{(root.mesh_dim_names or ())[axis]}"
            made = [dist.new_group(line, timeout=timeout, group_desc=name) for line in lines]
            groups += [group for group, line in zip(made, lines, strict=True) if root.get_rank() in line]
    return RankGrid(groups)
