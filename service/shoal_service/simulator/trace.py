"""The values of a job trace: what arrives when, how much work it is, and how fast it is at each world size."""

from __future__ import annotations

from dataclasses import dataclass

from shoal_service.core.scheduling.market import DEFAULT_PROJECT, ThroughputCurve

WAIT_S = 1800.0
"""The default of `elasticity.wait_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceJob:
    """One job. Times are seconds since the start of the trace."""

    job_id: str
    submit_s: float
    work: float
    """Samples to train; positive."""
    min_workers: int
    max_workers: int
    asked_workers: int
    """What a rigid user asks for; only policies without elasticity read it."""
    curve: ThroughputCurve
    priority: int = 0
    project: str = DEFAULT_PROJECT
    restart_s: float | None = None
    """What each start and each change of the number of workers cost in the system that the trace was measured on."""
    cluster: str = ""
    """The only one of several clusters in which it may run; empty: any."""
    wait_s: float = WAIT_S
    """If its cluster is lost for this long, it starts in another one."""

    @property
    def fastest_rate(self) -> float:
        """Samples per second at the best world size."""
        return max(self.curve.rate(workers) for workers in range(self.min_workers, self.max_workers + 1))


@dataclass(frozen=True, slots=True)
class Trace:
    """Jobs in the order of their submission."""

    name: str
    jobs: tuple[TraceJob, ...]
