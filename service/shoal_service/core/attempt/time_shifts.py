"""Move the times in the state when no time has passed for the attempt: the wall clock jumps (it was set, or the machine
was suspended), or the supervisor handled no event. Pure.

All times in the state are wall-clock times, since people read them and since a supervisor continues on another machine.
After a jump every deadline is as far away as before, and is shown in the new time:

    name of a field        meaning                            moves with the clock
    at, since, *_at, *_since, *_until, *_not_before     yes; 0 means never, and stays
    requested, answered_at, suspected                   yes: times by worker or node
    leave.deadline         of a worker that gave notice: it counts from that notice; yes
    deadline               of a node, named by the user or by Ray: an absolute time; no

While the supervisor was suspended the clock went on, but it heard nothing from its workers. So only what it waits for
moves, and no time that has passed moves beyond now.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from shoal_service.core.attempt.state.stages import Running
from shoal_service.core.attempt.state.worker import AvoidedNode
from shoal_service.core.attempt.turn import Turn
from shoal_service.core.persistent import IntMap, Table

T = TypeVar("T")
Move = Callable[[str, float], float]
"""Returns the new value of a field of this name."""

_NAMES = ("at", "since")
_ENDINGS = ("_at", "_since", "_until", "_not_before")
_TIMES_BY_KEY = ("requested", "answered_at", "suspected")
_CHANGED_BY_OTHERS = ("config", "target")
"""Parts of the state that do not move: `config` is fixed, and each directive replaces `target` as a whole."""
_WAITED_FOR = (
    "since",
    "advanced_at",
    "answered_at",
    "answers_since",
    "draining_since",
    "interrupted_at",
    "requested",
    "seen_at",
    "unreachable_since",
    "warm_at",
)
_WAITED_UNTIL = ("interrupt_at", "orphans_until", "slow_until")


def moved(state: T, by_s: float) -> T:
    """The state after a jump of the wall clock by `by_s` seconds, which may be negative."""

    def move(name: str, at: float) -> float:
        return at + by_s if at and (is_time(name) or name in _TIMES_BY_KEY or name == "deadline") else at

    shifted: T = _shift(state, move)
    return shifted


def is_time(name: str) -> bool:
    """True if a field of this name holds a wall-clock time."""
    return name in _NAMES or name.endswith(_ENDINGS)


def extend_after_suspend(turn: Turn, *, is_reopened: bool) -> None:
    """Move the deadlines by the time in which the supervisor handled no event: it was suspended, had no CPU, or was
    restarted, and workers are not to blame for what it did not receive meanwhile.

    A turn that comes more than timeouts.absence_s after the last one is late. What a single late turn has missed is
    forgiven whole. If one turn after the other is late, absence_s of each counts, so a supervisor that is always slow
    still notices a worker that never answers. Deadlines of the world outside stay, such as the end of a node.

    Args:
        is_reopened: the supervisor was restarted. The journal of an attempt that only waits, for capacity say, does not
            say until when its predecessor lived, so nothing is forgiven then.
    """
    progress = turn.progress
    missed_s = turn.now - progress.last_event_at if progress.last_event_at else 0.0
    is_late = missed_s > turn.config.timeouts.absence_s
    only_waits = not turn.state.group_active and not turn.snapshots.requested
    if is_late and not (is_reopened and only_waits):
        _extend(turn, missed_s - turn.config.timeouts.absence_s if progress.is_late else missed_s)
    turn.progress = replace(turn.progress, last_event_at=turn.now, is_late=is_late)


def _extend(turn: Turn, by_s: float) -> None:
    settled_before = turn.now - by_s - max(turn.config.timeouts.gather_s, turn.config.timeouts.settle_s)

    def move(name: str, at: float) -> float:
        if name in _WAITED_FOR and (name != "warm_at" or at > settled_before):
            return min(turn.now, at + by_s)
        return at + by_s if name in _WAITED_UNTIL else at

    current = _shift(turn.current, move)
    turn.stay(replace(current, since=turn.current.since) if isinstance(current, Running) else current)
    turn.snapshots = replace(turn.snapshots, requested=_shift(turn.snapshots.requested, move, "requested"))
    turn.progress, turn.code, turn.pool = (_shift(part, move) for part in (turn.progress, turn.code, turn.pool))


def _shift(value: Any, move: Move, name: str = "") -> Any:
    """The value of the field `name` with all times in it moved. What does not change is the same object."""
    if is_dataclass(value):
        changes = {}
        for field in fields(value):
            part = getattr(value, field.name)
            if field.name not in _CHANGED_BY_OTHERS and (after := _shift(part, move, field.name)) is not part:
                changes[field.name] = after
        return replace(value, **changes) if changes else value  # type: ignore[type-var]
    if isinstance(value, float):
        after = move(name, value)
        return after if after != value else value
    if isinstance(value, AvoidedNode) and value.deadline is not None:  # of the target, it is never asked for
        return value.model_copy(update={"deadline": move("deadline", value.deadline)})
    if isinstance(value, tuple):
        parts = tuple(_shift(part, move, name) if is_dataclass(part) else part for part in value)
        return parts if any(after is not before for after, before in zip(parts, value, strict=True)) else value
    if isinstance(value, Table):
        table = Table(_shift(part, move) for part in value)
        return table if table != value else value
    if isinstance(value, (dict, IntMap)):
        items = {key: part if isinstance(part, tuple) else _shift(part, move, name) for key, part in value.items()}
        return type(value)(items)
    return value
