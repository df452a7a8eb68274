"""Names under which the actors of a job are found again by anybody who may look for them."""

from __future__ import annotations

NAMESPACE = "shoal"


def supervisor_name(job_id: str, attempt: int) -> str:
    return f"shoal/{job_id}/{attempt}/supervisor"


def worker_name(job_id: str, attempt: int, index: int) -> str:
    """`index` counts the processes that an attempt ever started; it is not a rank."""
    return f"shoal/{job_id}/{attempt}/worker-{index}"
