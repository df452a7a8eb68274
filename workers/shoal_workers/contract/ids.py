"""Names of a job's actors in Ray, by which the service finds them again; numbers of supervisors and generations.

Each process that supervises an attempt has a *life*: 1, 2, 3 ..., claimed in the cluster's store, so that no two
processes have the same one. The generations that it forms are numbered in a range of its own:

    life 1      1, 2, 3 ...
    life 2      1000001, 1000002 ...        formed after the supervisor was restarted once

Two supervisors of one attempt, one of them cut off and unaware of the other, therefore never give the same number to
two groups. Whatever carries a generation (store prefixes, snapshots, checkpoint directories, reports) also carries the
life.
"""

from __future__ import annotations

from shoal_workers.contract.base import WIRE_VERSION

NAMESPACE = "shoal"
GENERATIONS_PER_LIFE = 1_000_000
"""Size of the range of one life. A supervisor that forms one generation per second uses it up after eleven days."""


def supervisor_name(job_id: str, attempt: int) -> str:
    return f"shoal/{job_id}/{attempt}/supervisor"


def worker_name(job_id: str, attempt: int, index: int) -> str:
    """`index` numbers the workers that an attempt started, in order; it is not a rank, and is never reused."""
    return f"shoal/{job_id}/{attempt}/worker-{index}"


def agent_name(job_id: str, attempt: int, node_id: str) -> str:
    """Name of the agent that polls the workers of this node. A supervisor of another release does not find it."""
    return f"shoal/{job_id}/{attempt}/agent-{WIRE_VERSION}-{node_id}"


def job_of_worker(name: str) -> str | None:
    """Id of the job to which the worker of this name belongs; None if it is not the name of a worker."""
    parts = name.split("/")
    return parts[1] if len(parts) == 4 and parts[0] == "shoal" and parts[3].startswith("worker-") else None


def attempt_of(name: str) -> tuple[str, int] | None:
    """Job id and attempt to which the actor of this name belongs; None if it belongs to no attempt."""
    parts = name.split("/")
    is_actor = len(parts) == 4 and parts[0] == "shoal" and parts[2].isdecimal()
    return (parts[1], int(parts[2])) if is_actor else None


def index_of_worker(name: str) -> int:
    """Return the index in the name of a worker; -1: the name has no index."""
    index = name.rpartition("-")[2]
    return int(index) if index.isdecimal() else -1


def next_generation(last: int, life: int) -> int:
    """Return the number of the next generation that a supervisor of this incarnation forms.

    Args:
        last: the largest number of a generation so far, of any life.
    """
    return max(last, (life - 1) * GENERATIONS_PER_LIFE) + 1


def life_of(generation: int) -> int:
    """Return the incarnation of the supervisor that formed this generation, at least 1."""
    return (generation - 1) // GENERATIONS_PER_LIFE + 1
