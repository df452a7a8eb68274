"""How many workers each job gets: first come, first served, all or nothing, as Shoal did before `core/scheduling`.

    1 A running job above its max_workers is shrunk. Its workers count as free from the next decision on.
    2 A running job below its min_workers (a PATCH raised them) gets those before any other job gets workers.
    3 The queue, by priority and age: a job starts when its min_workers fit, with as many workers as fit, up to its
      max_workers. The first job that does not fit blocks those behind it, so small jobs cannot starve a large one.
    4 Running jobs grow to max_workers, but only while no job waits that could ever run.

Free is what nodes have minus what running jobs were *granted*, not minus the workers that they have now: a job that has
just lost a node keeps its claim. Workers are indivisible, so they are packed node by node. If the grants exceed what is
left of the cluster, no job grows until they fit again. A queued job that does not fit into the empty cluster waits for
nodes, and blocks no other job. Nothing is ever preempted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shoal_service.core.quantities import count_text

_EPSILON = 1e-9
"""Ray counts resources in fixed point. A rounding error in a sum of floats must not cost a worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerNeed:
    """What one worker reserves on one node."""

    cpus: float
    gpus: float
    memory_gib: float

    def describe(self) -> str:
        parts = [(self.cpus, "CPU"), (self.gpus, "GPU"), (self.memory_gib, "GiB")]
        return " + ".join(f"{amount:g} {unit}" for amount, unit in parts if amount) or "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCapacity:
    """The totals of a node that is alive."""

    node_id: str
    cpus: float
    gpus: float
    memory_gib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDemand:
    """A job that is queued (granted_workers is 0) or has a grant."""

    job_id: str
    priority: int
    created_at: float
    min_workers: int
    max_workers: int
    need: WorkerNeed
    granted_workers: int
    leaving: bool = False
    """Pausing or cancelling: the job keeps its grant until it is gone, and gets no other one."""


@dataclass(frozen=True, slots=True)
class Start:
    """The first grant of a queued job."""

    job_id: str
    workers: int
    reason: str


@dataclass(frozen=True, slots=True)
class Grant:
    """A new number of workers for a running job."""

    job_id: str
    workers: int
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """A queued job does not start yet."""

    job_id: str
    reason: str


Decision: TypeAlias = Start | Grant | Wait


def decide(jobs: Sequence[JobDemand], nodes: Sequence[NodeCapacity]) -> list[Decision]:
    """One decision for each queued job, and one for each running job whose number of workers changes."""
    ordered = sorted(jobs, key=lambda job: (-job.priority, job.created_at, job.job_id))
    running = [job for job in ordered if job.granted_workers > 0]
    queued = [job for job in ordered if job.granted_workers == 0 and not job.leaving]
    room = _Room(nodes)
    missing = sum(job.granted_workers - room.take(job.need, job.granted_workers) for job in running)
    shrunk, staying = _shrink([job for job in running if not job.leaving])
    raised, short = _raise_to_min(staying, room)
    started, blocker = _start(queued, room, nodes, blocker=short)
    grown = (
        [] if blocker or missing else _grow([job for job in staying if job.granted_workers >= job.min_workers], room)
    )
    return [*shrunk, *raised, *started, *grown]


def without_room(jobs: Sequence[JobDemand], nodes: Sequence[NodeCapacity]) -> frozenset[str]:
    """Running jobs whose granted workers do not all fit on these nodes: a worker that has to leave its node cannot be
    replaced now."""
    room = _Room(nodes)
    ordered = sorted(jobs, key=lambda job: (-job.priority, job.created_at, job.job_id))
    running = [job for job in ordered if job.granted_workers > 0]
    return frozenset(job.job_id for job in running if room.take(job.need, job.granted_workers) < job.granted_workers)


def _shrink(running: list[JobDemand]) -> tuple[list[Decision], list[JobDemand]]:
    decisions: list[Decision] = [
        Grant(
            job.job_id,
            job.max_workers,
            f"elasticity.max_workers is {job.max_workers}, {job.granted_workers} were granted.",
        )
        for job in running
        if job.granted_workers > job.max_workers
    ]
    return decisions, [job for job in running if job.granted_workers <= job.max_workers]


