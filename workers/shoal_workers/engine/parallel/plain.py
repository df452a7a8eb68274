"""The data axis of a model that every rank has whole: it trains the user's own module with its own parameters.

    micro-batches     each adds to `grad`, as in a plain loop
    after the last    the gradients are copied into buckets; each is one all-reduce, and `grad` a view of its sum
    update            of all parameters, on every rank alike

Nothing of the model is replaced or wrapped. So attributes of parameters, hooks, references from lists and closures, and
penalties over `model.parameters()` mean what they mean in plain torch. With one worker it is the user's loop.

A forward pass that writes to a parameter is refused, as in a sharded model: each rank would write other values, since
it sees other samples and another number of micro-batches. A job of one worker with one micro-batch a step and
without snapshots may do so. Made by
`assemble`; see `DataAxis`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shoal_workers.checkpoint.save_plan import REPLICATE
from shoal_workers.engine.group.all_ranks import RankGrid
from shoal_workers.engine.group.gradient_buckets import GradientBuckets
from shoal_workers.engine.group.rounded_sums import RoundedSums
from shoal_workers.engine.parallel.data_axis import DataAxis
from shoal_workers.engine.parallel.written import HASHED_STEPS, first_written, marks_of


class PlainReplica(DataAxis):
    """One rank's replica of a model. See `DataAxis` for the methods."""

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, *, may_write: bool, rounded: RoundedSums | None = None
    ) -> None:
        """`may_write`: forward passes may write to parameters. `rounded`: adds up gradients."""
        self._mesh = mesh
        self._may_write = may_write
        self._parameters = dict(model.named_parameters())
        self._trained = [parameter for parameter in self._parameters.values() if parameter.requires_grad]
        self._buckets: GradientBuckets | None = None
        """None if there is one rank."""
        if REPLICATE in (mesh.mesh_dim_names or ()):
            self._buckets = GradientBuckets(self._trained, rounded=rounded)
        self._used: set[int] = set()
        self._num_steps = 0
        self._written: str | None = None

    def begin_generation(self) -> None:
        self._num_steps = 0
        if self._buckets is not None:
            self._buckets.ranks = RankGrid([self._mesh.get_group(REPLICATE)])

    def park(self) -> None:
        if self._buckets is not None:
            self._buckets.begin()
            self._buckets.ranks = None

    def begin_step(self) -> None:
        self._used.clear()
        self._num_steps += 1

    @contextmanager
    def in_loss(self) -> Iterator[None]:
        before = self._marks()
        yield
        if (number := first_written(before, self._marks())) is not None:
            self._written = list(self._parameters)[number]

    def add_up(self) -> None:
        for parameter in self._trained:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        self._used = {id(parameter) for parameter in self._trained if parameter.grad is not None}
        if self._buckets is not None:
            self._buckets.send()
            self._buckets.wait_for_sums()
            self._buckets.give(1.0)

    def used_parameters(self) -> set[int]:
        return self._used

    def written_parameter(self) -> str | None:
        written, self._written = self._written, None
        return written

    def _marks(self) -> list[tuple[int, ...]]:
        """Empty if parameters may be written."""
        is_hashed = self._num_steps <= HASHED_STEPS
        return [] if self._may_write else marks_of(self._parameters.values(), is_hashed=is_hashed)
