"""How a directive takes effect: it is compared with the target, and what differs is changed.

Called by `machine`. A running group stops at its next step boundary (`switching.consider`); nothing here interrupts it.
"""

from __future__ import annotations

from dataclasses import replace

from shoal_service.core.attempt import code_update
from shoal_service.core.attempt.events import Directed
from shoal_service.core.attempt.state.stages import Stage
from shoal_service.core.attempt.state.worker import AvoidedNode
from shoal_service.core.attempt.turn import Turn
from shoal_service.core.desired import Desired
from shoal_workers.contract.job import EndReason


def apply(turn: Turn, wanted: Directed) -> None:
    """Make the target what the directive says. What is equal to the target has no effect, so a directive may come
    twice. If the directive ends the attempt, the rest of it is left out."""
    # the preemption first: the same document takes the grant away
    for take in (_preempt, _retarget, _desire, _stop_with_server):
        if turn.stage is not Stage.ENDED:
            take(turn, wanted)


def avoid(turn: Turn, avoided: tuple[AvoidedNode, ...]) -> None:
    """Change the nodes that are avoided. A worker that is still starting is replaced when one of these nodes may be
    used again, because the nodes that it must not start on are fixed at its start and it may wait without end for room
    on others."""
    before, after = ({node.node_id for node in nodes} for nodes in (turn.target.avoided, avoided))
    turn.target = replace(turn.target, avoided=avoided)
    for worker in turn.pool.workers:
        if not worker.warm and not (before - after).isdisjoint(worker.avoids):
            turn.kill(worker.index, "a node may be used again")


def _preempt(turn: Turn, wanted: Directed) -> None:
    if wanted.is_preempted != turn.target.is_preempted:
        turn.target = replace(turn.target, is_preempted=wanted.is_preempted, moves_to=wanted.moves_to)
        _end_without_group(turn)


def _retarget(turn: Turn, wanted: Directed) -> None:
    turn.target = replace(turn.target, pinned=wanted.pinned, granted=wanted.granted)
    turn.target = turn.target.with_elasticity(wanted.elasticity).with_parallelism(wanted.parallelism)
    if wanted.settings is not None:
        turn.target = turn.target.with_settings(wanted.settings)
    if wanted.code is not None and wanted.code != (turn.target.spec.code.archive or ""):
        code_update.wanted(turn, wanted.code)


def _desire(turn: Turn, wanted: Directed) -> None:
    if wanted.desired is turn.target.desired:
        return
    turn.target = replace(turn.target, desired=wanted.desired)
    if wanted.desired is Desired.CANCEL:
        turn.end(EndReason.CANCELLED, "cancelled on request")
    else:
        _end_without_group(turn)


def _stop_with_server(turn: Turn, wanted: Directed) -> None:
    if wanted.server_stops != turn.target.server_stops:
        turn.target = replace(turn.target, server_stops=wanted.server_stops)
        _end_without_group(turn)


def _end_without_group(turn: Turn) -> None:
    """End an attempt that has to save and end while no group runs, because there is nothing to save.
    `switching.consider` asks a running group to stop at its next step boundary."""
    if turn.target.ends_saved and not turn.state.group_active and turn.stage is not Stage.COMMITTING:
        turn.end_saved()
