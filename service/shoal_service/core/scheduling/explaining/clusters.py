"""Words about clusters: where a job that waits could start, where it cannot, and why. A job does not span clusters.

With one cluster in the market nothing here names it, but a job that asks for another one. Called by `admission`,
`waiting` and `held_back`.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal_service.core.quantities import count_text
from shoal_service.core.scheduling.explaining.reasons import names_of
from shoal_service.core.scheduling.market import ClusterState, MarketJob
from shoal_service.core.scheduling.plan import Entry, Plan
from shoal_service.core.scheduling.room import Shape

_MOST_NAMED = 3


def in_cluster(plan: Plan, cluster: str) -> str:
    """With a space before it, " in the cluster west"; nothing if there is only one."""
    return f" in the cluster {cluster}" if plan.has_clusters and cluster else ""


def closed_words(plan: Plan, job: MarketJob) -> str | None:
    """Why more nodes would not help: no cluster in which the job may start takes jobs. None: one does."""
    if job.cluster:
        return _pinned_words(plan, job)
    taking = {name for name in plan.known_clusters if _state(plan, name) is ClusterState.OPEN}
    if taking and not taking <= job.excluded_clusters:
        return None
    if taking:
        where = f"the cluster {min(taking)}" if len(taking) == 1 else f"the clusters {names_of(sorted(taking))}"
        return f"Its checkpoints (checkpoint.url) are not known to be reachable in {where}. It waits until they are."
    words = _closed(plan, job)
    return f"No cluster takes jobs now.{words}" if words else None


def _pinned_words(plan: Plan, job: MarketJob) -> str | None:
    name, state = job.cluster, _state(plan, job.cluster)
    if state is None:
        return (
            f"worker.cluster is {name}, and no cluster of this name has joined. Join it (shoal join), or set "
            "worker.cluster: any."
        )
    if state is ClusterState.AWAY:
        return (
            f"worker.cluster is {name}, and this cluster does not answer. The job starts when it answers again; to "
            "start elsewhere, set worker.cluster: any."
        )
    if state is ClusterState.CORDONED:
        return (
            f"worker.cluster is {name}, and this cluster is cordoned. Uncordon it (shoal clusters uncordon {name}), or "
            "set worker.cluster: any."
        )
    if name in job.excluded_clusters:
        return (
            f"worker.cluster is {name}, and its checkpoints (checkpoint.url) are not known to be reachable there. It "
            "waits until they are; to start elsewhere, set worker.cluster: any."
        )
    return None


def _state(plan: Plan, name: str) -> ClusterState | None:
    """None: no such cluster has joined."""
    return plan.clusters.get(name) or (ClusterState.OPEN if name in plan.room.clusters else None)


def never_words(plan: Plan, entry: Entry) -> str:
    """Why the job's minimum fits into the empty nodes of no cluster."""
    job, shapes = entry.job, entry.claim.shapes
    needs = f"Needs {count_text(job.min_workers, 'worker')} of {job.need.describe()} each; the nodes that it may use"
    where = in_cluster(plan, entry.shape.cluster)
    if where and job.cluster:
        return (
            f"{needs}{where} have room for {entry.shape.ever}. Add nodes there, lower elasticity.min_workers, or set "
            "worker.cluster: any."
        )
    room = _rooms([(shape, shape.ever) for shape in shapes]) if len(shapes) > 1 else f"{entry.shape.ever}{where}"
    spans = spans_words(job, [shape.ever for shape in shapes])
    return f"{needs} have room for {room}{spans}. Add nodes, or lower elasticity.min_workers.{_closed(plan, job)}"


def room_words(plan: Plan, entry: Entry, rooms: Sequence[tuple[Shape, int]]) -> str:
    """Why the job's minimum fits into no cluster now, by the room in each that could hold it."""
    job, [(first, room), *others] = entry.job, rooms
    needs = f"Needs {count_text(job.min_workers, 'worker')} of {entry.shape.words} each"
    minima = "the rest is at the minima of running jobs"
    helps = f"A priority above {job.priority} may preempt, more nodes help always."
    if others:
        spans = spans_words(job, [room for _, room in rooms])
        return f"{needs}; {_rooms(rooms)} can be had by shrinking others, {minima}{spans}. {helps}{_closed(plan, job)}"
    where = in_cluster(plan, first.cluster)
    if where and job.cluster:
        helps = f"{helps} With worker.cluster: any it may start elsewhere."
    return f"{needs}; {room} can be had{where} by shrinking others, {minima}. {helps}{_closed(plan, job)}"


def _rooms(rooms: Sequence[tuple[Shape, int]]) -> str:
    """ "3 in the cluster east, 2 in the cluster west": the most first."""
    ordered = sorted(rooms, key=lambda pair: (-pair[1], pair[0].cluster))
    found = [f"{room} in the cluster {shape.cluster}" for shape, room in ordered[:_MOST_NAMED]]
    more = len(ordered) - _MOST_NAMED
    return ", ".join([*found, f"less in {count_text(more, 'other')}"] if more > 0 else found)


def spans_words(job: MarketJob, rooms: Sequence[int]) -> str:
    """Where the sum would be enough."""
    is_enough = len(rooms) > 1 and sum(rooms) >= job.min_workers
    return ", and a job does not span clusters" if is_enough else ""


def _closed(plan: Plan, job: MarketJob) -> str:
    """The clusters that are left out, as further sentences."""
    if job.cluster:
        return ""
    found = []
    for name in sorted(plan.known_clusters):
        state = _state(plan, name)
        if state is ClusterState.AWAY:
            found.append(f" The cluster {name} does not answer.")
        elif state is ClusterState.CORDONED:
            found.append(f" The cluster {name} is cordoned.")
        elif name in job.excluded_clusters:
            found.append(f" Its checkpoints are not known to be reachable in the cluster {name}.")
    return "".join(found)
