"""JobRun: one job of a simulation, from its submission to its last sample. The engine alone changes it.

      granted                    resized                    finished
         |<- start_s ->| trains     |<- switch_s ->| trains    |
workers  |  held                    |  held                    |
                       ^ ready_at                  ^ ready_at
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from shoal_service.core.scheduling.market import MarketJob
from shoal_service.simulator.capacity import WORKER
from shoal_service.simulator.trace import TraceJob


@dataclass(slots=True)
class JobRun:
    """All amounts of work are samples, all times seconds since the start of the trace."""

    job: TraceJob
    switch_s: float
    """What a change of the number of workers costs this job."""
    start_s: float
    """What a start from the queue costs it."""
    left: float
    granted: int = 0
    held: int = 0
    """The granted workers for which there are nodes."""
    synced_at: float = 0.0
    """Up to when `left`, `served_s` and `trained_s` are counted."""
    ready_at: float = 0.0
    """Time from which it trains: a start or a move lasts until then."""
    ends_at: float = math.inf
    """When it will have finished if nothing changes."""
    moved_at: float | None = None
    started_at: float | None = None
    """When it first got workers."""
    finished_at: float | None = None
    served_s: float = 0.0
    """Worker-seconds held."""
    trained_s: float = 0.0
    """Worker-seconds held less those of starts and moves."""
    num_moves: int = 0
    """Changes of the number of workers that it trained with; starts and preemptions are counted apart."""
    num_preemptions: int = 0
    num_losses: int = 0
    """How often it returned to the queue because its cluster was lost."""
    cluster: str = ""
    """Where it runs, of several clusters; empty: nowhere."""
    away_since: float | None = None
    """Its cluster is lost since then: it keeps its grant, and stands still."""
    history: list[tuple[float, int]] = field(default_factory=list)
    """(from when on, workers held)."""
    places: list[tuple[float, str]] = field(default_factory=list)
    """(from when on, cluster), of several clusters: its starts."""
    seen: MarketJob | None = None
    """What a policy is shown; kept while nothing changes."""

    def sync(self, now: float) -> None:
        """Count what was trained since the last call."""
        if self.held and now > self.synced_at:
            trained = self._training(now)
            self.served_s += self.held * (now - self.synced_at)
            self.trained_s += self.held * trained
            self.left = max(0.0, self.left - trained * self.job.curve.rate(self.held))
            self.seen = None
        self.synced_at = now

    def grant(self, workers: int, now: float) -> None:
        """A start, a resize, or with 0 workers a preemption. The caller gives `hold` next."""
        self.granted, self.moved_at, self.seen = workers, now, None
        if not workers:
            self.num_preemptions += 1
            self.cluster = ""

    def start_in(self, cluster: str, now: float) -> None:
        """`cluster`: of several. Called before the grant."""
        self.cluster = cluster
        if cluster:
            self.places.append((now, cluster))

    def see_cluster(self, is_away: bool, now: float) -> None:
        """Whether its cluster is lost, from now on."""
        if is_away != (self.away_since is not None):
            self.away_since, self.seen = now if is_away else None, None

    @property
    def leaves_at(self) -> float:
        """When it returns to the queue if its cluster stays away; infinite if it may run nowhere else."""
        return math.inf if self.away_since is None or self.job.cluster else self.away_since + self.job.wait_s

    def leave(self, now: float) -> None:
        """It returns to the queue, to start in another cluster. No work is lost."""
        self.granted, self.cluster, self.away_since, self.moved_at, self.seen = 0, "", None, now, None
        self.num_losses += 1

    def hold(self, workers: int, now: float) -> None:
        """The workers that it really has from now on: those granted, as far as there are nodes for them."""
        if workers == self.held:
            return
        self.sync(now)
        before, self.held, self.seen = self.held, workers, None
        self.history.append((now, workers))
        if self.started_at is None:
            self.started_at = now
        if before and workers:
            self.num_moves += 1
        cost_s = self.switch_s if before else self.start_s
        self.ready_at = max(self.ready_at, now + cost_s) if workers else now
        can_train = workers >= self.job.min_workers
        self.ends_at = self.ready_at + self.left / self.job.curve.rate(workers) if can_train else math.inf

    def finish(self, now: float) -> None:
        self.sync(now)
        self.left, self.granted, self.held, self.finished_at, self.ends_at = 0.0, 0, 0, now, math.inf
        self.history.append((now, 0))

    def market_job(self) -> MarketJob:
        """What a policy is shown."""
        if self.seen is None:
            self.seen = MarketJob(
                job_id=self.job.job_id,
                submitted_at=self.job.submit_s,
                min_workers=self.job.min_workers,
                max_workers=self.job.max_workers,
                need=WORKER,
                project=self.job.project,
                priority=self.job.priority,
                granted=self.granted,
                held=self.held,
                cluster=self.cluster or self.job.cluster,
                is_leaving=self.away_since is not None,
                curve=self.job.curve,
                left=self.left,
                done=self.job.work - self.left,
                served_s=self.served_s,
                moved_at=self.moved_at,
                switch_s=self.switch_s,
                start_s=self.start_s,
            )
        return self.seen

    def _training(self, now: float) -> float:
        """Seconds of training since the last count."""
        if self.held < self.job.min_workers:
            return 0.0
        return max(0.0, now - max(self.synced_at, self.ready_at))
