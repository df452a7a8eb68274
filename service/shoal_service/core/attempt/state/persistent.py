"""Persistent collections: each change makes a new one that shares all but one leaf with the one before.

    IntMap   a mapping from integers, in order of insertion     {3: a, 1: b, ...}  {7: c, ...}  {9: d}
    Table    a sequence of items by their `index`                (0, 1, 2, ...)  (64, 66, ...)  (130,)

A leaf has up to LEAF items. A thousand workers that leave a group in one turn are a thousand small changes; with tuples
and dicts each of them would copy all workers. The journal compares the collections leaf by leaf.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Protocol, TypeVar, get_args, overload

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

V = TypeVar("V")
LEAF = 64


class IntMap(Mapping[int, V]):
    __slots__ = ("_leaves", "_num")

    def __init__(self, items: Mapping[int, V] | Iterable[tuple[int, V]] = ()) -> None:
        found = list(dict(items).items())
        self._leaves = tuple(dict(found[at : at + LEAF]) for at in range(0, len(found), LEAF))
        self._num = len(found)

    @property
    def leaves(self) -> tuple[dict[int, V], ...]:
        """The leaves of the map, which must not be changed. A leaf that two maps have in common is in most cases the
        same object."""
        return self._leaves

    def with_item(self, key: int, value: V) -> IntMap[V]:
        """The map with this value for the key."""
        for at, leaf in enumerate(self._leaves):
            if key in leaf:
                return self._made((*self._leaves[:at], {**leaf, key: value}, *self._leaves[at + 1 :]), self._num)
        if self._leaves and len(self._leaves[-1]) < LEAF:
            return self._made((*self._leaves[:-1], {**self._leaves[-1], key: value}), self._num + 1)
        return self._made((*self._leaves, {key: value}), self._num + 1)

    def without(self, key: int) -> IntMap[V]:
        for at, leaf in enumerate(self._leaves):
            if key in leaf:
                rest = {k: value for k, value in leaf.items() if k != key}
                leaves = (*self._leaves[:at], *((rest,) if rest else ()), *self._leaves[at + 1 :])
                if len(leaves) > 2 + 2 * self._num // LEAF:  # many small leaves
                    return IntMap((k, value) for one in leaves for k, value in one.items())
                return self._made(leaves, self._num - 1)
        return self

    def __getitem__(self, key: int) -> V:
        for leaf in self._leaves:
            if key in leaf:
                return leaf[key]
        raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        return any(key in leaf for leaf in self._leaves)

    def __iter__(self) -> Iterator[int]:
        for leaf in self._leaves:
            yield from leaf

    def __len__(self) -> int:
        return self._num

    def __eq__(self, other: object) -> bool:
        if isinstance(other, IntMap) and self._leaves == other._leaves:
            return True
        return super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"IntMap({dict(self)!r})"

    @classmethod
    def _made(cls, leaves: tuple[dict[int, V], ...], num: int) -> IntMap[V]:
        made = cls.__new__(cls)
        made._leaves, made._num = leaves, num
        return made

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The schema of a JSON object."""
        (value,) = get_args(source)
        items = handler.generate_schema(dict[int, value])  # type: ignore[valid-type]
        return core_schema.no_info_before_validator_function(
            lambda given: given if isinstance(given, dict) else dict(given),
            core_schema.no_info_after_validator_function(cls, items),
            serialization=core_schema.plain_serializer_function_ser_schema(
                dict, return_schema=items, when_used="always"
            ),
        )


class Indexed(Protocol):
    @property
    def index(self) -> int: ...


T = TypeVar("T", bound=Indexed)
_index_of = attrgetter("index")


class Table(Sequence[T]):
    __slots__ = ("_firsts", "_leaves", "_num")

    def __init__(self, items: Iterable[T] = ()) -> None:
        """`items` must be in order of their index."""
        found = tuple(items)
        self._leaves = tuple(found[at : at + LEAF] for at in range(0, len(found), LEAF))
        self._firsts = tuple(leaf[0].index for leaf in self._leaves)
        self._num = len(found)

    @property
    def leaves(self) -> tuple[tuple[T, ...], ...]:
        """The leaves of the table. A leaf that two tables have in common is in most cases the same object."""
        return self._leaves

    def find(self, index: int) -> T | None:
        place = self._place(index)
        return self._leaves[place[0]][place[1]] if place is not None else None

    def added(self, *items: T) -> Table[T]:
        """The table with these items at its end. Their indexes must rise, and be greater than all others."""
        last = self._leaves[-1] if self._leaves and len(self._leaves[-1]) < LEAF else ()
        kept = self._leaves[:-1] if last else self._leaves
        new = (*last, *items)
        leaves = (*kept, *(new[at : at + LEAF] for at in range(0, len(new), LEAF)))
        return self._made(leaves, self._num + len(items))

    def replaced(self, item: T) -> Table[T]:
        """The table with this item in place of the one of the same index; unchanged if there is none."""
        place = self._place(item.index)
        if place is None:
            return self
        leaf, at = self._leaves[place[0]], place[1]
        return self._with_leaf(place[0], (*leaf[:at], item, *leaf[at + 1 :]), self._num)

    def without(self, index: int) -> Table[T]:
        place = self._place(index)
        if place is None:
            return self
        leaf, at = self._leaves[place[0]], place[1]
        made = self._with_leaf(place[0], (*leaf[:at], *leaf[at + 1 :]), self._num - 1)
        is_sparse = len(made._leaves) > 2 + 2 * made._num // LEAF
        return Table(made) if is_sparse else made

    def _place(self, index: int) -> tuple[int, int] | None:
        """Number of the leaf that holds this index, and the place in that leaf; None: the index is not in the table."""
        number = bisect_right(self._firsts, index) - 1
        if number < 0:
            return None
        leaf = self._leaves[number]
        at = bisect_left(leaf, index, key=_index_of)
        return (number, at) if at < len(leaf) and leaf[at].index == index else None

    def _with_leaf(self, number: int, leaf: tuple[T, ...], num: int) -> Table[T]:
        before, after = self._leaves[:number], self._leaves[number + 1 :]
        if not leaf:
            return self._made((*before, *after), num)
        is_same = leaf[0].index == self._firsts[number]
        return self._made((*before, leaf, *after), num, self._firsts if is_same else None)

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self._leaves)

    def __reversed__(self) -> Iterator[T]:
        return chain.from_iterable(map(reversed, reversed(self._leaves)))

    def __len__(self) -> int:
        return self._num

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[T, ...]: ...
    def __getitem__(self, at: int | slice) -> T | tuple[T, ...]:
        return tuple(self)[at]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Table) and self._leaves == other._leaves:
            return True
        return isinstance(other, (Table, tuple)) and len(self) == len(other) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Table({tuple(self)!r})"

    @classmethod
    def _made(cls, leaves: tuple[tuple[T, ...], ...], num: int, firsts: tuple[int, ...] | None = None) -> Table[T]:
        made = cls.__new__(cls)
        made._leaves, made._num = leaves, num
        made._firsts = firsts if firsts is not None else tuple([leaf[0].index for leaf in leaves])
        return made

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The schema of a JSON array."""
        (item,) = get_args(source)
        items = handler.generate_schema(tuple[item, ...])  # type: ignore[valid-type]
        return core_schema.no_info_before_validator_function(
            lambda given: given if isinstance(given, (list, tuple)) else tuple(given),
            core_schema.no_info_after_validator_function(cls, items),
            serialization=core_schema.plain_serializer_function_ser_schema(
                tuple, return_schema=items, when_used="always"
            ),
        )
