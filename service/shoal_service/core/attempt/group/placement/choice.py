"""The layout of the next group and its workers in rank order. Called by `forming`.

The layout is planned for a number of workers and for the nodes that they are on, then `rank_order` assigns the ranks.
Degrees that the spec fixes are used as they are, also if a tp group then crosses nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal_service.core.attempt.group.buddies import machine_of
from shoal_service.core.attempt.group.placement.rank_order import Candidate, num_crossing, rank_order
from shoal_service.core.attempt.group.ranks import candidates, node_sizes
from shoal_service.core.attempt.plan_layout import PlannedLayout
from shoal_service.core.attempt.state.worker import Worker
from shoal_service.core.attempt.turn import Turn


@dataclass(frozen=True, slots=True)
class Choice:
    planned: PlannedLayout
    workers: tuple[Worker, ...]
    """In rank order."""
    remark: str
    """That tp groups cross nodes, and why; "": none does."""


def choose(turn: Turn, usual: Sequence[Worker]) -> Choice:
    """`usual`: the workers of the next group in the usual order; the layout may use fewer."""
    state = turn.state
    known = {worker.index for worker in usual}
    spares = [worker for worker in candidates(state, turn.now) if worker.index not in known]
    planned = turn.plan(state.target.spec, len(usual), state.config.profile, node_sizes([*usual, *spares]))
    layout = planned.layout
    workers = {worker.index: worker for worker in (*usual, *(spares if layout.tp > 1 else ()))}
    order = rank_order([_candidate(worker) for worker in workers.values()], state.group.workers, layout)
    crossing, num_groups = num_crossing([c.node for c in order], layout.tp), layout.world_size // layout.tp
    remark = ""
    if crossing:
        remark = (
            f"{crossing} of {num_groups} tensor-parallel groups cross nodes, because the workers on the nodes "
            f"fill {num_groups - crossing} groups of {layout.tp}"
        )
    return Choice(planned, tuple(workers[candidate.index] for candidate in order), remark)


def _candidate(worker: Worker) -> Candidate:
    info = worker.info
    assert info is not None, "only usable workers are candidates, and they have described themselves"
    return Candidate(worker.index, info.node_id, machine_of(info), info.rack)
