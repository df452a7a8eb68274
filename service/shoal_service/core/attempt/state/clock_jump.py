"""How the state changes when the wall clock jumps (it was set, or the machine was suspended): every time in it moves
along. Pure.

All times in the state are wall-clock times, since people read them and since a supervisor continues on another machine.
No time passes in a jump, so after it every deadline is as far away as before, and is shown in the new time.

    name of a field        meaning                            moves
    at, since, *_at, *_since, *_until, *_not_before     yes; 0 means never, and stays
    requested, answered_at, suspected                   yes: times by worker or node
    leave.deadline         of a worker that gave notice: it counts from that notice; yes
    deadline               of a node, named by the user or by Ray: an absolute time; no
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from shoal_service.core.attempt.state.persistent import IntMap, Table
from shoal_service.core.attempt.state.worker import AvoidedNode

T = TypeVar("T")

_NAMES = ("at", "since")
_ENDINGS = ("_at", "_since", "_until", "_not_before")
_TIMES_BY_KEY = ("requested", "answered_at", "suspected")
_CHANGED_BY_OTHERS = ("config", "target")
"""Parts of the state that do not move: `config` is fixed, and each directive replaces `target` as a whole."""


def moved(state: T, by_s: float) -> T:
    """The state after a jump of the wall clock by `by_s` seconds, which may be negative."""
    changes = {}
    for field in fields(state):  # type: ignore[arg-type]
        value = getattr(state, field.name)
        if field.name not in _CHANGED_BY_OTHERS and (after := _moved(field.name, value, by_s)) is not value:
            changes[field.name] = after
    return replace(state, **changes) if changes else state  # type: ignore[type-var]


def is_time(name: str) -> bool:
    """Whether a field of this name holds a wall-clock time."""
    return name in _NAMES or name.endswith(_ENDINGS)


def _moved(name: str, value: Any, by_s: float) -> Any:
    if is_dataclass(value):
        return moved(value, by_s)
    if isinstance(value, float):
        return value + by_s if value and is_time(name) else value
    if isinstance(value, AvoidedNode) and value.deadline is not None:  # of the target, it is never asked for
        return value.model_copy(update={"deadline": value.deadline + by_s})
    if isinstance(value, tuple):
        parts = tuple(_moved(name, part, by_s) if is_dataclass(part) else part for part in value)
        return parts if any(after is not before for after, before in zip(parts, value, strict=True)) else value
    if isinstance(value, Table):
        table = Table(moved(part, by_s) for part in value)
        return table if table != value else value
    if isinstance(value, IntMap):
        return IntMap(_moved(name, dict(value), by_s))
    if isinstance(value, dict):
        if name in _TIMES_BY_KEY:
            return {key: at + by_s if at else at for key, at in value.items()}
        return {key: moved(part, by_s) if is_dataclass(part) else part for key, part in value.items()}
    return value
