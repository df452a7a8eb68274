"""Which snapshots lie in the memory of nodes. Workers of the group report them when they leave `run`; workers outside
the group are asked. Called when a group is lost and when a worker becomes warm; starts no group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shoal_service.core.attempt.commands import RequestSnapshotParts
from shoal_service.core.attempt.decision import Decision
from shoal_service.core.attempt.faults.large_groups import quiesce_s
from shoal_service.core.attempt.group.source import best_source
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.persistent.int_map import IntMap
from shoal_service.core.attempt.state.stages import Stage
from shoal_service.core.attempt.state.worker import Worker
from shoal_service.core.attempt.turn import Turn
from shoal_service.core.events.incidents import SnapshotsLacking
from shoal_service.core.quantities import count_text
from shoal_workers.contract.ids import life_of
from shoal_workers.contract.snapshots import SnapshotPart
from shoal_workers.contract.worker_reports import SnapshotsStopped

_BEFORE_FORMING = (Stage.QUIESCING, Stage.WAITING, Stage.FALLING_BACK)
_UNLESS_REOPENED = (Stage.STARTING, Stage.COMMITTING)
"""The next group forms here, too, and all is known: no group has trained yet, or all its workers have reported."""


def request(turn: Turn, *indexes: int) -> None:
    """The answer is waited for, but no longer than Timeouts.quiesce_s, and only while it could help."""
    if not turn.target.keeps_snapshots:
        return
    asked = [index for index in indexes if _is_serving(turn.pool.worker(index))]
    requested = turn.snapshots.requested
    for index in asked:
        requested = requested.with_item(index, turn.now)
    turn.snapshots = replace(turn.snapshots, requested=requested)
    turn.do(*(RequestSnapshotParts(index) for index in asked))


def _is_serving(worker: Worker | None) -> bool:
    return worker is not None and worker.is_usable and worker.info is not None and worker.info.snapshot_port != 0


def request_if_useful(turn: Turn, index: int) -> None:
    """From a worker that could not be asked before: while the source of the next group is not chosen yet."""
    if turn.stage in _BEFORE_FORMING or (turn.stage in _UNLESS_REOPENED and _may_be_outdated(turn.state)):
        request(turn, index)


def request_from_others(turn: Turn) -> None:
    """The group is lost: warm workers outside it may serve what lies on the node of a worker that has died."""
    turn.snapshots = replace(turn.snapshots, requested=IntMap(), reported=IntMap())
    group = turn.group
    reporting = set(group.ranks) - (set(group.exits) if _may_be_outdated(turn.state) else set())
    request(turn, *(worker.index for worker in turn.pool.warm if worker.index not in reporting))


def request_again(turn: Turn) -> None:
    """The supervisor was restarted. Its predecessor may have formed groups that trained on and are not in the journal:
    what workers have reported before may be outdated."""
    for worker in turn.pool.warm:
        if not worker.in_run:
            request_if_useful(turn, worker.index)


def _may_be_outdated(state: Attempt) -> bool:
    """What is known of the last group comes from another supervisor, and so would that of the first one."""
    return max(1, life_of(state.group.generation)) < state.life


def reported(turn: Turn, index: int, parts: tuple[SnapshotPart, ...]) -> None:
    if index in turn.snapshots.requested:
        turn.snapshots = replace(
            turn.snapshots,
            requested=turn.snapshots.requested.without(index),
            reported=turn.snapshots.reported.with_item(index, parts),
        )


def stopped(turn: Turn, item: SnapshotsStopped) -> None:
    """A rank of the group has no memory for snapshots. Reported once for each rank and generation."""
    if item.rank in turn.progress.stopped:
        return
    turn.progress = replace(turn.progress, stopped={**turn.progress.stopped, item.rank: item})
    turn.emit(
        SnapshotsLacking(
            generation=item.generation,
            step=item.step,
            rank=item.rank,
            only_copies=item.only_copies,
            message=item.message,
        )
    )


def note_workers_without_memory(turn: Turn, workers: Sequence[Worker]) -> None:
    """The group forms: a worker that could not open its shared memory keeps no snapshots. The worker's log says why."""
    if not turn.target.keeps_snapshots:
        return
    for rank, worker in enumerate(workers):
        if worker.info is not None and worker.info.snapshot_port == 0:
            text = f"worker {worker.worker_id} could not use shared memory when it started; its log says why"
            generation, step = turn.group.generation, turn.progress.step
            stopped(
                turn,
                SnapshotsStopped(
                    generation=generation, step=step, at=turn.now, rank=rank, only_copies=False, message=text
                ),
            )


def are_awaited(state: Attempt, now: float) -> Decision:
    """Whether a worker that was asked may still report a newer snapshot than the best one that is known."""
    patience_s = quiesce_s(state)
    usable = {worker.index for worker in state.pool.usable}
    silent = [i for i, since in state.snapshots.requested.items() if i in usable and now < since + patience_s]
    if not silent:
        return Decision(False, "every worker that was asked has reported its snapshots, or had its time")
    known = best_source(state)
    if known is not None and known.step >= state.progress.step and not _may_be_outdated(state):
        return Decision(False, f"the snapshot of step {known.step} is whole, and none can be newer")
    return Decision(True, f"waits for {count_text(len(silent), 'worker')} to report their snapshots")
