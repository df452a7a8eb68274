"""Persistent collections behave like the built-in ones, and a change copies one leaf."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from shoal_service.core.persistent import LEAF, IntMap, Table


@dataclass(frozen=True)
class Item:
    index: int
    text: str = ""


KEYS = st.integers(0, 3 * LEAF)
CHANGES = st.lists(st.tuples(KEYS, st.none() | st.text(max_size=1)), max_size=80)
"""None: without the key."""
JSON_MAP = TypeAdapter(IntMap[str])
JSON_TABLE = TypeAdapter(Table[Item])


@given(st.dictionaries(KEYS, st.text(max_size=1)), CHANGES)
def test_a_map_is_a_dict_after_any_changes(first: dict[int, str], changes: list[tuple[int, str | None]]) -> None:
    made, expected = IntMap(first), dict(first)
    for key, value in changes:
        before, copy = made, dict(made)
        if value is None:
            expected.pop(key, None)
            made = made.without(key)
        else:
            expected[key] = value
            made = made.with_item(key, value)
        assert dict(before) == copy, "the one before is as it was"
        assert list(made.items()) == list(expected.items()) and len(made) == len(expected)
        assert (key in made) == (key in expected) and made.get(key) == expected.get(key)
    assert made == expected and made == IntMap(expected)
    assert JSON_MAP.validate_json(JSON_MAP.dump_json(made)) == made
    assert JSON_MAP.dump_python(made) == expected


@given(st.sets(KEYS), CHANGES)
def test_a_table_is_its_items_by_index_after_any_changes(
    first: set[int], changes: list[tuple[int, str | None]]
) -> None:
    expected = {index: Item(index) for index in sorted(first)}
    made = Table(expected.values())
    for index, text in changes:
        before, copy = made, tuple(made)
        if text is None:
            expected.pop(index, None)
            made = made.without(index)
        elif not expected or index > max(expected):
            expected[index] = Item(index, text)
            made = made.added(expected[index])
        else:
            expected |= {index: Item(index, text)} if index in expected else {}
            made = made.replaced(Item(index, text))
        assert tuple(before) == copy, "the one before is as it was"
        items = tuple(expected.values())
        assert (tuple(made), tuple(reversed(made)), len(made)) == (items, items[::-1], len(items))
        assert made.find(index) == expected.get(index)
    assert made == tuple(expected.values()) and made == Table(expected.values())
    assert JSON_TABLE.validate_json(JSON_TABLE.dump_json(made)) == made


def test_a_change_copies_one_leaf() -> None:
    items = [Item(index) for index in range(100 * LEAF)]
    table, numbers = Table(items), IntMap((item.index, item) for item in items)
    for before, after in (
        (table, table.replaced(Item(500, "new"))),
        (table, table.without(500)),
        (numbers, numbers.with_item(500, Item(500, "new"))),
        (numbers, numbers.without(500)),
    ):
        here, there = ({id(leaf) for leaf in one.leaves} for one in (before, after))
        assert len(here) == 100 and len(there - here) == 1


def test_leaves_of_which_little_is_left_are_joined() -> None:
    table, numbers = Table(Item(index) for index in range(1000)), IntMap((index, "") for index in range(1000))
    for index in range(1000):
        if index % LEAF:
            table, numbers = table.without(index), numbers.without(index)
    assert len(table) == len(numbers) == 16
    assert len(table.leaves) <= 3 and len(numbers.leaves) <= 3


def test_what_is_absent_changes_nothing() -> None:
    table, numbers = Table([Item(3)]), IntMap({3: ""})
    assert table.replaced(Item(4)) is table and table.without(2) is table and table.find(9) is None
    assert numbers.without(4) is numbers and 4 not in numbers
