"""Calls of the store as the control loop makes them, and calls that a test makes fail or counts."""

from collections.abc import Callable, Sequence
from typing import Any

from shoal_service.core.scheduling.market import Wait
from shoal_service.store import Store, queueing


def set_queue(store: Store, waits: Sequence[Wait], *, epoch: int, now: float, most: int = queueing.MOST_PLACED) -> bool:
    """The order of the queue, after a pass. False: more than `most` places differ, and the rest is written by the next
    call."""
    changes = store.reading(queueing.differing)(waits, now=now, most=most)
    store.writing(queueing.save_places, epoch)(changes)
    return not changes.num_left


def replace_call(store: Any, function: Callable[..., Any], instead: Callable[..., Any]) -> Callable[[], None]:
    """What asks the store for `reading(function)` or `writing(function)` gets `instead`, until the returned function is
    called."""
    reading, writing = store.reading, store.writing
    store.reading = lambda asked: instead if asked is function else reading(asked)
    store.writing = lambda asked, *epoch: instead if asked is function else writing(asked, *epoch)

    def undo() -> None:
        store.reading, store.writing = reading, writing

    return undo
