"""Keeps a bounded number of entries: those that were used last. Any thread; a pickled copy is empty."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def _one(_: object) -> int:
    return 1


class RecentlyUsed(Generic[K, V]):
    """The entries that were stored or read last: their sizes add up to `most`, or there is one. None is no value."""

    def __init__(self, most: int, size_of: Callable[[V], int] = _one) -> None:
        self._most = most
        self._size_of = size_of
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return RecentlyUsed, (self._most, self._size_of)

    def get(self, key: K) -> V | None:
        """Return the value, which then counts as just used; None if there is none."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
            return self._entries.get(key)

    def put(self, key: K, value: V) -> list[V]:
        """Store a value. Return the values that are dropped for it, also that which the key had before."""
        with self._lock:
            dropped = [self._entries.pop(key)] if key in self._entries else []
            self._entries[key] = value
            while len(self._entries) > 1 and sum(map(self._size_of, self._entries.values())) > self._most:
                dropped.append(self._entries.popitem(last=False)[1])
            return dropped

    def pop(self, key: K) -> V | None:
        """Drop one entry, and return its value; None if there is none."""
        with self._lock:
            return self._entries.pop(key, None)

    def pop_oldest(self) -> V | None:
        """Drop the least recently used entry, and return its value; None without entries."""
        with self._lock:
            return self._entries.popitem(last=False)[1] if self._entries else None

    def clear(self) -> list[V]:
        """Drop all entries, and return their values."""
        with self._lock:
            values = [*self._entries.values()]
            self._entries.clear()
            return values
