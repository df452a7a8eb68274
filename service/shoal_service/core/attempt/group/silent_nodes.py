"""Nodes that answer no connect: their workers are left out of the group, and take part again when the node answers.

Called by `machine` with the silent nodes, and by `deadlines`. It ends no worker. A silent node is a suspicion, which is
taken back; that a node is dead is Ray's verdict, which is not.

    node is silent ......... its workers are left out; the group, if they are in it, re-forms without them
    node answers again ..... they leave the generation that they are in (the interrupt reaches them), and are spares
                             from then on: the group grows back at a step boundary
    Ray: node is dead ...... they are lost; the incident becomes one of a dead node (faults/silences.py)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shoal_service.core.attempt.commands import Interrupt
from shoal_service.core.attempt.decision import Decision
from shoal_service.core.attempt.faults import silences
from shoal_service.core.attempt.faults.large_groups import poll_wait_s
from shoal_service.core.attempt.group import exits, snapshot_reports
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.worker import LeftOut, Worker
from shoal_service.core.attempt.turn import Turn
from shoal_service.core.events.workers import NodeAnswers, NodeSilent

_MARGIN_S = 0.25


def follow(turn: Turn, silent: Mapping[str, str]) -> None:
    """`silent`: all nodes that are silent now, with the reason."""
    for node_id in sorted({p.info.node_id for p in turn.pool.workers if p.info is not None and p.left_out is not None}):
        if node_id not in silent:
            _take_part_again(turn, node_id)
    in_run: list[tuple[Worker, str]] = []
    for node_id, reason in silent.items():  # all are marked before a group re-forms, which must not take one of them
        workers = [p for p in turn.pool.workers if p.info is not None and p.info.node_id == node_id]
        if any(_is_silent(worker) for worker in workers) or not _polls_are_answered(turn.state, workers, turn.now):
            in_run += _mark(turn, node_id, [worker for worker in workers if not _is_silent(worker)], reason)
    if in_run and turn.state.group_active:
        exits.leave_out(turn, in_run)


def is_given_up(state: Attempt, left_out: LeftOut, now: float) -> Decision:
    """Whether a worker that is left out is not waited for any longer."""
    timeouts = state.config.timeouts
    if left_out.answers_since is not None:
        waited_s = now - left_out.answers_since
        reason = f"its node answers again, and it did not leave generation {left_out.generation} in {waited_s:.0f} s"
        return Decision(waited_s >= timeouts.left_out_s, reason)
    return Decision(now - left_out.since >= timeouts.left_out_s, f"its node was silent for {timeouts.left_out_s:g} s")


def _mark(turn: Turn, node_id: str, workers: list[Worker], reason: str) -> list[tuple[Worker, str]]:
    """Those of the workers that are in `run`, each with the message of its incident."""
    if not workers:
        return []
    state, in_run = turn.state, []
    for worker in workers:
        generation = worker.left_out.generation if worker.left_out is not None else None
        if worker.in_run:
            in_run.append(worker)
            generation = state.group.generation
        left_out = LeftOut(since=turn.now, reason=reason, generation=generation)
        turn.pool = turn.pool.with_worker(replace(worker, in_run=False, left_out=left_out))
    ranks = tuple(rank for worker in in_run if (rank := state.group.rank_of(worker.index)) is not None)
    ip = workers[0].info.node_ip if workers[0].info is not None else ""
    turn.emit(NodeSilent(node_id=node_id, node_ip=ip, workers=len(workers), ranks=ranks, message=reason))
    return [(worker, f"node {node_id[:12]} ({ip}) does not answer: {reason}") for worker in in_run]


def _take_part_again(turn: Turn, node_id: str) -> None:
    silences.forget(turn, node_id)
    silent_since = []
    for worker in turn.pool.workers:
        if worker.info is None or worker.info.node_id != node_id or worker.left_out is None:
            continue
        left_out = worker.left_out
        if left_out.answers_since is not None:
            continue
        silent_since.append(left_out.since)
        if left_out.generation is None:
            turn.pool = turn.pool.with_worker(replace(worker, left_out=None, unreachable_since=None))
            snapshot_reports.request_if_useful(turn, worker.index)
        else:
            back = replace(left_out, answers_since=turn.now)
            turn.pool = turn.pool.with_worker(replace(worker, left_out=back, unreachable_since=None))
            turn.do(Interrupt(worker.index, left_out.generation))
    if silent_since:
        turn.emit(NodeAnswers(node_id=node_id, silent_s=turn.now - min(silent_since)))


def fresh_s(num_workers: int) -> float:
    """A worker that has answered a poll within this time shows that its node is there: it has missed none."""
    return poll_wait_s(num_workers) + _MARGIN_S


def _is_silent(worker: Worker) -> bool:
    return worker.left_out is not None and worker.left_out.answers_since is None


def _polls_are_answered(state: Attempt, workers: list[Worker], now: float) -> bool:
    limit_s = fresh_s(len(state.pool.workers))
    return any(now - state.progress.answered_at.get(worker.index, 0.0) < limit_s for worker in workers)
