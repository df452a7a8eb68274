"""Persistent collections: each change makes a new one that shares all but one leaf with the one before.

    IntMap   a mapping from integers, in order of insertion     {3: a, 1: b, ...}  {7: c, ...}  {9: d}
    Table    a sequence of items by their `index`: the values of an IntMap

A leaf has up to LEAF items. A thousand workers that leave a group in one turn are a thousand small changes; with tuples
and dicts each of them would copy all workers. The journal compares the collections leaf by leaf.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol, TypeVar, get_args, overload

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

V = TypeVar("V")
LEAF = 64


class IntMap(Mapping[int, V]):
    __slots__ = ("_leaves", "_num")

    def __init__(self, items: Mapping[int, V] | Iterable[tuple[int, V]] = ()) -> None:
        pairs = list(dict(items).items())
        self._leaves = tuple(dict(pairs[at : at + LEAF]) for at in range(0, len(pairs), LEAF))
        self._num = len(pairs)

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
                    return IntMap((k, value) for leaf in leaves for k, value in leaf.items())
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
        return _make_schema(cls, dict, handler.generate_schema(dict[int, value]))  # type: ignore[valid-type]


def _make_schema(collection: type[Any], plain: type[Any], items: CoreSchema) -> CoreSchema:
    """Make the schema of a collection that is validated and written as a plain one of builtin type."""
    return core_schema.no_info_before_validator_function(
        lambda given: given if isinstance(given, (dict, list, tuple)) else plain(given),
        core_schema.no_info_after_validator_function(collection, items),
        serialization=core_schema.plain_serializer_function_ser_schema(plain, return_schema=items, when_used="always"),
    )


class Indexed(Protocol):
    @property
    def index(self) -> int: ...


T = TypeVar("T", bound=Indexed)


class Table(Sequence[T]):
    __slots__ = ("_items",)

    def __init__(self, items: Iterable[T] = ()) -> None:
        """`items` must be in order of their index."""
        self._items: IntMap[T] = IntMap((item.index, item) for item in items)

    @property
    def leaves(self) -> tuple[dict[int, T], ...]:
        """The leaves of the table, as those of a map from the index."""
        return self._items.leaves

    def find(self, index: int) -> T | None:
        return self._items.get(index)

    def added(self, *items: T) -> Table[T]:
        """The table with these items at its end. Their indexes must rise, and be greater than all others."""
        table = self._items
        for item in items:
            table = table.with_item(item.index, item)
        return self._made(table)

    def replaced(self, item: T) -> Table[T]:
        """The table with this item in place of the item of the same index; unchanged if there is none."""
        return self._made(self._items.with_item(item.index, item)) if item.index in self._items else self

    def without(self, index: int) -> Table[T]:
        return self._made(self._items.without(index)) if index in self._items else self

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(leaf.values() for leaf in self.leaves)

    def __reversed__(self) -> Iterator[T]:
        return chain.from_iterable(reversed(leaf.values()) for leaf in reversed(self.leaves))

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[T, ...]: ...
    def __getitem__(self, at: int | slice) -> T | tuple[T, ...]:
        return tuple(self)[at]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Table) and self.leaves == other.leaves:
            return True
        return isinstance(other, (Table, tuple)) and len(self) == len(other) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Table({tuple(self)!r})"

    @classmethod
    def _made(cls, items: IntMap[T]) -> Table[T]:
        made = cls.__new__(cls)
        made._items = items
        return made

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The schema of a JSON array."""
        (item,) = get_args(source)
        return _make_schema(cls, tuple, handler.generate_schema(tuple[item, ...]))  # type: ignore[valid-type]
