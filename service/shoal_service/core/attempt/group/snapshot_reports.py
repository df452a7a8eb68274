"""Which snapshots lie in the memory of nodes. Workers of the group report them when they leave `run`; workers outside
the group are asked. Called when a group is lost and when a worker becomes warm; starts no group."""

from __future__ import annotations

from dataclasses import replace

from shoal_service.core.attempt.commands import RequestSnapshotParts
from shoal_service.core.attempt.decision import Decision
from shoal_service.core.attempt.group.source import best_source
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.turn import Turn
from shoal_workers.contract.snapshots import SnapshotPart


def request(turn: Turn, *indexes: int) -> None:
    """The answer is waited for, but no longer than Timeouts.quiesce_s, and only while it could help."""
    if not turn.target.keeps_snapshots:
        return
    serving = {worker.index for worker in turn.pool.usable if worker.info and worker.info.snapshot_port}
    asked = [index for index in indexes if index in serving]
    turn.snapshots = replace(turn.snapshots, requested={**turn.snapshots.requested, **dict.fromkeys(asked, turn.now)})
    turn.do(*(RequestSnapshotParts(index) for index in asked))


def request_from_others(turn: Turn) -> None:
    """The group is lost: warm workers outside it may serve what lies on the node of a worker that has died."""
    turn.snapshots = replace(turn.snapshots, requested={}, reported={})
    request(turn, *(worker.index for worker in turn.pool.warm if worker.index not in turn.group.workers))


def reported(turn: Turn, index: int, parts: tuple[SnapshotPart, ...]) -> None:
    if index in turn.snapshots.requested:
        turn.snapshots = replace(
            turn.snapshots,
            requested={i: since for i, since in turn.snapshots.requested.items() if i != index},
            reported={**turn.snapshots.reported, index: parts},
        )


def are_awaited(state: Attempt, now: float) -> Decision:
    """Whether a worker that was asked may still report a newer snapshot than the best one that is known."""
    patience_s = state.config.timeouts.quiesce_s
    usable = {worker.index for worker in state.pool.usable}
    silent = [i for i, since in state.snapshots.requested.items() if i in usable and now < since + patience_s]
    if not silent:
        return Decision(False, "every worker that was asked has reported its snapshots, or had its time")
    known = best_source(state)
    if known is not None and known.step >= state.progress.step:
        return Decision(False, f"the snapshot of step {known.step} is whole, and none can be newer")
    return Decision(True, f"waits for {len(silent)} workers to report their snapshots")
