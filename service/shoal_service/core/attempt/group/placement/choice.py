"""The layout of the next group and its workers in rank order. Called by `forming`.

The layout is planned for a number of workers, then `rank_order` assigns the ranks. If a tp group would cross nodes, the
layout is planned again with at most as much tp as the nodes hold. That plan is taken if it uses as many workers, is
predicted to fit into memory and keeps all tp groups inside nodes. Degrees that the spec fixes are used as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shoal_service.core.attempt.group.buddies import machine_of
from shoal_service.core.attempt.group.placement.rank_order import Candidate, num_crossing, rank_order
from shoal_service.core.attempt.group.ranks import candidates
from shoal_service.core.attempt.plan_layout import PlannedLayout
from shoal_service.core.attempt.state.worker import Worker
from shoal_service.core.attempt.turn import Turn
from shoal_workers.contract.spec import ParallelismSpec


@dataclass(frozen=True, slots=True)
class Choice:
    planned: PlannedLayout
    workers: tuple[Worker, ...]
    """In rank order."""
    remark: str
    """That tp groups cross nodes, and why; "": none does."""


def choose(turn: Turn, usual: Sequence[Worker]) -> Choice:
    """`usual`: the workers of the next group in the usual order; the layout may use fewer."""
    first = _with(turn, usual, None)
    tp = first.planned.layout.tp
    parallelism = turn.state.target.spec.parallelism
    is_fixed = isinstance(parallelism, ParallelismSpec) and parallelism.tp == tp
    while first.remark and not is_fixed and (tp := _next_smaller_tp(usual, first.planned, tp)):
        second = _with(turn, usual, tp)
        is_as_large = second.planned.layout.world_size == first.planned.layout.world_size
        if is_as_large and second.planned.fits >= first.planned.fits and not second.remark:
            return second
    return first


def _with(turn: Turn, usual: Sequence[Worker], ranks_per_node: int | None) -> Choice:
    state = turn.state
    planned = turn.plan(state.target.spec, len(usual), state.config.profile, ranks_per_node)
    layout = planned.layout
    known = {worker.index for worker in usual}
    spares = [worker for worker in candidates(state, turn.now) if worker.index not in known] if layout.tp > 1 else []
    workers = {worker.index: worker for worker in (*usual, *spares)}
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


def _next_smaller_tp(usual: Sequence[Worker], planned: PlannedLayout, above: int) -> int:
    """The largest degree below `above` of which the nodes hold enough groups for the same number of ranks; 0: none."""
    sizes = Counter(worker.info.node_id for worker in usual if worker.info is not None).values()
    world_size = planned.layout.world_size
    for tp in range(above - 1, 0, -1):
        if world_size % tp == 0 and sum(size // tp * tp for size in sizes) >= world_size:
            return tp
    return 0
