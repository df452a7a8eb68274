"""Snapshots on nodes where no worker of the job is left: a worker is started there to serve them, and waited for.

Shared memory outlives its writer. When workers of a group die together, all workers of a node may be gone while their
parts of a snapshot still lie there, and without those parts no snapshot is whole. Starting a worker takes a second or
two; going back to a durable checkpoint would cost all steps since.

    workers of the group die ............. `note_lost_worker` remembers their nodes
    the group has ended .................. `start_waiting`, if more than a step would be lost: WAITING, and workers
                                           start on these very nodes
    they report what lies there, or timeouts.orphans_s has passed .... the next group forms from the best known source
"""

from __future__ import annotations

from dataclasses import replace

from shoal_service.core.attempt.decision import Decision
from shoal_service.core.attempt.faults.table import FAULTS, Memory
from shoal_service.core.attempt.group.source import best_source, newest_kept
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.stages import Waiting
from shoal_service.core.attempt.state.worker import Worker
from shoal_service.core.attempt.turn import Turn
from shoal_service.core.desired import Desired
from shoal_service.core.events.incidents import SnapshotsRecovering
from shoal_service.core.quantities import count_text
from shoal_workers.contract.job import IncidentCause

_MOST_WAITS = 4
"""A worker that makes progress is waited for at most this many times timeouts.orphans_s."""
_BEARABLE = 1
"""Steps that are done again rather than waited for."""


def note_lost_worker(turn: Turn, worker: Worker, cause: IncidentCause) -> None:
    """A worker of the group was lost before it reported the snapshots on its node."""
    known = turn.snapshots.unreported_nodes
    if FAULTS[cause].memory is not Memory.ON_NODE or worker.info is None:
        return
    if worker.info.node_id not in known:
        turn.snapshots = replace(turn.snapshots, unreported_nodes=(*known, worker.info.node_id))


def node_is_gone(turn: Turn, node: str) -> None:
    """What lay in its memory can no longer be read."""
    turn.snapshots = replace(
        turn.snapshots, unreported_nodes=tuple(one for one in turn.snapshots.unreported_nodes if one != node)
    )


def is_worth_waiting(state: Attempt) -> Decision:
    """Whether steps would be lost that a node without workers may still hold."""
    target = state.target
    if target.desired is not Desired.RUN or target.ends_saved or not target.keeps_snapshots:
        return Decision(False, "no snapshot is needed")
    if state.snapshots.oldest_generation > state.group.generation:
        return Decision(False, f"the snapshots of generation {state.group.generation} may be wrong")
    return _could_gain(state)


def start_waiting(turn: Turn) -> None:
    """Once per group that was lost."""
    until = turn.now + turn.config.timeouts.orphans_s
    turn.enter(Waiting(since=turn.now, orphans_until=until))
    turn.emit(SnapshotsRecovering(nodes=_silent_nodes(turn.state), steps=_steps_lost(turn.state), until=until))


def is_pending(state: Attempt, now: float) -> Decision:
    """Whether the next group waits for such a node."""
    until = waiting_until(state)
    if until is None:
        return Decision(False, "no worker was started for its node's snapshots")
    if now >= until:
        return Decision(False, f"no worker has reported the snapshots within {state.config.timeouts.orphans_s:g} s")
    return _could_gain(state)


def waiting_until(state: Attempt) -> float | None:
    """None: no worker was started for its node's snapshots. While such a worker makes progress, the deadline moves on,
    but a few steps are not worth a long wait."""
    until = state.current.orphans_until if isinstance(state.current, Waiting) else None
    if until is None:
        return None
    there = {worker.index for worker in state.pool.workers if _is_for_snapshots(worker)}
    seen = [stamp.seen_at for index, stamp in state.progress.starting.items() if index in there]
    orphans_s = state.config.timeouts.orphans_s
    later = max(seen, default=until - orphans_s) + orphans_s
    return min(max(until, later), until + (_MOST_WAITS - 1) * orphans_s)


def next_node(state: Attempt) -> str:
    """The one node on which the next worker is to be started; empty: any node with room."""
    if waiting_until(state) is None:
        return ""
    reached = {worker.only_on for worker in state.pool.workers}
    return next((node for node in _silent_nodes(state) if node not in reached), "")


def stop_waiting(turn: Turn) -> None:
    """A worker that is not warm by then may wait for room on its node without end: it is started anew elsewhere."""
    turn.snapshots = replace(turn.snapshots, unreported_nodes=())
    if isinstance(turn.current, Waiting):
        turn.stay(replace(turn.current, orphans_until=None))
    for worker in turn.pool.workers:
        if _is_for_snapshots(worker):
            turn.kill(worker.index, f"the snapshots on node {worker.only_on} are not waited for any longer")


def _is_for_snapshots(worker: Worker) -> bool:
    """It starts for the snapshots on its node."""
    return bool(worker.only_on) and not worker.warm and not worker.is_beside


def _silent_nodes(state: Attempt) -> tuple[str, ...]:
    """Nodes with unreported snapshots on which no worker answers, and which may be used."""
    answering = {worker.info.node_id for worker in state.pool.usable if worker.info is not None}
    avoided = {node.node_id for node in state.target.avoided}
    return tuple(node for node in state.snapshots.unreported_nodes if node not in answering and node not in avoided)


def _could_gain(state: Attempt) -> Decision:
    """Survivors keep their parts of the same steps as the dead. If those are no newer than what is whole, no node holds
    newer ones; if none has survived to report, a node may."""
    nodes = _silent_nodes(state)
    if not nodes:
        return Decision(False, "every node with snapshots has a worker that answers, or must not be used")
    lost, newest = _steps_lost(state), newest_kept(state)
    if lost <= _BEARABLE:
        return Decision(False, f"without them the job loses {count_text(lost, 'step')}")
    if newest is not None and newest <= _known_step(state):
        return Decision(False, f"no survivor has a part of a snapshot newer than step {_known_step(state)}")
    where = count_text(len(nodes), "node")
    return Decision(True, f"starts workers on {where} whose memory may hold the last {count_text(lost, 'step')}")


def _steps_lost(state: Attempt) -> int:
    return state.progress.step - _known_step(state)


def _known_step(state: Attempt) -> int:
    known = best_source(state)
    return known.step if known is not None else state.checkpoints.durable_step
