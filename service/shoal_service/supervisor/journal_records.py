"""The records of one life in a supervisor's journal, as bytes: one whole entry, and numbered changes since it. Pure.

    entry    {...}                                           replaces the entry before; older changes are void then
    changes  {"base": digest of the entry, "number": 1, 2, 3 ..., "check": of the change, "change": {...}}

A record of changes names the entry that it belongs to. So a supervisor that dies after it has written a new entry, and
before it has deleted the changes since the old one, leaves nothing that can be mistaken. Hidden here: what has changed
between two values, as a JSON document, and the JSON document with these changes.

    changes(before, after)  ->  {"fields": {"pool": {"fields": {"workers": {"items": [[0, 17], {"value": ...}]}}}}}

    {"value": v}                        in place of what was there
    {"fields": {name: change}}          of an object
    {"entries": {key: change}, "without": {key: 0}}    of a dict
    {"items": [[first, number], {"at": place, "change": change}, {"value": v}, ...]}
                                        of a tuple: runs of the items before, changed ones, and new ones

The values are frozen dataclasses, models, tuples, dicts, and the persistent collections of the attempt's state. What is
the same object in both is not looked into, so the cost is that of the changed parts, one comparison for each item of a
tuple or a dict that has changed, and one for each leaf of a persistent collection.

Only `journal.py` imports this: it stores the records, and knows of lives and fences; this never reads or writes the
head's store, so that every change of a state can be tested without one.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from hashlib import blake2b
from typing import Any, Generic, TypeVar

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, to_json, to_jsonable_python

from shoal_service.core.persistent import IntMap, Table
from shoal_workers.contract.plain_text import plain

_MAX_CHANGES = 64
"""Most records of changes to one entry before a whole entry is written. A successor reads one after the other, a
millisecond each."""


Change = dict[str, Any]
Entry = TypeVar("Entry", bound=BaseModel)


class Records(Generic[Entry]):
    """Decides which record of a life is the next one. Used by the thread that writes."""

    def __init__(self) -> None:
        self._entry: Entry | None = None
        self._base, self._entry_bytes, self._changes_bytes = "", 0, 0
        self._num_all = 0
        """Number of records of changes so far, of all entries: their keys are never used twice."""
        self._first = 1
        """Number of the current entry's first record of changes."""
        self._void: list[int] = []

    def next(self, entry: Entry) -> tuple[int | None, bytes]:
        """Makes the next record.

        Returns the number and the bytes of a record of changes, empty if there are none; or None, and a whole entry.
        """
        before, self._entry = self._entry, entry
        num_changes = self._num_all - self._first + 1
        if before is None or is_entry_due(self._entry_bytes, num_changes, self._changes_bytes):
            return None, self._join_entry(entry)
        change = changed_fields(before, entry, type(entry).model_fields)
        if change is None:
            return self._num_all, b""
        record = encode(self._base, num_changes + 1, change)
        if len(record) >= self._entry_bytes:
            return None, self._join_entry(entry)
        self._num_all += 1
        self._changes_bytes += len(record)
        return self._num_all, record

    def take_void(self) -> list[int]:
        """Numbers of the records that can be deleted once the newest entry is written."""
        void, self._void = self._void, []
        return void

    def _join_entry(self, entry: Entry) -> bytes:
        raw = whole(entry)
        self._base, self._entry_bytes, self._changes_bytes = make_digest(raw), len(raw), 0
        self._void += range(self._first, self._num_all + 1)
        self._first = self._num_all + 1
        return raw


@dataclass(frozen=True, slots=True)
class Replayed:
    entry: bytes
    """The entry with all changes that could be read."""
    num_changes: int
    num_lost: int
    """Number of records after a damaged one, which cannot be applied without it. A damaged record at the end is not
    counted: it was being written when its supervisor died, so nothing has followed from it."""


def is_entry_due(entry_bytes: int, num_changes: int, changes_bytes: int) -> bool:
    """Return whether the next record is a whole entry: the changes since the last one are as long as itself, or
    many."""
    return num_changes >= _MAX_CHANGES or changes_bytes >= entry_bytes


def make_digest(entry: bytes) -> str:
    return blake2b(entry, digest_size=12).hexdigest()


def whole(entry: BaseModel) -> bytes:
    try:
        return entry.model_dump_json().encode()
    except PydanticSerializationError:  # text that has no UTF-8
        return to_json(plain(entry.model_dump(mode="json")))


def encode(base: str, number: int, change: Change) -> bytes:
    """Makes a record of changes. `base`: digest of the entry; `number`: from 1 for each entry."""
    try:
        text = to_json(change, by_alias=False, fallback=_make_plain)
    except PydanticSerializationError:  # text that has no UTF-8
        text = to_json(plain(to_jsonable_python(change, by_alias=False, fallback=_make_plain)))
    head = json.dumps({"base": base, "number": number, "check": zlib.crc32(text)}).encode()
    return head[:-1] + b', "change": ' + text + b"}"


def _make_plain(value: Any) -> Any:
    match value:
        case IntMap():
            return dict(value)
        case Table():
            return tuple(value)
        case _:
            raise TypeError(f"{type(value).__name__} has no form in the journal")


def replayed(entry: bytes, records: Iterable[bytes]) -> Replayed:
    """Applies the records to their entry. `records`: in any order; those of other entries are passed over."""
    base = make_digest(entry)
    known = dict(replay for raw in records if (replay := _decoded(raw, base)) is not None)
    number = next(number for number in range(1, len(known) + 2) if number not in known) - 1
    if not number:
        return Replayed(entry, 0, len(known))
    document = json.loads(entry)
    for index in range(1, number + 1):
        document = applied(document, known[index])
    return Replayed(json.dumps(document).encode(), number, len(known) - number)


