"""Which collectives the training thread calls: their number, the newest, and how a step differs from the one before.

In every step a rank calls the same collectives, in the same order, with the same sizes. A rank that leaves this order
alone makes the others wait for ever, or exchanges the wrong tensors; the comparison with its own step before shows it,
even in a group of two. Written by the training thread; any thread reads `newest`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shoal_workers.contract.errors.suspects import Collective

NAMES = {
    "allreduce": "all-reduce",
    "allreduce_coalesced": "all-reduce",
    "allgather": "all-gather",
    "_allgather_base": "all-gather",
    "all_gather_single": "all-gather",
    "allgather_into_tensor_coalesced": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "_reduce_scatter_base": "reduce-scatter",
    "reduce_scatter_single": "reduce-scatter",
    "reduce_scatter_tensor_coalesced": "reduce-scatter",
    "alltoall": "all-to-all",
    "alltoall_base": "all-to-all",
    "all_to_all_single": "all-to-all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "send": "send",
    "recv": "receive",
}
"""Methods of torch's ProcessGroup that are recorded, and the words for them."""
_Call = tuple[str, int]


class CollectiveLog:
    """One per generation and training thread."""

    def __init__(self) -> None:
        self._number = 0
        self._last: _Call = ("", 0)
        self._before: list[_Call] = []
        """The calls of the last complete step."""
        self._is_usual = False
        """The step before that had the same calls. The first step of a generation has others."""
        self._step: list[_Call] = []
        self._in_step = False
        self._deviation = ""
        self.is_waiting = False

    def begin_step(self) -> None:
        self._step, self._in_step, self._deviation = [], True, ""

    def end_step(self) -> None:
        self._is_usual = self._before == self._step
        self._before, self._in_step = self._step, False

    def called(self, method: str, arguments: tuple[Any, ...]) -> None:
        call = (NAMES[method], _num_bytes(arguments))
        self._number, self._last = self._number + 1, call
        if not self._in_step:
            return
        place = len(self._step)
        self._step.append(call)
        if self._deviation or not self._is_usual:
            return
        expected = self._before[place] if place < len(self._before) else None
        if expected != call:
            usual = _words(expected) if expected else "no further collective"
            self._deviation = (
                f"called {_words(call)} as number {place + 1} of its step, where its last step had {usual}"
            )

    @property
    def newest(self) -> Collective:
        name, num_bytes = self._last
        return Collective(
            number=self._number,
            name=name or "none",
            bytes=num_bytes,
            is_waiting=self.is_waiting,
            deviation=self._deviation,
        )


def _words(call: _Call) -> str:
    return f"{'an' if call[0].startswith('a') else 'a'} {call[0]} of {call[1]:,} bytes"


def _num_bytes(arguments: tuple[Any, ...]) -> int:
    """Of the tensors in the first two arguments: one, a list, or a list of lists."""
    return sum(_bytes_of(one) for one in arguments[:2])


def _bytes_of(one: Any) -> int:
    if isinstance(one, Tensor):
        return one.numel() * one.element_size()
    return sum(map(_bytes_of, one)) if isinstance(one, (list, tuple)) else 0
