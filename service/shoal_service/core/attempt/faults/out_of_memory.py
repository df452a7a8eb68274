"""Workers that are killed for lack of memory: from the first one on, no new worker of the attempt touches memory before
it is needed. Their deaths do not count against the node, which may only be the fullest one. Called by `machine` and
`group/exits` with the words of a death.

A worker that waits for its first group touches the memory that the planner expects it to use, so that its first step is
fast. Where memory is short that may be what kills it, or its neighbour, again and again.
"""

from __future__ import annotations

from dataclasses import replace

from shoal_service.core.attempt.faults import suspicion
from shoal_service.core.attempt.turn import Turn
from shoal_service.core.events.workers import WarmMemoryOff

_WORDS = ("out of memory", "out-of-memory", "running low on memory", "oom-kill", "outofmemory")
"""Of the kernel and of Ray's memory monitor, in lower case."""


def is_out_of_memory(message: str) -> bool:
    return any(words in message.lower() for words in _WORDS)


def death_explained(turn: Turn, worker_id: str, message: str) -> None:
    """The exit status may become known some time after the death. The event comes once per attempt."""
    if not is_out_of_memory(message):
        return
    suspicion.forget_loss(turn, worker_id)
    if turn.health.is_memory_scarce:
        return
    turn.health = replace(turn.health, is_memory_scarce=True)
    turn.emit(WarmMemoryOff(worker_id=worker_id, message=message))