def _raise_to_min(running: list[JobDemand], room: _Room) -> tuple[list[Decision], JobDemand | None]:
    """The decisions, and the first job that cannot be raised yet; no other job may take what it waits for."""
    decisions: list[Decision] = []
    for job in running:
        missing = job.min_workers - job.granted_workers
        if missing <= 0:
            continue
        if room.fits(job.need) < missing:
            return decisions, job
        room.take(job.need, missing)
        reason = f"elasticity.min_workers is {job.min_workers}, {job.granted_workers} were granted."
        decisions.append(Grant(job.job_id, job.min_workers, reason))
    return decisions, None


def _start(
    queued: list[JobDemand], room: _Room, nodes: Sequence[NodeCapacity], *, blocker: JobDemand | None
) -> tuple[list[Decision], JobDemand | None]:
    """The decisions, and the first job that has to wait although the cluster is large enough for it."""
    decisions: list[Decision] = []
    for job in queued:
        if blocker is not None:
            reason = f"Waits behind {blocker.job_id} (priority {blocker.priority}), which needs more than what is free."
            decisions.append(Wait(job.job_id, reason))
            continue
        fits = room.fits(job.need)
        if fits >= job.min_workers:
            free = room.describe()
            workers = room.take(job.need, job.max_workers)
            given = f"{count_text(workers, 'worker')} of {job.need.describe()} each"
            reason = f"{given} ({_range_of(job)}); {free} were free before."
            decisions.append(Start(job.job_id, workers, reason))
            continue
        ever = _Room(nodes).fits(job.need)
        needs = f"Needs {_range_of(job)} workers of {job.need.describe()} each"
        if ever < job.min_workers:
            whole = _Room(nodes).describe()
            decisions.append(Wait(job.job_id, f"{needs}; the whole cluster ({whole}) has room for {ever}. Add nodes."))
        else:
            decisions.append(Wait(job.job_id, f"{needs}; there is room for {fits}: {room.describe()} are free."))
            blocker = job
    return decisions, blocker


def _grow(running: list[JobDemand], room: _Room) -> list[Decision]:
    decisions: list[Decision] = []
    for job in running:
        free = room.describe()
        extra = room.take(job.need, job.max_workers - job.granted_workers)
        if extra:
            reason = f"No job waits, and {free} were free: {extra} more workers, of at most {job.max_workers}."
            decisions.append(Grant(job.job_id, job.granted_workers + extra, reason))
    return decisions


def _range_of(job: JobDemand) -> str:
    if job.min_workers == job.max_workers:
        return str(job.min_workers)
    return f"{job.min_workers} to {job.max_workers}"


class _Room:
    """What is free on each node, during one decision."""

    def __init__(self, nodes: Sequence[NodeCapacity]) -> None:
        self._free = [[node.cpus, node.gpus, node.memory_gib] for node in sorted(nodes, key=lambda n: n.node_id)]

    def fits(self, need: WorkerNeed) -> int:
        """The number of such workers that fit."""
        return sum(_fitting(free, need) for free in self._free)

    def take(self, need: WorkerNeed, most: int) -> int:
        """Place up to `most` workers; returns how many were placed.

        The nodes with the least room come first, so that large gaps stay large. Workers without a GPU get a node with
        GPUs only when all others are full.
        """
        taken = 0
        for free in sorted(self._free, key=lambda free: (0.0 if need.gpus else free[1], _fitting(free, need))):
            here = min(most - taken, _fitting(free, need))
            free[0] -= here * need.cpus
            free[1] -= here * need.gpus
            free[2] -= here * need.memory_gib
            taken += here
        return taken

    def describe(self) -> str:
        cpus, gpus, memory_gib = (max(0.0, sum(free[i] for free in self._free)) for i in range(3))
        return f"{cpus:g} CPU, {gpus:g} GPU and {memory_gib:.1f} GiB on {len(self._free)} nodes"


def _fitting(free: list[float], need: WorkerNeed) -> int:
    rooms = [
        math.floor(have / each + _EPSILON)
        for have, each in zip(free, (need.cpus, need.gpus, need.memory_gib), strict=True)
        if each > 0
    ]
    return max(0, min(rooms)) if rooms else _UNLIMITED


_UNLIMITED = 1_000_000
"""Room for workers that reserve nothing; more than any max_workers."""
