"""The records of one life in the journal, as bytes: one whole entry, and numbered changes since it. Pure.

    entry    {...}                                           replaces the entry before; older changes are void then
    changes  {"base": digest of the entry, "number": 1, 2, 3 ..., "check": of the change, "change": {...}}

A record of changes names the entry that it belongs to. So a supervisor that dies after it has written a new entry, and
before it has deleted the changes since the old one, leaves nothing that can be mistaken.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, to_json, to_jsonable_python

from shoal_service.core.attempt.state.persistent import IntMap, Table
from shoal_service.supervisor.journaling.changes import Change, applied
from shoal_workers.contract.plain_text import plain

_MAX_CHANGES = 64
"""A successor reads one after the other, a millisecond each."""


@dataclass(frozen=True, slots=True)
class Replayed:
    entry: bytes
    """The entry with all changes that could be read."""
    num_changes: int
    num_lost: int
    """Records after a damaged one, which cannot be applied without it. A damaged record at the end is not counted: it
    was being written when its supervisor died, so nothing has followed from it."""


def is_entry_due(entry_bytes: int, num_changes: int, changes_bytes: int) -> bool:
    """Whether the next record is a whole entry: the changes since the last one are as long as itself, or many."""
    return num_changes >= _MAX_CHANGES or changes_bytes >= entry_bytes


def digest_of(entry: bytes) -> str:
    return blake2b(entry, digest_size=12).hexdigest()


def whole(entry: BaseModel) -> bytes:
    try:
        return entry.model_dump_json().encode()
    except PydanticSerializationError:  # text that has no UTF-8
        return to_json(plain(entry.model_dump(mode="json")))


def encode(base: str, number: int, change: Change) -> bytes:
    """`base`: digest of the entry; `number`: from 1 for each entry."""
    try:
        text = to_json(change, by_alias=False, fallback=_plain)
    except PydanticSerializationError:  # text that has no UTF-8
        text = to_json(plain(to_jsonable_python(change, by_alias=False, fallback=_plain)))
    head = json.dumps({"base": base, "number": number, "check": zlib.crc32(text)}).encode()
    return head[:-1] + b', "change": ' + text + b"}"


def _plain(value: Any) -> Any:
    match value:
        case IntMap():
            return dict(value)
        case Table():
            return tuple(value)
        case _:
            raise TypeError(f"{type(value).__name__} has no form in the journal")


def replayed(entry: bytes, records: Iterable[bytes]) -> Replayed:
    """`records`: in any order; those of other entries are passed over."""
    base = digest_of(entry)
    known = dict(found for raw in records if (found := _decoded(raw, base)) is not None)
    number = next(number for number in range(1, len(known) + 2) if number not in known) - 1
    if not number:
        return Replayed(entry, 0, len(known))
    document = json.loads(entry)
    for one in range(1, number + 1):
        document = applied(document, known[one])
    return Replayed(json.dumps(document).encode(), number, len(known) - number)


def _decoded(raw: bytes, base: str) -> tuple[int, Change] | None:
    """Number and change. None: of another entry, or damaged."""
    head, _, text = raw[:-1].partition(b', "change": ')
    try:
        fields: dict[str, Any] = json.loads(head + b"}")
        if fields["base"] != base or fields["check"] != zlib.crc32(text):
            return None
        return int(fields["number"]), json.loads(text)
    except (ValueError, LookupError, TypeError):
        return None
