"""Snapshots on nodes where no worker of ours is left: one is started there to serve them, and waited for.

Shared memory outlives its writer. When members die together, all workers of a node may be gone while the parts that
they kept still lie there, and without those no snapshot is whole. To start a worker takes a second or two; to go back
to a durable checkpoint would cost all steps since.

    members die ............. `note_loss` remembers their nodes
    the group has left ...... `begin`, if more than a step would be lost: WAITING, workers start on these very nodes
    they tell what lies there, or `recall_s` has passed ...... the next group forms from the best that is known then
"""

from __future__ import annotations

from dataclasses import replace

from shoal_service.core.attempt.faults.table import FAULTS, Memory
from shoal_service.core.attempt.group.source import best_source, newest_kept
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.stages import Waiting
from shoal_service.core.attempt.state.worker import Worker
from shoal_service.core.attempt.turn import Turn
from shoal_service.core.desired import Desired
from shoal_service.core.events.incidents import SnapshotsRecovering
from shoal_workers.contract.job import IncidentCause

_BEARABLE = 1
"""Steps that are done again rather than waited for."""


def note_loss(turn: Turn, worker: Worker, cause: IncidentCause) -> None:
    """A member was lost before it could tell what lies in its node's memory."""
    known = turn.snapshots.unreported_nodes
    if FAULTS[cause].memory is not Memory.ON_NODE or worker.info is None:
        return
    if worker.info.node_id not in known:
        turn.snapshots = replace(turn.snapshots, unreported_nodes=(*known, worker.info.node_id))


def is_worthwhile(state: Attempt) -> bool:
    """Steps would be lost that somebody could tell of, and nobody has been sent for them yet."""
    trusted = state.snapshots.oldest_generation <= state.group.generation
    wanted = state.target.desired is Desired.RUN and state.target.keeps_snapshots
    return wanted and trusted and bool(_silent_nodes(state)) and _could_gain(state)


def begin(turn: Turn) -> None:
    """Once per group that was lost."""
    until = turn.now + turn.config.timeouts.recall_s
    turn.enter(Waiting(since=turn.now, recall_until=until))
    turn.emit(SnapshotsRecovering(nodes=_silent_nodes(turn.state), steps=_would_lose(turn.state), until=until))


def is_pending(state: Attempt, now: float) -> bool:
    """The next group waits for it."""
    until = recall_until(state)
    return until is not None and now < until and bool(_silent_nodes(state)) and _could_gain(state)


def recall_until(state: Attempt) -> float | None:
    return state.current.recall_until if isinstance(state.current, Waiting) else None


def next_node(state: Attempt) -> str:
    """Where a worker is to be started next, and nowhere else; empty: wherever there is room."""
    if recall_until(state) is None:
        return ""
    reached = {p.only_on for p in state.pool.workers}
    return next((node for node in _silent_nodes(state) if node not in reached), "")


def end(turn: Turn) -> None:
    """A worker that has not come up by then may wait for room on its node for good: it is started anew elsewhere."""
    turn.snapshots = replace(turn.snapshots, unreported_nodes=())
    if isinstance(turn.current, Waiting):
        turn.stay(replace(turn.current, recall_until=None))
    for worker in turn.pool.workers:
        if worker.only_on and not worker.warm:
            turn.kill(worker.index, f"nobody waits for node {worker.only_on} any longer")


def _silent_nodes(state: Attempt) -> tuple[str, ...]:
    answering = {p.info.node_id for p in state.pool.usable if p.info is not None}
    avoided = {node.node_id for node in state.target.avoided}
    return tuple(node for node in state.snapshots.unreported_nodes if node not in answering and node not in avoided)


def _could_gain(state: Attempt) -> bool:
    """Survivors keep their parts of the same steps as the dead: where those are no newer than what is whole, nobody has
    any newer. If none survived to tell, there may be."""
    kept = newest_kept(state)
    return _would_lose(state) > _BEARABLE and (kept is None or kept > _known_step(state))


def _would_lose(state: Attempt) -> int:
    return state.progress.step - _known_step(state)


def _known_step(state: Attempt) -> int:
    known = best_source(state)
    return known.step if known is not None else state.checkpoints.durable_step
