"""Worker-seconds of a window of time, from the accounts of jobs, which only grow.

A job's accounts are sampled now and then: each sample has all worker-seconds since the job was created, by account.
Between two samples they are taken to grow evenly. `Window.add` books the difference within each interval of the window.
Seconds that move from one account to another (a step that turns out to be lost) count where they are at the end of an
interval; an account that shrinks counts as 0 there.

Pure; store/timeline.py calls it, once for each project.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TypeAlias

Accounts: TypeAlias = Mapping[str, float]
"""Worker-seconds by account since the job was created."""


class Window:
    """Worker-seconds by account in each of the intervals between `edges`."""

    def __init__(self, edges: Sequence[float]) -> None:
        """`edges`: times in rising order, at least two."""
        self._edges = edges
        self.by_account: dict[str, list[float]] = defaultdict(lambda: [0.0] * (len(edges) - 1))

    def add(self, samples: Sequence[tuple[float, Accounts]]) -> None:
        """Book what a job spent. `samples`: in the order of their times; the first is that of its creation."""
        if not samples:
            return
        before = _at(samples, self._edges[0])
        for index, edge in enumerate(self._edges[1:]):
            after = _at(samples, edge)
            for account, amount in after.items():
                more = amount - before.get(account, 0.0)
                if more > 0:
                    self.by_account[account][index] += more
            before = after

    def totals(self) -> dict[str, float]:
        """The sums over the whole window."""
        return {account: sum(amounts) for account, amounts in self.by_account.items()}


def edges_of(since: float, until: float, number: int) -> list[float]:
    """The edges of `number` equal intervals."""
    return [since + (until - since) * index / number for index in range(number)] + [until]


def _at(samples: Sequence[tuple[float, Accounts]], at: float) -> Accounts:
    """The accounts at a time. Before the first sample they are empty, after the last one as there."""
    index = bisect_right(samples, at, key=lambda sample: sample[0])
    if index == 0:
        return {}
    began, first = samples[index - 1]
    if index == len(samples) or began == at:
        return first
    ends, second = samples[index]
    share = (at - began) / (ends - began)
    names = {*first, *second}
    return {name: (1 - share) * first.get(name, 0.0) + share * second.get(name, 0.0) for name in names}
