"""Records of a journal. That random lives of an attempt lose nothing is checked by their world (`KeptJournal`)."""

import json
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from shoal_service.core.persistent import IntMap, Table
from shoal_service.supervisor.journal_records import changes, encode, is_entry_due, make_digest, replayed


@dataclass(frozen=True)
class Part:
    number: float = 0.0
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Numbered:
    index: int
    part: Part
    is_on: bool = False


@dataclass(frozen=True)
class Whole:
    part: Part | None = None
    parts: tuple[Part, ...] = ()
    numbered: tuple[Numbered, ...] = ()
    by_index: dict[int, Part] = field(default_factory=dict)
    table: Table[Numbered] = field(default_factory=Table)
    int_map: IntMap[Part] = field(default_factory=IntMap)


WHOLE = TypeAdapter(Whole)
PARTS = st.builds(Part, number=st.floats(allow_nan=False, allow_infinity=False), names=st.tuples(st.text()))
NUMBERED = st.builds(Numbered, index=st.integers(0, 5), part=PARTS, is_on=st.booleans())
WHOLES = st.builds(
    Whole,
    numbered=st.lists(NUMBERED, max_size=4, unique_by=lambda one: one.index).map(tuple),
    part=st.none() | PARTS,
    parts=st.lists(PARTS, max_size=4).map(tuple),
    by_index=st.dictionaries(st.integers(), PARTS, max_size=3),
    table=st.lists(NUMBERED, max_size=4, unique_by=lambda one: one.index).map(
        lambda items: Table(sorted(items, key=lambda one: one.index))
    ),
    int_map=st.dictionaries(st.integers(), PARTS, max_size=3).map(IntMap),
)


def life(*states: Whole) -> tuple[bytes, list[bytes]]:
    """The entry of the first state, and the changes to each later one."""
    entry, records = WHOLE.dump_json(states[0]), []
    for before, after in pairwise(states):
        if (change := changes(before, after)) is not None:
            records.append(encode(make_digest(entry), len(records) + 1, change))
    return entry, records


def count_to(last: int) -> tuple[bytes, list[bytes]]:
    return life(*(Whole(part=Part(float(number))) for number in range(last + 1)))


def read(entry: bytes, records: list[bytes]) -> tuple[float, int]:
    found = replayed(entry, records)
    part = WHOLE.validate_json(found.entry).part
    assert part is not None
    return part.number, found.num_lost


@given(st.lists(WHOLES, min_size=1, max_size=5))
def test_an_entry_with_its_changes_is_the_last_state(states: list[Whole]) -> None:
    entry, records = life(*states)
    assert WHOLE.validate_json(replayed(entry, records).entry) == states[-1]


@given(st.lists(PARTS, max_size=6), st.data())
def test_items_that_are_kept_dropped_moved_or_added_are_found_again(before: list[Part], data: st.DataObject) -> None:
    kept = data.draw(st.lists(st.sampled_from(before))) if before else []
    after = (*kept, *data.draw(st.lists(PARTS, max_size=2)))
    entry, records = life(Whole(parts=tuple(before)), Whole(parts=after))
    assert WHOLE.validate_json(replayed(entry, records).entry).parts == after


def test_one_changed_item_of_a_thousand_is_a_short_record() -> None:
    before = Whole(parts=tuple(Part(float(number), ("a name",)) for number in range(1000)))
    after = replace(before, parts=(*before.parts[:500], Part(-1.0), *before.parts[501:]))
    entry, [record] = life(before, after)
    assert len(record) < 250 < len(entry) / 100


def test_of_items_with_an_index_only_the_changed_fields_are_written() -> None:
    before = Whole(numbered=tuple(Numbered(number, Part(names=("a long name",) * 9)) for number in range(9)))
    after = Whole(numbered=tuple(replace(one, is_on=True) for one in before.numbered if one.index != 4))
    entry, [record] = life(before, after)
    assert WHOLE.validate_json(replayed(entry, [record]).entry) == after
    assert b"long name" not in record and len(record) < len(entry) / 2


@given(st.lists(st.tuples(st.integers(0, 400), st.sampled_from(["replace", "drop", "add"])), max_size=30))
def test_changes_of_a_large_table_and_a_large_map_are_found_in_their_leaves(edits: list[tuple[int, str]]) -> None:
    before = Whole(
        table=Table(Numbered(number, Part()) for number in range(300)),
        int_map=IntMap((number, Part()) for number in range(300)),
    )
    table, int_map = before.table, before.int_map
    for number, what in edits:
        if what == "replace" and table.find(number) is not None:
            table = table.replaced(Numbered(number, Part(1.0), is_on=True))
            int_map = int_map.with_item(number, Part(1.0))
        elif what == "drop":
            table, int_map = table.without(number), int_map.without(number)
        elif what == "add":
            next_index = max((item.index for item in table), default=0) + 1
            table = table.added(Numbered(next_index, Part(2.0)))
            int_map = int_map.with_item(next_index, Part(2.0))
    after = replace(before, table=table, int_map=int_map)
    entry, records = life(before, after)
    read_back = WHOLE.validate_json(replayed(entry, records).entry)
    assert read_back == after and list(read_back.int_map) == list(after.int_map)
    assert sum(map(len, records)) <= 400 * len(edits) + 100


def test_equal_states_need_no_record() -> None:
    assert changes(Whole(parts=(Part(),)), Whole(parts=(Part(),))) is None


def test_a_torn_last_record_is_dropped() -> None:
    entry, records = count_to(3)
    for length in range(len(records[2])):
        assert read(entry, [*records[:2], records[2][:length]]) == (2.0, 0)


def test_after_a_damaged_record_in_the_middle_the_state_before_it_is_read_and_the_rest_is_counted() -> None:
    entry, records = count_to(4)
    assert read(entry, [records[0], records[1].replace(b"2.0", b"7.0"), *records[2:]]) == (1.0, 2)
    assert read(entry, records[1:]) == (0.0, 3), "the first is missing"


def test_changes_of_the_entry_before_are_void() -> None:
    _, old = count_to(3)
    entry, _ = life(Whole(part=Part(9.0)))
    assert read(entry, old) == (9.0, 0)


def test_an_entry_is_due_when_its_changes_are_as_long_or_many() -> None:
    assert not is_entry_due(1000, 63, 999)
    assert is_entry_due(1000, 1, 1000) and is_entry_due(1000, 64, 10)


def test_a_record_is_json() -> None:
    _, [record] = count_to(1)
    document: dict[str, Any] = json.loads(record)
    assert (document["number"], document["change"]) == (
        1,
        {"fields": {"part": {"fields": {"number": {"value": 1.0}}}}},
    )
