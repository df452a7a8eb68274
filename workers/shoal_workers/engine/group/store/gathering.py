"""One exchange of all ranks under a name: each gives a value, and once all have, everyone may have all of them. Pure.

The values are joined once, not once per rank: at 1,024 ranks a store would otherwise encode a million of them. Used by
`KeyValues`.
"""

from __future__ import annotations

from shoal_workers.engine.group.store.messages import join


class Gathering:
    """Of `num_ranks` ranks, numbered from 0."""

    def __init__(self, num_ranks: int) -> None:
        if num_ranks < 1:
            raise ValueError(f"{num_ranks} ranks exchange nothing")
        self._num_ranks = num_ranks
        self._values: dict[int, bytes] = {}
        self._joined = b""

    def give(self, rank: int, num_ranks: int, value: bytes) -> bool:
        """Whether this completes it. A value that replaces an earlier one is ignored once all ranks have given theirs.

        ValueError: the rank does not take part, or another rank has named another number of ranks.
        """
        if num_ranks != self._num_ranks:
            raise ValueError(f"one rank says {num_ranks} ranks, and another one {self._num_ranks}")
        if not 0 <= rank < num_ranks:
            raise ValueError(f"there is no rank {rank} among {num_ranks}")
        if self.is_complete:
            return False
        self._values[rank] = value
        is_last = len(self._values) == num_ranks
        if is_last:
            self._joined = join(self._values[one] for one in range(num_ranks))
        return is_last

    @property
    def is_complete(self) -> bool:
        return len(self._values) == self._num_ranks

    @property
    def num_values(self) -> int:
        return len(self._values)

    @property
    def joined(self) -> bytes:
        """All values by rank, see `split`; empty until it is complete."""
        return self._joined

    @property
    def absent(self) -> list[int]:
        """Ranks that have given none, ascending."""
        return [rank for rank in range(self._num_ranks) if rank not in self._values]
