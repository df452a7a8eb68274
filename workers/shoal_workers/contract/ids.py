"""Names of a job's actors in Ray, by which the service finds them again."""

from __future__ import annotations

NAMESPACE = "shoal"


def supervisor_name(job_id: str, attempt: int) -> str:
    return f"shoal/{job_id}/{attempt}/supervisor"


def worker_name(job_id: str, attempt: int, index: int) -> str:
    """`index` numbers the workers that an attempt started, in order; it is not a rank, and is never reused."""
    return f"shoal/{job_id}/{attempt}/worker-{index}"
