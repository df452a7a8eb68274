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

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shoal_workers.checkpoint.save_plan import REPLICATE
from shoal_workers.engine.group.gradient_buckets import GradientBuckets
from shoal_workers.engine.parallel.written import HASHED_STEPS, mark_of

T = TypeVar("T")


class PlainReplica:
    """One rank's replica of a model. See `DataAxis` for the methods."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh, *, may_write: bool) -> None:
        """`may_write`: forward passes may write to parameters."""
        self._mesh = mesh
        self._may_write = may_write
        self._named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._buckets: GradientBuckets | None = None
        """None if there is one rank."""
        if REPLICATE in (mesh.mesh_dim_names or ()):
            self._buckets = GradientBuckets([*self._named.values()])
        self._used: set[int] = set()
        self._num_steps = 0
        self._written: str | None = None

    def begin_generation(self) -> None:
        self._num_steps = 0
        if self._buckets is not None:
            self._buckets.group = self._mesh.get_group(REPLICATE)

    def park(self) -> None:
        if self._buckets is not None:
            self._buckets.begin()
            self._buckets.group = None

    def revive(self) -> None:
        pass

    def begin_step(self) -> None:
        self._used.clear()
        self._num_steps += 1

    @contextmanager
    def in_loss(self) -> Iterator[None]:
        before = self._marks()
        yield
        after = self._marks()
        self._written = next((name for name, mark in before.items() if after[name] != mark), self._written)

    def run(self, kind: str, one_pass: Callable[[], T]) -> T | None:
        return one_pass()

    def prepare_backward(self, *, is_last: bool) -> None:
        pass

    def add_up(self) -> None:
        for parameter in self._named.values():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        self._used = {id(parameter) for parameter in self._named.values() if parameter.grad is not None}
        if self._buckets is not None:
            self._buckets.send()
            self._buckets.wait_for_sums()
            self._buckets.give(1.0)

    def sum_nothing(self) -> None:
        raise AssertionError("no legal layout sums whole gradients exactly: deterministic mode shards the model")

    def used_parameters(self) -> set[int]:
        return self._used

    def written_parameter(self) -> str | None:
        written, self._written = self._written, None
        return written

    @property
    def has_deviated(self) -> bool:
        return False

    def any_deviated(self) -> bool:
        return False

    def keep_whole(self) -> None:
        pass

    def stay_whole(self) -> None:
        pass

    def reshard(self) -> None:
        pass

    def records(self) -> Mapping[int, Any]:
        return {}

    def _marks(self) -> dict[str, tuple[int, tuple[int, int, int]]]:
        """For each parameter torch's count of its changes, and what differs after one that torch does not count. Empty
        if they may be written."""
        if self._may_write:
            return {}
        is_hashed = self._num_steps <= HASHED_STEPS
        return {
            name: (parameter._version, mark_of(parameter, is_hashed=is_hashed))
            for name, parameter in self._named.items()
        }
