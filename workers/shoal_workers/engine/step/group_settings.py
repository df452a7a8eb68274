"""The settings of an optimizer's parameter groups: which of them a run has changed itself, and what a restore sets.

    built by the code and spec of now   betas, weight decay, momentum ... : these act, whatever the source was made with
    changed by the run that was saved   a counter in the group, a setting that the task's code has changed while it
                                        trained: these are state, and are restored, unless it is built otherwise now

A source therefore has, for each group, only what differs from what was built, with the value that was built. Rates and
implementations (`foreach`, `fused`) are always those of now: a rate is a function of the step. Pure; called by
`Update`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_NOT_SAVED = ("params", "param_names", "lr", "foreach", "fused")
_PLAIN = (bool, int, float, str, type(None))

Group = Mapping[str, Any]
Change = Sequence[Any]
"""[built, now], or [now] if nothing was built under this name."""


def plain_settings(group: Group) -> dict[str, Any]:
    """Those that can be saved: JSON values."""
    return {key: _plain(value) for key, value in group.items() if key not in _NOT_SAVED and is_plain(value)}


def changes(built: Group, now: Group) -> dict[str, list[Any]]:
    """What a run has changed in a group; both as `plain_settings` returns them."""
    return {
        key: [built[key], value] if key in built else [value]
        for key, value in now.items()
        if key not in built or built[key] != value
    }


def restored(built: Group, changed: Mapping[str, Change]) -> dict[str, Any]:
    """The plain settings of a group that is built as `built` says now, after a run that had made these changes."""
    kept = {}
    for key, (*before, now) in changed.items():
        if before == ([built[key]] if key in built else []):
            kept[key] = now
    return {**built, **kept}


def differing(built: Group, saved: Group) -> tuple[str, ...]:
    """Names of the settings that are saved with another value than they are built with now."""
    return tuple(sorted(key for key, value in saved.items() if key in built and built[key] != value))


def is_plain(value: object) -> bool:
    return isinstance(value, _PLAIN) or (
        isinstance(value, list | tuple) and all(isinstance(one, _PLAIN) for one in value)
    )


def _plain(value: Any) -> Any:
    """As it is read from JSON."""
    return list(value) if isinstance(value, list | tuple) else value
