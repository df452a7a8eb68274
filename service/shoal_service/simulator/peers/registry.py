"""PEERS: every policy to compare with, by the name under which `shoal simulate --policy` knows it."""

from __future__ import annotations

from collections.abc import Sequence

from shoal_service.simulator.named_policy import NamedPolicy
from shoal_service.simulator.peers import attained_service, first_come, gang, marginal, max_min
from shoal_service.simulator.trace import TraceJob


def _asked(jobs: Sequence[TraceJob]) -> dict[str, int]:
    return {job.job_id: job.asked_workers for job in jobs}


PEERS: dict[str, NamedPolicy] = {
    "first-come": NamedPolicy(
        "as Shoal did before: first come, first served", lambda jobs: first_come.first_come, has_rules=True
    ),
    "fifo-gang": NamedPolicy("rigid jobs in the order of submission", lambda jobs: gang.fifo(_asked(jobs))),
    "srtf-gang": NamedPolicy("rigid jobs, the shortest remaining time first", lambda jobs: gang.srtf(_asked(jobs))),
    "tiresias": NamedPolicy(
        "rigid jobs, the least attained service first",
        lambda jobs: attained_service.attained_service(_asked(jobs)),
        every_s=attained_service.EVERY_S,
    ),
    "max-min": NamedPolicy("equal numbers of workers", lambda jobs: max_min.max_min),
    "optimus": NamedPolicy("a worker goes where it saves most time", lambda jobs: marginal.optimus),
    "elastic-srpt": NamedPolicy("a worker goes where it shortens the rest most", lambda jobs: marginal.elastic_srpt),
}
