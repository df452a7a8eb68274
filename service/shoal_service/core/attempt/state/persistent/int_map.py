"""IntMap: an immutable mapping from integers, in order of insertion like a dict, of which a changed copy is cheap.

    leaves   {3: a, 1: b, ...}  {7: c, ...}  {9: d}      each of up to LEAF items
    with_item(7, x)             copies the leaf of 7 and the list of leaves

A look-up asks one leaf after the other: for a thousand items that is 16.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar, get_args

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

T = TypeVar("T")
LEAF = 64


class IntMap(Mapping[int, T]):
    __slots__ = ("_leaves", "_num")

    def __init__(self, items: Mapping[int, T] | Iterable[tuple[int, T]] = ()) -> None:
        found = list(dict(items).items())
        self._leaves = tuple(dict(found[at : at + LEAF]) for at in range(0, len(found), LEAF))
        self._num = len(found)

    @property
    def leaves(self) -> tuple[dict[int, T], ...]:
        """Not to be changed. A leaf that two maps have in common is the same object, most of the time."""
        return self._leaves

    def with_item(self, key: int, value: T) -> IntMap[T]:
        """With this value, in the place of the one that the key had."""
        for at, leaf in enumerate(self._leaves):
            if key in leaf:
                return self._made((*self._leaves[:at], {**leaf, key: value}, *self._leaves[at + 1 :]), self._num)
        if self._leaves and len(self._leaves[-1]) < LEAF:
            return self._made((*self._leaves[:-1], {**self._leaves[-1], key: value}), self._num + 1)
        return self._made((*self._leaves, {key: value}), self._num + 1)

    def without(self, key: int) -> IntMap[T]:
        for at, leaf in enumerate(self._leaves):
            if key in leaf:
                rest = {k: value for k, value in leaf.items() if k != key}
                leaves = (*self._leaves[:at], *((rest,) if rest else ()), *self._leaves[at + 1 :])
                if len(leaves) > 2 + 2 * self._num // LEAF:  # many small leaves
                    return IntMap((k, value) for one in leaves for k, value in one.items())
                return self._made(leaves, self._num - 1)
        return self

    def __getitem__(self, key: int) -> T:
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
    def _made(cls, leaves: tuple[dict[int, T], ...], num: int) -> IntMap[T]:
        made = cls.__new__(cls)
        made._leaves, made._num = leaves, num
        return made

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """In JSON it is an object."""
        (value,) = get_args(source)
        items = handler.generate_schema(dict[int, value])  # type: ignore[valid-type]
        return core_schema.no_info_before_validator_function(
            lambda given: given if isinstance(given, dict) else dict(given),
            core_schema.no_info_after_validator_function(cls, items),
            serialization=core_schema.plain_serializer_function_ser_schema(
                dict, return_schema=items, when_used="always"
            ),
        )
