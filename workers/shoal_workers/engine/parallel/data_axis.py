"""What the passes, the runtime and the state need of the data axis of one part of a model, whatever it does to it.

    CollectiveOrder    the parameters are sharded: FSDP2 gathers them, and sums gradients in the last backward pass
    PlainReplica       every rank has the whole part, with the user's own parameters; gradients are summed afterwards

Whoever uses a `DataAxis` need not know which of the two it is. Made by `assemble`. Training thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

T = TypeVar("T")


class OrderVaries(BaseException):
    """This pass calls other collectives than the other ranks, or than the first pass did. Not an Exception, because a
    task may catch those."""


class DataAxis:
    """The data axis of one part of a model. Outlives generations, as the model does. Defaults are those of whole
    parameters, whose passes need no collective."""

    def begin_generation(self) -> None:
        """Called on all ranks of a group that has just formed: forgets the passes of the group before."""

    def park(self) -> None:
        """Drops all references to the groups, which are destroyed next, and what a broken step left in the model."""

    def revive(self) -> None:
        """Called on all ranks once the meshes have the groups of the next generation."""

    def begin_step(self) -> None:
        """Forgets which parameters were used."""

    def in_loss(self) -> AbstractContextManager[None]:
        """Surrounds the task's loss. A backward pass within it (`torch.autograd.grad` of a gradient penalty) ends no
        micro-batch."""
        raise NotImplementedError

    def run(self, kind: str, one_pass: Callable[[], T]) -> T | None:
        """Run one micro-batch. `kind`: the same for passes that call the same collectives.

        Returns:
            None: only this rank deviated; the others have got what they waited for. See `any_deviated`.

        Raises:
            OrderVaries: on all ranks alike.
        """
        return one_pass()

    def prepare_backward(self, *, is_last: bool) -> None:
        """Says whether the next backward pass is the last one of a step with several."""

    def add_up(self) -> None:
        """Called after the last backward pass of a step: then `grad` of each parameter has the sum over all ranks."""

    def sum_nothing(self) -> None:
        """Called after `begin_generation`: the caller sums the gradients of this generation itself."""
        raise AssertionError("no legal layout sums whole gradients exactly: deterministic mode shards the model")

    def used_parameters(self) -> set[int]:
        """Ids of the parameters of this part that a backward pass on this rank since `begin_step` had a gradient
        for."""
        raise NotImplementedError

    def written_parameter(self) -> str | None:
        """Name of a parameter that a forward pass has written to since the last call. None if there is none."""
        raise NotImplementedError

    @property
    def has_deviated(self) -> bool:
        """True if this rank has left a pass."""
        return False

    def any_deviated(self) -> bool:
        """All ranks, after passes: whether one of them has left a pass."""
        return False

    def keep_whole(self) -> None:
        """All ranks, after they have deviated or before the first pass of a generation: drop the gradients; parameters
        stay whole during a step from now on."""

    def reshard(self) -> None:
        """Shards the parameters again that stay whole after forward passes without a backward pass."""

    def records(self) -> Mapping[int, Any]:
        """FSDP's record of each parameter that it shards, by the parameter's id."""
        return {}
