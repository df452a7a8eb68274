"""Replays a job trace against a capacity trace under a policy, in virtual time.

    while there is an event to come:
        go to the next submission, end of a job, change of capacity, or regular call
        call the policy with all unfinished jobs and all nodes; check its decisions, and apply them

A start costs `start_s` and a change of the number of workers `switch_s` seconds without training. No work is ever lost,
so a preempted job continues where it was. If nodes leave and the policy does not shrink any job, the jobs that started
last lose their workers, but keep the grant. If a whole cluster is lost, its jobs stand still. Those that may run
elsewhere return to the queue after their `wait_s`. The others continue when the cluster is back, and pay for a start.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shoal_service.core.quantities import count_text
from shoal_service.core.scheduling.market import (
    START_S,
    SWITCH_S,
    ClusterState,
    Decision,
    MarketJob,
    MarketState,
    Policy,
    Preempt,
    Project,
    Resize,
    Start,
    Wait,
)
from shoal_service.simulator.traces import WORKER, Capacity, TraceJob

_EPSILON_S = 1e-6
"""Events closer together than this are one event."""
_MAX_IDLE_CALLS = 1000
"""Limit of consecutive regular calls without a running job or an event. The simulation then ends: the policy does
nothing."""


class PolicyError(ValueError):
    """A policy returned a decision that the market forbids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds without training."""

    switch_s: float = SWITCH_S
    """Each change of the number of workers."""
    start_s: float = START_S
    """Each start from the queue."""
    use_restart_s: bool = False
    """Use the trace's `restart_s` of a job for both, if the trace has it."""

    def find_pauses(self, job: TraceJob) -> tuple[float, float]:
        """Return switch_s and start_s of the job."""
        if self.use_restart_s and job.restart_s is not None:
            return job.restart_s, job.restart_s
        return self.switch_s, self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Market:
    """What a simulation needs besides the jobs and the policy."""

    capacity: Capacity
    costs: Costs = field(default_factory=Costs)
    projects: Mapping[str, Project] = field(default_factory=dict)
    every_s: float | None = None
    """Seconds without an event after which the policy is called too; None calls it at events only."""


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """What the jobs of a simulation did, and when it ended."""

    jobs: tuple[JobRun, ...]
    """Jobs in the order of the trace. A job that never finished has no `finished_at`."""
    ended_at: float
    num_calls: int
    """Number of calls of the policy."""


Progress = Callable[[float, int], None]
"""Called at each event with the time and the number of finished jobs."""


def simulate(
    jobs: Sequence[TraceJob], policy: Policy, market: Market, *, progress: Progress | None = None
) -> SimulationResult:
    """Simulate the jobs under a policy. Raises PolicyError if it breaks a rule of the market."""
    return _Engine(jobs, policy, market).run(progress or (lambda now, finished: None))


