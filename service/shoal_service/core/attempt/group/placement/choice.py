"""The layout of the next group and its workers in rank order. Called by `forming`
and `switching`.

The layout is planned for a number of workers and for the nodes that they are on, then `rank_order` assigns the ranks.
Degrees that the spec fixes are used as they are, also if a tp group then crosses nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal_service.core.attempt.group import levels
from shoal_service.core.attempt.group.buddies import buddies, machine_of
from shoal_service.core.attempt.group.placement.node_memory import verdict
from shoal_service.core.attempt.group.placement.rank_order import Candidate, num_crossing, rank_order
from shoal_service.core.attempt.group.ranks import candidates, racks_of
from shoal_service.core.attempt.plan_layout import PlanLayout, PlannedLayout
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.worker import Worker
from shoal_service.core.quantities import count_text
from shoal_workers.contract.layout import Layout
from shoal_workers.contract.snapshots import SnapshotServer


@dataclass(frozen=True, slots=True)
class Choice:
    planned: PlannedLayout
    levels: tuple[Layout, ...]
    """The planned layout and its rivals, see levels.py."""
    workers: tuple[Worker, ...]
    """In rank order."""
    buddies: tuple[SnapshotServer | None, ...]
    """By rank: who keeps a copy of its snapshots."""
    refusal: str
    """Why the group cannot start: what its workers need of the memory of a node; "": it can."""
    remark: str
    """That tp groups cross nodes, or that a node lacks memory for copies, and why; "": neither."""


def choose(state: Attempt, usual: Sequence[Worker], now: float, plan: PlanLayout) -> Choice:
    """`usual`: the workers of the next group in the usual order; the layout may use fewer."""
    known = {worker.index for worker in usual}
    spares = [worker for worker in candidates(state, now) if worker.index not in known]
    racks, refused = racks_of([*usual, *spares]), state.history.refused_layouts
    best = plan(state.target.spec, len(usual), state.config.profile, racks, *([refused] if refused else []))
    chosen = levels.preferred(state, best)
    choice = _placed(state, chosen, best, usual, spares)
    return choice if chosen is best or not choice.refusal else _placed(state, best, best, usual, spares)


def _placed(
    state: Attempt, planned: PlannedLayout, best: PlannedLayout, usual: Sequence[Worker], spares: Sequence[Worker]
) -> Choice:
    layout, family = planned.layout, tuple(one.layout for one in (best, *best.rivals))
    workers = {worker.index: worker for worker in (*usual, *(spares if layout.tp > 1 else ()))}
    order = rank_order([_candidate(worker) for worker in workers.values()], state.group.workers, layout)
    chosen = tuple(workers[candidate.index] for candidate in order)
    infos = [worker.info for worker in chosen if worker.info is not None]
    by_rank = buddies(infos, layout) if state.target.keeps_snapshots else (None,) * len(infos)
    memory = verdict(infos, by_rank, planned.host)
    remarks = filter(None, (_crossing(order, layout), memory.remark))
    return Choice(planned, family, chosen, by_rank, memory.refusal, "; ".join(remarks))


def _crossing(order: Sequence[Candidate], layout: Layout) -> str:
    crossing, num_groups = num_crossing([c.node for c in order], layout.tp), layout.world_size // layout.tp
    if not crossing:
        return ""
    return (
        f"{crossing} of {count_text(num_groups, 'tensor-parallel group')} across nodes, because the workers on the "
        f"nodes fill {count_text(num_groups - crossing, 'group')} of {layout.tp}"
    )


def _candidate(worker: Worker) -> Candidate:
    info = worker.info
    assert info is not None, "only usable workers are candidates, and they have described themselves"
    return Candidate(worker.index, info.node_id, machine_of(info), info.rack, info.slot)
