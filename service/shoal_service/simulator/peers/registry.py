"""PEERS: every policy to compare with, by the name under which `shoal simulate --policy` knows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal_service.core.scheduling.market import Policy
from shoal_service.simulator.peers import first_come, gang, marginal, max_min
from shoal_service.simulator.trace import TraceJob


@dataclass(frozen=True, slots=True)
class Peer:
    """A policy that may need to know the trace."""

    words: str
    """One line for people."""
    build: Callable[[Sequence[TraceJob]], Policy]
    every_s: float | None = None
    """It must be called at least so often; None: at events only."""


def _asked(jobs: Sequence[TraceJob]) -> dict[str, int]:
    return {job.job_id: job.asked_workers for job in jobs}


PEERS: dict[str, Peer] = {
    "first-come": Peer("Shoal before its market: first come, first served", lambda jobs: first_come.first_come),
    "fifo-gang": Peer("rigid jobs in the order of submission", lambda jobs: gang.fifo(_asked(jobs))),
    "srtf-gang": Peer("rigid jobs, the shortest remaining time first", lambda jobs: gang.srtf(_asked(jobs))),
    "max-min": Peer("equal numbers of workers", lambda jobs: max_min.max_min),
    "optimus": Peer("a worker goes where it saves most time", lambda jobs: marginal.optimus),
    "elastic-srpt": Peer("short remaining times first, by marginal speed", lambda jobs: marginal.elastic_srpt),
}