class _Engine:
    """The state of one simulation."""

    def __init__(self, jobs: Sequence[TraceJob], policy: Policy, market: Market) -> None:
        self._policy, self._market = policy, market
        self._runs = [JobRun(job, *market.costs.find_pauses(job), left=job.work) for job in jobs]
        self._unsubmitted = sorted(self._runs, key=lambda run: run.job.submit_s)[::-1]
        self._active: dict[str, JobRun] = {}
        self._running: list[JobRun] = []
        self._capacity_step = 0
        self._nodes = market.capacity.nodes(0)
        self._clusters = market.capacity.states(0)
        self._num_calls = 0

    def run(self, progress: Progress) -> SimulationResult:
        now, num_idle_calls = 0.0, 0
        while self._unsubmitted or self._active:
            change_at = self._find_next_change()
            regular_at = now + self._market.every_s if self._market.every_s and self._active else math.inf
            next_at = min(change_at, regular_at)
            if math.isinf(next_at):
                break
            is_regular_call = change_at > next_at + _EPSILON_S
            now = next_at
            self._apply_due_events(now)
            if self._active:
                self._call_policy(now)
            progress(now, len(self._runs) - len(self._active) - len(self._unsubmitted))
            is_idle = not any(run.held for run in self._running)
            num_idle_calls = num_idle_calls + 1 if is_regular_call and is_idle else 0
            if num_idle_calls > _MAX_IDLE_CALLS:
                break
        for run in self._running:
            run.sync(now)
        return SimulationResult(tuple(self._runs), now, self._num_calls)

    def _find_next_change(self) -> float:
        """Return the time of the next event that is not a regular call; infinite if there is none."""
        steps = self._market.capacity.steps
        coming = self._unsubmitted[-1].job.submit_s if self._unsubmitted else math.inf
        ending = min((run.ends_at for run in self._running), default=math.inf)
        changing = steps[self._capacity_step + 1][0] if self._capacity_step + 1 < len(steps) else math.inf
        leaving = min((run.leaves_at for run in self._running), default=math.inf)
        return min(coming, ending, changing, leaving)

    def _apply_due_events(self, now: float) -> None:
        """Apply the ends, submissions and changes of capacity that are due."""
        for run in self._running:
            if run.ends_at <= now + _EPSILON_S:
                run.finish(now)
                del self._active[run.job.job_id]
        self._running = [run for run in self._running if run.finished_at is None]
        while self._unsubmitted and self._unsubmitted[-1].job.submit_s <= now + _EPSILON_S:
            run = self._unsubmitted.pop()
            self._active[run.job.job_id] = run
        steps = self._market.capacity.steps
        while self._capacity_step + 1 < len(steps) and steps[self._capacity_step + 1][0] <= now + _EPSILON_S:
            self._capacity_step += 1
            self._nodes = self._market.capacity.nodes(self._capacity_step)
            self._clusters = self._market.capacity.states(self._capacity_step)
            for run in self._running:
                run.set_cluster_lost(self._clusters.get(run.cluster) is ClusterState.AWAY, now)
        for run in self._running:
            if run.leaves_at <= now + _EPSILON_S:
                run.leave(now)
        self._running = [run for run in self._running if run.granted]

    def _call_policy(self, now: float) -> None:
        for run in self._running:
            run.sync(now)
        state = MarketState(
            jobs=[run.market_job() for run in self._active.values()],
            nodes=self._nodes,
            projects=self._market.projects,
            clusters=self._clusters,
        )
        self._num_calls += 1
        granted_before = self._granted_by_cluster()
        for decision in self._policy(state, now):
            self._apply(decision, now)
        self._running = [run for run in self._active.values() if run.granted]
        capacity = self._market.capacity.workers_by_cluster(self._capacity_step)
        for name, granted in self._granted_by_cluster().items():
            if granted > max(capacity[name], granted_before[name]):
                where = f" in the cluster {name}" if name else ""
                raise PolicyError(
                    f"At {now:.0f} s the policy granted {count_text(granted, 'worker')}{where}, and there are "
                    f"{capacity[name]}."
                )
        self._assign_nodes(capacity, now)

    def _granted_by_cluster(self) -> Counter[str]:
        """Return the granted workers by cluster."""
        granted = Counter[str]()
        for run in self._running:
            granted[run.cluster] += run.granted
        return granted

    def _apply(self, decision: Decision, now: float) -> None:
        if isinstance(decision, Wait):
            return
        run = self._active.get(decision.job_id)
        if run is None:
            raise PolicyError(f"At {now:.0f} s the policy decided on {decision.job_id}, which is not in the market.")
        _require(run.lost_since is None, run, now, "changed while its cluster is lost")
        match decision:
            case Preempt():
                _require(run.granted > 0, run, now, "preempted, and has no workers")
                run.grant(0, now)
            case Start(workers=workers) | Resize(workers=workers):
                is_start = isinstance(decision, Start)
                _require(is_start == (run.granted == 0), run, now, "started twice, or resized before its start")
                fits = run.job.min_workers <= workers <= run.job.max_workers
                bounds = f"{run.job.min_workers} to {run.job.max_workers}"
                _require(fits, run, now, f"given {count_text(workers, 'worker')}, and may have {bounds}")
                if isinstance(decision, Start):
                    self._start_in(decision.cluster, run, now)
                if workers != run.granted:
                    run.grant(workers, now)

    def _start_in(self, cluster: str, run: JobRun, now: float) -> None:
        if self._clusters:
            is_open = self._clusters.get(cluster) is ClusterState.OPEN
            _require(is_open, run, now, f"started in the cluster {cluster!r}, and there is none that takes jobs")
            may_run = run.job.cluster in ("", cluster)
            _require(may_run, run, now, f"started in the cluster {cluster}, and may run in {run.job.cluster} only")
        run.start_in(cluster, now)

    def _assign_nodes(self, capacity: Mapping[str, int], now: float) -> None:
        """Give the granted jobs their workers, the oldest start first, as far as there are nodes in its cluster."""
        for run in self._active.values():
            if not run.granted:
                run.hold(0, now)
        left = dict(capacity)
        for run in sorted(self._running, key=lambda run: now if run.started_at is None else run.started_at):
            held = min(left[run.cluster], run.granted)
            left[run.cluster] -= held
            run.hold(held, now)


def _require(condition: bool, run: JobRun, now: float, violation: str) -> None:
    if not condition:
        raise PolicyError(f"At {now:.0f} s job {run.job.job_id} was {violation}.")


