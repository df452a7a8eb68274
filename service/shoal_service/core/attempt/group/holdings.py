"""What lies in the memory of nodes: members tell when they leave `run`; the other workers are asked."""

from __future__ import annotations

from dataclasses import replace

from shoal_service.core.attempt.commands import RequestSnapshotParts
from shoal_service.core.attempt.group.source import best_source
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.turn import Turn
from shoal_workers.contract.snapshots import SnapshotPart


def ask(turn: Turn, *indexes: int) -> None:
    """The answer is waited for, but never longer than Timeouts.quiesce_s, and only while it could still help."""
    state = turn.state
    if not state.target.keeps_snapshots:
        return
    asked = [i for i in indexes if any(p.index == i and p.info and p.info.snapshot_port for p in state.pool.usable)]
    turn.snapshots = replace(turn.snapshots, requested={**turn.snapshots.requested, **dict.fromkeys(asked, turn.now)})
    turn.do(*(RequestSnapshotParts(index) for index in asked))


def ask_the_others(turn: Turn) -> None:
    """The group is lost: warm workers that are no members may hold what a dead member's node cannot tell any more."""
    turn.snapshots = replace(turn.snapshots, requested={}, reported={})
    ask(turn, *(p.index for p in turn.pool.warm if p.index not in turn.group.workers))


def told(turn: Turn, index: int, snapshot_parts: tuple[SnapshotPart, ...]) -> None:
    state = turn.state
    if index in state.snapshots.requested:
        turn.snapshots = replace(
            turn.snapshots,
            requested={i: since for i, since in state.snapshots.requested.items() if i != index},
            reported={**state.snapshots.reported, index: snapshot_parts},
        )


def awaited(state: Attempt, now: float) -> bool:
    """Whether somebody may still tell of something better than what is known."""
    alive = {p.index for p in state.pool.usable}
    if not any(
        i in alive and now < since + state.config.timeouts.quiesce_s for i, since in state.snapshots.requested.items()
    ):
        return False
    known = best_source(state)
    return known is None or known.step < state.progress.step
