"""Beginnings: each attempt notes in the job's directory which checkpoints it has found, before it restores one.

    <checkpoint.url>/<job id>/began-a5.json     attempt 5 has begun; once it has listed them, with their names

An attempt that is given up because its cluster does not answer may train on there, and still write to the storage. So

    attempt 4  commits step 50 |                  | commits step 60: refused, or never counted | deletes nothing
    attempt 5                  | began-a5: begun  -> lists 10 .. 50 -> began-a5: 10 .. 50      | goes on from 50

A checkpoint of an earlier attempt counts only if the newest attempt has found it. The order makes this hold without a
lock: attempt 5 writes that it has begun before it lists, and attempt 4 looks for that after it has committed and before
it deletes. Whatever attempt 4 deletes then is older than one that attempt 5 lists.

Called by the supervisor's catalog. Imports no torch. OSError: the storage does not answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shoal_workers.checkpoint.storage import Directory
from shoal_workers.contract.marker import MARKER_NAME, CheckpointName

_FILE = re.compile(r"began-a(\d{1,9})\.json", re.ASCII)


@dataclass(frozen=True, slots=True)
class Beginning:
    """What the newest attempt has found."""

    attempt: int = 0
    """0: no attempt has noted anything."""
    found: frozenset[str] = frozenset()

    def counts(self, name: CheckpointName) -> bool:
        """False if an earlier attempt has committed it after this one had begun."""
        return name.attempt >= self.attempt or str(name) in self.found


def newest_beginning(place: Directory) -> Beginning:
    """Return the newest one with a list: an attempt that has none has restored nothing."""
    for attempt in sorted(_attempts(_files(place)), reverse=True):
        beginning = _read(place, attempt)
        if beginning is not None:
            return Beginning(attempt, beginning)
    return Beginning()


def begin(place: Directory, attempt: int, names: Iterable[CheckpointName]) -> None:
    """Called before the attempt restores anything. It can be repeated: the first list stays.

    Args:
        names: those that have a directory when this is iterated, which happens after the beginning was noted.
    """
    files = _files(place)
    if _name_of(attempt) in files and _read(place, attempt) is not None:
        return
    place.create()
    # Before the list is made: an earlier attempt that commits from now on finds this note.
    place.write(_name_of(attempt), [json.dumps({"attempt": attempt, "found": None}).encode()])
    before = newest_beginning(place)
    uncounted = [
        str(name)
        for name in names
        if name.attempt < attempt and before.counts(name) and MARKER_NAME in _files(place.child(str(name)))
    ]
    place.write(_name_of(attempt), [json.dumps({"attempt": attempt, "found": uncounted}).encode()])
    # Only now, because the newest beginning with a list is the one that counts.
    for older in _attempts(files):
        if older < attempt:
            place.remove(_name_of(older))


def later_attempt(place: Directory, attempt: int) -> int | None:
    """A later one that has begun; None if there is none."""
    later = [number for number in _attempts(_files(place)) if number > attempt]
    return max(later, default=None)


def forget_beginnings(place: Directory) -> None:
    """Remove all notes, once the job's checkpoints are deleted."""
    for attempt in _attempts(_files(place)):
        place.remove(_name_of(attempt))


def _files(place: Directory) -> Mapping[str, int]:
    try:
        return place.files()
    except FileNotFoundError:
        return {}


def _attempts(files: Iterable[str]) -> list[int]:
    return [int(match[1]) for name in files if (match := _FILE.fullmatch(name)) is not None]


def _name_of(attempt: int) -> str:
    return f"began-a{attempt}.json"


def _read(place: Directory, attempt: int) -> frozenset[str] | None:
    """Return None if it has no list yet, was removed meanwhile, or cannot be read."""
    try:
        steps = json.loads(place.read(_name_of(attempt)))["found"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return None if steps is None else frozenset(str(name) for name in steps)