@dataclass(slots=True)
class JobRun:
    """A job of a simulation, from its submission to its last sample. Only the engine changes it.

          granted                    resized                    finished
             |<- start_s ->| trains     |<- switch_s ->| trains    |
    workers  |  held                    |  held                    |
                           ^ ready_at                  ^ ready_at

    All amounts of work are samples, all times seconds since the start of the trace.
    """

    job: TraceJob
    switch_s: float
    """Cost of a change of the number of workers."""
    start_s: float
    """Cost of a start from the queue."""
    left: float
    """Samples that are not trained yet."""
    granted: int = 0
    held: int = 0
    """The granted workers for which there are nodes."""
    synced_at: float = 0.0
    """Time up to which `left`, `served_s` and `trained_s` are counted."""
    ready_at: float = 0.0
    """Time at which a start or a move ends, and training begins."""
    ends_at: float = math.inf
    """Time at which the job finishes if nothing changes."""
    moved_at: float | None = None
    """Time of the last change of the grant."""
    started_at: float | None = None
    """Time at which the job first got workers."""
    finished_at: float | None = None
    served_s: float = 0.0
    """Worker-seconds held."""
    trained_s: float = 0.0
    """Worker-seconds held, without those of starts and moves."""
    num_moves: int = 0
    """Changes of the number of workers, without starts and preemptions."""
    num_preemptions: int = 0
    num_losses: int = 0
    """Returns to the queue because the cluster was lost."""
    cluster: str = ""
    """Cluster in which the job runs; empty if it does not run, or there is only one cluster."""
    lost_since: float | None = None
    """Time at which the cluster was lost. The job keeps its grant, and stands still."""
    history: list[tuple[float, int]] = field(default_factory=list)
    """Time and number of workers of each change of `held`."""
    cluster_starts: list[tuple[float, str]] = field(default_factory=list)
    """Time and cluster of each start; empty if there is only one cluster."""
    cached_market_job: MarketJob | None = None
    """The last `market_job`; None if the job has changed since."""

    def sync(self, now: float) -> None:
        """Count what was trained since the last call."""
        if self.held and now > self.synced_at:
            trained_s = self._trained_since_sync(now)
            self.served_s += self.held * (now - self.synced_at)
            self.trained_s += self.held * trained_s
            self.left = max(0.0, self.left - trained_s * self.job.curve.rate(self.held))
            self.cached_market_job = None
        self.synced_at = now

    def grant(self, workers: int, now: float) -> None:
        """Start or resize the job, or preempt it with 0 workers. The caller calls `hold` next."""
        self.granted, self.moved_at, self.cached_market_job = workers, now, None
        if not workers:
            self.num_preemptions += 1
            self.cluster = ""

    def start_in(self, cluster: str, now: float) -> None:
        """Set the cluster of a start, before the grant. Empty if there is only one cluster."""
        self.cluster = cluster
        if cluster:
            self.cluster_starts.append((now, cluster))

    def set_cluster_lost(self, is_lost: bool, now: float) -> None:
        """Note that the cluster is lost, or back, from now on."""
        was_lost = self.lost_since is not None
        if is_lost is not was_lost:
            self.lost_since, self.cached_market_job = now if is_lost else None, None

    @property
    def leaves_at(self) -> float:
        """Time at which the job returns to the queue if its cluster stays lost; infinite if it may run nowhere else."""
        return math.inf if self.lost_since is None or self.job.cluster else self.lost_since + self.job.wait_s

    def leave(self, now: float) -> None:
        """Return the job to the queue, from which it can start in another cluster."""
        self.granted, self.cluster, self.lost_since, self.moved_at, self.cached_market_job = 0, "", None, now, None
        self.num_losses += 1

    def hold(self, workers: int, now: float) -> None:
        """Set the workers that the job has from now on: the granted ones, as far as there are nodes for them."""
        if workers == self.held:
            return
        self.sync(now)
        before, self.held, self.cached_market_job = self.held, workers, None
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
        """Return the job as a policy sees it."""
        if self.cached_market_job is None:
            self.cached_market_job = MarketJob(
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
                is_leaving=self.lost_since is not None,
                curve=self.job.curve,
                left=self.left,
                done=self.job.work - self.left,
                served_s=self.served_s,
                moved_at=self.moved_at,
                switch_s=self.switch_s,
                start_s=self.start_s,
            )
        return self.cached_market_job

    def _trained_since_sync(self, now: float) -> float:
        """Return the seconds of training since `synced_at`."""
        if self.held < self.job.min_workers:
            return 0.0
        return max(0.0, now - max(self.synced_at, self.ready_at))
