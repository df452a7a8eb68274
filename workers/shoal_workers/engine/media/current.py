"""Which recorder `shoal.log` of a task means: that of the engine that trains in this process, on its training thread.

A task has no object of Shoal, so the package `shoal` asks here; it finds this module only if the engine has
imported it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from shoal_workers.contract.messages import Phase
from shoal_workers.engine.media.recorder import Recorder
from shoal_workers.engine.process.position import Position

KINDS = ("images", "histogram", "table", "text")
_own = threading.local()


@contextmanager
def logging_to(recorder: Recorder, position: Position) -> Iterator[None]:
    """Training thread: within the block, what the code of a task logs belongs to the step that is under way."""
    _own.target = recorder, position
    try:
        yield
    finally:
        del _own.target


def log_current(media: Mapping[str, Any]) -> bool:
    """Log media for the step that is under way on this thread. False: this thread trains nothing.

    Raises:
        ValueError, TypeError: a name or a value cannot be logged.
    """
    target = getattr(_own, "target", None)
    if target is None:
        return False
    recorder, position = target
    is_after = position.phase is Phase.VALIDATING  # after the step, not within the next one
    recorder.log(position.step + (not is_after), **media)
    return True


def split(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Media, and the rest: numbers. A number may have the name of a kind of media."""
    media = {kind: values[kind] for kind in KINDS if isinstance(values.get(kind), Mapping)}
    return media, {name: value for name, value in values.items() if name not in media}