def _decoded(raw: bytes, base: str) -> tuple[int, Change] | None:
    """The number and the change of a record; None if it belongs to another entry, or is damaged."""
    head, _, text = raw[:-1].partition(b', "change": ')
    try:
        fields: dict[str, Any] = json.loads(head + b"}")
        if fields["base"] != base or fields["check"] != zlib.crc32(text):
            return None
        return int(fields["number"]), json.loads(text)
    except (ValueError, LookupError, TypeError):
        return None


def changes(before: Any, after: Any) -> Change | None:
    """The changes between two values; None if nothing has changed. The values in it are those of `after`, not yet
    JSON."""
    if before is after:
        return None
    if type(before) is not type(after):
        return {"value": after}
    match after:
        case _ if is_dataclass(after):
            return changed_fields(before, after, [field.name for field in fields(after)])
        case Table():
            return _changed_leaves(before, after)
        case tuple():
            return _changed_items(before, after)
        case IntMap():
            return _changed_entries(*_find_differing(before, after))
        case Mapping():
            return _changed_entries(before, after)
        case _:
            return None if before == after else {"value": after}


def changed_fields(before: Any, after: Any, names: Iterable[str]) -> Change | None:
    """The fields that differ between two objects that both have these fields."""
    changed_values = {name: changes(getattr(before, name), getattr(after, name)) for name in names}
    changed = {name: change for name, change in changed_values.items() if change is not None}
    return {"fields": changed} if changed else None


def applied(document: Any, change: Change) -> Any:
    """Applies a change to the parsed JSON of the value before, which stays as it is, and returns that of the value
    after.

    Raises:
        LookupError, TypeError: the change is of another document.
    """
    match change:
        case {"value": value}:
            return value
        case {"fields": changed}:
            return document | {name: applied(document[name], value) for name, value in changed.items()}
        case {"items": parts}:
            return [item for part in parts for item in _cut_items(document, part)]
        case _:
            kept = {key: value for key, value in document.items() if key not in change["without"]}
            return kept | {key: applied(document.get(key), value) for key, value in change["entries"].items()}


def _changed_items(before: tuple[Any, ...], after: tuple[Any, ...]) -> Change | None:
    """The change of a tuple. Items are recognised by identity, and changed ones by their `index` if they have one: an
    equal new object without one is a new item."""
    parts = _Finder(enumerate(before)).parts(after)
    if parts == [[0, len(before)]] or before == after:
        return None
    return {"items": parts}


def _changed_leaves(before: Table[Any], after: Table[Any]) -> Change | None:
    """The items that differ between two lists, without a look into the leaves that both have."""
    kept = {id(leaf) for leaf in after.leaves}
    place_of_leaf: dict[int, int] = {}
    others: list[tuple[int, Any]] = []
    place = 0
    for leaf in before.leaves:
        if id(leaf) in kept:
            place_of_leaf[id(leaf)] = place
        else:
            others += enumerate(leaf.values(), place)
        place += len(leaf)
    finder, parts = _Finder(others), list[Any]()
    for leaf in after.leaves:
        place_before = place_of_leaf.get(id(leaf))
        _join(parts, finder.parts(tuple(leaf.values())) if place_before is None else [[place_before, len(leaf)]])
    return None if parts == [[0, len(before)]] or (not before and not parts) else {"items": parts}


class _Finder:
    """Finds items in the list before the change."""

    def __init__(self, before: Iterable[tuple[int, Any]]) -> None:
        """`before`: items with their places."""
        items = list(before)
        self._place_of = {id(item): place for place, item in items}
        self._by_index = {
            item.index: (place, item) for place, item in items if is_dataclass(item) and hasattr(item, "index")
        }

    def parts(self, after: Iterable[Any]) -> list[Any]:
        parts: list[Any] = []
        for item in after:
            place = self._place_of.get(id(item))
            changed: Change | None = {"value": item}
            if place is None and (known := self._by_index.get(getattr(item, "index", None))) is not None:
                changed = changes(known[1], item)
                place = known[0] if changed is None else None
                if changed is not None and "fields" in changed:
                    changed = {"at": known[0], "change": changed}
            _join(parts, [changed if place is None else [place, 1]])
        return parts


def _join(parts: list[Any], more: list[Any]) -> None:
    """Adds a run of items to `parts`. A run that continues the last one prolongs it."""
    for part in more:
        if isinstance(part, list) and parts and isinstance(parts[-1], list) and sum(parts[-1]) == part[0]:
            parts[-1] = [parts[-1][0], parts[-1][1] + part[1]]
        else:
            parts.append(part)


def _find_differing(before: IntMap[Any], after: IntMap[Any]) -> tuple[dict[int, Any], dict[int, Any]]:
    """The entries that only one of the two leaves has."""
    here, there = ({id(leaf) for leaf in entries.leaves} for entries in (before, after))
    of_before = {key: value for leaf in before.leaves if id(leaf) not in there for key, value in leaf.items()}
    of_after = {key: value for leaf in after.leaves if id(leaf) not in here for key, value in leaf.items()}
    return of_before, of_after


def _cut_items(document: list[Any], part: Any) -> list[Any]:
    if isinstance(part, dict):
        return [applied(document[part["at"]], part["change"]) if "at" in part else part["value"]]
    first, number = part
    if first + number > len(document):
        raise LookupError(f"items {first} to {first + number} of {len(document)}")
    return document[first : first + number]


def _changed_entries(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> Change | None:
    changed = {key: changes(before[key], value) if key in before else {"value": value} for key, value in after.items()}
    entries = {key: change for key, change in changed.items() if change is not None}
    without = {key: 0 for key in before if key not in after}
    return {"entries": entries, "without": without} if entries or without else None
