"""Where the workers of a started job will come free: the places of the workers that other jobs give back for it.

A guess, from which processes are started ahead of time: a job that shrinks gives up the workers of its last ranks,
which are the newest as a rule. Pure; called by the control loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from shoal_service.clusters.snapshot import Reservation
from shoal_service.core.scheduling.market import Preempt, Resize, Start
from shoal_workers.contract.ids import index_of_worker


def freed_places(
    changes: Sequence[Start | Resize | Preempt], grants: Mapping[str, int], reservations: Sequence[Reservation]
) -> dict[str, Counter[str]]:
    """For each job that starts: workers by node, at most as many as it starts with. Jobs that get free places are not
    in it, or with fewer workers.

    Args:
        grants: of each job before the changes.
    """
    places = [place for change in changes for place in _given_up(change, grants, reservations)]
    found: dict[str, Counter[str]] = {}
    for change in changes:
        if isinstance(change, Start) and places:
            found[change.job_id] = Counter(places[: change.workers])
            places = places[change.workers :]
    return found


def _given_up(
    change: Start | Resize | Preempt, grants: Mapping[str, int], reservations: Sequence[Reservation]
) -> list[str]:
    """The node of each worker that the job gives up."""
    if isinstance(change, Start):
        return []
    kept = change.workers if isinstance(change, Resize) else 0
    if kept >= grants.get(change.job_id, 0):
        return []
    mine = [one for one in reservations if one.job_id == change.job_id and one.is_alive]
    oldest_first = sorted(mine, key=lambda one: index_of_worker(one.worker_id))
    return [one.node_id for one in oldest_first[kept:]]
