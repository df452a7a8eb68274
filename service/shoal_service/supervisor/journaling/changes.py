"""What has changed between two values, as a JSON document, and the JSON document with these changes. Pure.

    changes(before, after)  ->  {"fields": {"pool": {"fields": {"workers": {"items": [[0, 17], {"value": ...}]}}}}}

The values are frozen dataclasses, models, tuples, dicts, and the persistent collections of the attempt's state. What is
the same object in both is not looked into, so the cost is that of the changed parts, one comparison for each item of a
tuple or a dict that has changed, and one for each leaf of a persistent collection.

    {"value": v}                        in place of what was there
    {"fields": {name: change}}          of an object
    {"entries": {key: change}, "without": {key: 0}}    of a dict
    {"items": [[first, number], {"at": place, "change": change}, {"value": v}, ...]}
                                        of a tuple: runs of the items before, changed ones, and new ones
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from shoal_service.core.attempt.state.persistent import IntMap, Table

Change = dict[str, Any]


def changes(before: Any, after: Any) -> Change | None:
    """None: nothing has changed. The values in it are those of `after`, not yet JSON."""
    if before is after:
        return None
    if type(before) is not type(after):
        return {"value": after}
    if is_dataclass(after):
        return changed_fields(before, after, [field.name for field in fields(after)])
    if isinstance(after, Table):
        return _changed_leaves(before, after)
    if isinstance(after, tuple):
        return _changed_items(before, after)
    if isinstance(after, IntMap):
        return _changed_entries(*_differing(before, after))
    if isinstance(after, Mapping):
        return _changed_entries(before, after)
    return None if before == after else {"value": after}


def changed_fields(before: Any, after: Any, names: Iterable[str]) -> Change | None:
    """Of two objects that both have these fields."""
    found = {name: changes(getattr(before, name), getattr(after, name)) for name in names}
    changed = {name: change for name, change in found.items() if change is not None}
    return {"fields": changed} if changed else None


def applied(document: Any, change: Change) -> Any:
    """The parsed JSON of the value after, from that of the value before, which stays as it is.

    Raises:
        LookupError, TypeError: the change is of another document.
    """
    if "value" in change:
        return change["value"]
    if "fields" in change:
        return document | {name: applied(document[name], one) for name, one in change["fields"].items()}
    if "items" in change:
        return [item for part in change["items"] for item in _items(document, part)]
    kept = {key: value for key, value in document.items() if key not in change["without"]}
    return kept | {key: applied(document.get(key), one) for key, one in change["entries"].items()}


def _changed_items(before: tuple[Any, ...], after: tuple[Any, ...]) -> Change | None:
    """Items are recognised by identity, and changed ones by their `index` if they have one: an equal new object without
    one is a new item."""
    parts = _Finder(enumerate(before)).parts(after)
    if parts == [[0, len(before)]] or before == after:
        return None
    return {"items": parts}


def _changed_leaves(before: Table[Any], after: Table[Any]) -> Change | None:
    """The same, without a look into the leaves that both have."""
    kept = {id(leaf) for leaf in after.leaves}
    place_of_leaf: dict[int, int] = {}
    others: list[tuple[int, Any]] = []
    place = 0
    for leaf in before.leaves:
        if id(leaf) in kept:
            place_of_leaf[id(leaf)] = place
        else:
            others += enumerate(leaf, place)
        place += len(leaf)
    finder, parts = _Finder(others), list[Any]()
    for leaf in after.leaves:
        place_before = place_of_leaf.get(id(leaf))
        _join(parts, finder.parts(leaf) if place_before is None else [[place_before, len(leaf)]])
    return None if parts == [[0, len(before)]] or (not before and not parts) else {"items": parts}


class _Finder:
    """Finds items of the value before."""

    def __init__(self, before: Iterable[tuple[int, Any]]) -> None:
        """`before`: with their places."""
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
    """Adds to `parts`. A run that continues the last one prolongs it."""
    for part in more:
        if isinstance(part, list) and parts and isinstance(parts[-1], list) and sum(parts[-1]) == part[0]:
            parts[-1] = [parts[-1][0], parts[-1][1] + part[1]]
        else:
            parts.append(part)


def _differing(before: IntMap[Any], after: IntMap[Any]) -> tuple[dict[int, Any], dict[int, Any]]:
    """The entries of the leaves that only one of them has."""
    here, there = ({id(leaf) for leaf in one.leaves} for one in (before, after))
    of_before = {key: value for leaf in before.leaves if id(leaf) not in there for key, value in leaf.items()}
    of_after = {key: value for leaf in after.leaves if id(leaf) not in here for key, value in leaf.items()}
    return of_before, of_after


def _items(document: list[Any], part: Any) -> list[Any]:
    if isinstance(part, dict):
        return [applied(document[part["at"]], part["change"]) if "at" in part else part["value"]]
    first, number = part
    if first + number > len(document):
        raise LookupError(f"items {first} to {first + number} of {len(document)}")
    return document[first : first + number]


def _changed_entries(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> Change | None:
    found = {key: changes(before[key], value) if key in before else {"value": value} for key, value in after.items()}
    entries = {key: change for key, change in found.items() if change is not None}
    without = {key: 0 for key in before if key not in after}
    return {"entries": entries, "without": without} if entries or without else None
