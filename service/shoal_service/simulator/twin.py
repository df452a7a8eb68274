"""A twin of one job: its attempt machine lives through drawn failures in virtual time. Pure.

    heap of events (failures, repairs, answers of workers) --> step_all --> commands --> what comes of them, on the heap

All decisions are those of core/attempt: whom to interrupt, what to wait for and until when, which workers form the next
group, from which snapshot or checkpoint, when to grow. Only the durations of what the machine asks for are costs.

The machine's work grows with its workers, and 100,000 of them for a month would take days. So it sees a sample: a node
is two workers, and of the nodes that train `_GROUP` are there, and as many more as the job will lack at one time. The
nodes that are idle, missing or spare are all there. Nodes are alike, so a failure may be moved to another node of its
kind; what depends on the size of the job does not come from the sample but from the job itself:

    layouts, step times      `find_layout` is asked about the nodes of the job
    costs                    by the GPUs of the group
    timeouts                 longer by what the machine would add for the job's workers

The file is long because the twin is one thing: what each command and each failure does changes the same heap, the same
sample of nodes and the same account of time.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from shoal_service.core.attempt import deadlines, hangs, machine
from shoal_service.core.attempt.messages import (
    CheckpointCommitted,
    CheckpointFound,
    Command,
    Commit,
    End,
    Event,
    FindCheckpoint,
    Interrupt,
    InterruptAcknowledged,
    KillWorker,
    NodesAvoided,
    NodesSilent,
    ProgressReported,
    ReportArrived,
    RequestSnapshotParts,
    RequestYield,
    Run,
    RunReturned,
    ShowIncident,
    SnapshotPartsReported,
    StartWorker,
    StorageAway,
    SuspectNode,
    Tick,
    WorkerLost,
    WorkerWarm,
)
from shoal_service.core.attempt.state import (
    Attempt,
    AttemptConfig,
    AvoidedNode,
    Opening,
    Quiescing,
    Stage,
    Target,
    Timeouts,
    later_s,
    poll_wait_s,
)
from shoal_service.core.hardware_profile import HardwareProfile, Racks
from shoal_service.core.layout_plan import Plan
from shoal_service.simulator.failures import DAY_S, Cause, Failure, Takes, find_most_missing
from shoal_service.simulator.recovery_costs import RecoveryCosts
from shoal_service.simulator.sampled_nodes import WORKERS_PER_NODE, Node, SampledNodes, SampledWorker
from shoal_service.simulator.time_account import TimeAccount
from shoal_workers.contract import (
    CheckpointName,
    ErrorClass,
    ErrorReport,
    ExitKind,
    GroupFormed,
    IncidentCause,
    JobSpec,
    Layout,
    Phase,
    Progress,
    SavedPart,
    SnapshotPart,
    StepReport,
    WorkerExit,
    WorkerInfo,
    later_to_form_s,
)

_GROUP = 24
"""Nodes of a full group in the sample; more if a rack is larger than a third of it, or more nodes will be missing."""
_IDLE = 48
"""Most idle nodes in the sample."""
_SUSPECTED_S = 1.0
"""Seconds until the control plane has answered a suspicion of a node."""
_EPSILON_S = 1e-3
_TERMS = {
    Stage.RUNNING: "detect",
    Stage.SWITCHING: "detect",
    Stage.WAITING: "wait",
    Stage.COMMITTING: "storage",
    Stage.FALLING_BACK: "storage",
}
"""Where the time of a stage goes in which the job does not train."""
_ANY = 0
_MEASURED = 5
"""Steps that the machine has to see before the measured times decide about hangs."""


@dataclass(frozen=True, slots=True)
class TwinLayout:
    """The layout for a number of nodes."""

    nodes: int
    """Nodes that it uses."""
    step_s: float
    axis_ranks: int
    """Ranks along each axis of its mesh, added up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinJob:
    """The job, and how large it is in truth."""

    spec: JobSpec
    gpus: int
    """GPUs that the job is granted; `elasticity.standby` of the spec comes on top."""
    gpus_per_node: int
    num_params: float
    find_layout: Callable[[int], TwinLayout]
    """Returns the layout for a number of nodes."""

    @property
    def nodes(self) -> int:
        return self.gpus // self.gpus_per_node

    @property
    def standby_nodes(self) -> int:
        return -(-self.spec.elasticity.standby // self.gpus_per_node)

    @property
    def total_nodes(self) -> int:
        """Nodes with the standby ones."""
        return self.nodes + self.standby_nodes

    @property
    def total_gpus(self) -> int:
        return self.total_nodes * self.gpus_per_node

    @property
    def min_nodes(self) -> int:
        return min(self.nodes, -(-self.spec.elasticity.min_workers // self.gpus_per_node))


@dataclass(slots=True, kw_only=True)
class TwinResult:
    """What one run of the twin shows."""

    seconds: float
    terms: dict[str, float]
    """Seconds by the name of a term; their sum is `seconds`."""
    steps: int = 0
    """Steps at the end that were not undone."""
    steps_lost: float = 0.0
    """Steps that were done again."""
    failures: Counter[str] = field(default_factory=Counter)
    """Failures that hit a node of the job, by cause."""
    num_groups: int = 0
    num_incidents: int = 0
    from_storage: int = 0
    """Groups that restored a durable checkpoint after the first group."""
    recovery_s: list[float] = field(default_factory=list)
    """Seconds from a failure to the first step after it, of each incident that closed."""
    missing: list[tuple[float, int]] = field(default_factory=list)
    """Nodes that cannot be used, from a time on."""
    training: list[tuple[float, float]] = field(default_factory=list)
    """Share of the full speed, from a time on."""
    orders: float = 0.0
    """Orders to workers, for all workers of the job."""
    answers: float = 0.0
    """Answers and reports of workers without polls, for all workers of the job."""
    ends: list[str] = field(default_factory=list)
    """Why attempts ended; another one followed each."""

    @property
    def goodput(self) -> float:
        return self.terms["productive"] / self.seconds


def run_twin(
    job: TwinJob,
    failures: Sequence[Failure],
    days: float,
    costs: RecoveryCosts | None = None,
    *,
    group_nodes: int = _GROUP,
) -> TwinResult:
    """Let the job live through the failures. Deterministic.

    `group_nodes`: nodes of a full group in the sample.
    """
    return _Twin(job, failures, days * DAY_S, costs or RecoveryCosts(), group_nodes).run()


class _Twin:
    """The state of one run. `now` counts from 1: 0 means never in the machine's state."""

    def __init__(
        self,
        job: TwinJob,
        failures: Sequence[Failure],
        seconds: float,
        costs: RecoveryCosts,
        group_nodes: int,
    ) -> None:
        self.job, self.costs, self.end = job, costs, seconds + 1.0
        self.now = self.booked_to = 1.0
        self.layout = job.find_layout(job.nodes)
        self.full_nodes, ideal_s = self.layout.nodes, self.layout.step_s
        num_idle = min(job.nodes - self.full_nodes, _IDLE)
        rack = max((failure.cause.nodes for failure in failures), default=1)
        lacking = find_most_missing(failures) - num_idle - job.standby_nodes
        self.group_nodes = min(self.full_nodes, max(group_nodes, 3 * rack, lacking + group_nodes))
        self.granted_nodes = self.group_nodes + num_idle
        self.sample = SampledNodes(self.granted_nodes + job.standby_nodes, rack)
        self.timeouts = find_timeouts(job, WORKERS_PER_NODE * len(self.sample.nodes))
        self.memory: dict[str, tuple[SnapshotPart, ...]] = {}
        self.avoided: dict[str, AvoidedNode] = {}
        self.silent: dict[str, str] = {}
        self.durable: CheckpointName | None = None
        self.storage_until = 0.0
        self.heap: list[tuple[float, int, int, Callable[[], None]]] = []
        self.num_pushed = 0
        self.attempt = 1
        self.tick_at = math.inf
        # the newest group
        self.time = TimeAccount(ideal_s)
        self.start_step = 0
        self.pace = (1, 1, 0.0)
        self.form_until = 0.0
        self.purpose = ""
        """Term of the group's formation as a whole; empty: it follows an incident, and has a term for each part."""
        self.broken_at: float | None = None
        self.result = TwinResult(seconds=seconds, terms=self.time.terms)
        self.state = self._open()
        for failure in failures:
            self._at(failure.at + 1.0, partial(self._hit, failure), outlives=True)

    def _open(self) -> Attempt:
        job = self.job
        missing = job.nodes - job.min_nodes
        elasticity = job.spec.elasticity.model_copy(
            update={
                "min_workers": WORKERS_PER_NODE * max(1, self.granted_nodes - missing),
                "max_workers": WORKERS_PER_NODE * self.granted_nodes,
                "standby": WORKERS_PER_NODE * job.standby_nodes,
            }
        )
        return Attempt(
            config=AttemptConfig(job_id="twin", attempt=self.attempt, checkpoint_root="/twin", timeouts=self.timeouts),
            target=Target(
                spec=job.spec.model_copy(update={"elasticity": elasticity}),
                granted=WORKERS_PER_NODE * self.granted_nodes,
            ),
            current=Opening(since=self.now),
        )

    def run(self) -> TwinResult:
        self._perform(machine.open_attempt(self.state))
        while self.heap and self.heap[0][0] < self.end:
            at, _, attempt, act = heapq.heappop(self.heap)
            if attempt in (_ANY, self.attempt):
                self._book_time(at)
                act()
        self._book_time(self.end)
        self._stop_training()
        self.result.steps = self.time.settle()
        self.result.steps_lost = self.time.steps_lost
        return self.result

    def _try_again(self) -> None:
        """Another attempt continues from the newest checkpoint, as the control plane has it after an attempt's end."""
        self._stop_training()
        self.sample.clear()
        self.memory.clear()
        self.silent.clear()
        self.attempt += 1
        self.tick_at = math.inf
        self.state = self._open()
        self._perform(machine.open_attempt(self.state))
        self._feed(NodesAvoided(tuple(self.avoided.values())))

    # Time

    def _at(self, at: float, act: Callable[[], None], *, outlives: bool = False) -> None:
        """`outlives`: it happens although another attempt may have begun by then."""
        self.num_pushed += 1
        attempt = _ANY if outlives else self.attempt
        heapq.heappush(self.heap, (max(at, self.booked_to), self.num_pushed, attempt, act))

    def _after(self, seconds: float, act: Callable[[], None], *, outlives: bool = False) -> None:
        self._at(self.now + seconds, act, outlives=outlives)

    def _book_time(self, until: float) -> None:
        """Book the time since the last booking, but that in which the group trains: its steps are booked."""
        self.now = until
        since, self.booked_to = self.booked_to, until
        terms = self.time.terms
        if self.time.is_training:
            terms[self.purpose or "first_step"] += max(0.0, min(until, self.time.trains_from) - since)
        elif self.state.stage is Stage.FORMING:
            formed = min(until, max(since, self.form_until))
            terms[self.purpose or "form"] += formed - since
            terms[self.purpose or "restore"] += until - formed
        else:
            terms[self._term()] += until - since

    def _term(self) -> str:
        if isinstance(self.state.current, Quiescing):
            return "leave" if self.state.current.interrupt_at is None else "grace"
        return _TERMS.get(self.state.stage, "start")

    def _stop_training(self, *, is_boundary: bool = False) -> None:
        """The group trains no longer: what its nodes have in memory is all that is left of it."""
        if self.time.is_training:
            self._keep_snapshots(is_boundary=is_boundary)
            self.time.stop(self.now)
            self.result.training.append((self.now, 0.0))

    def _count_done(self) -> int:
        return self.time.count_steps(self.now)

    # The machine

    def _feed(self, *events: Event) -> None:
        self._catch_up()
        self._step(*events)

    def _step(self, *events: Event) -> None:
        self.state, commands = machine.step_all(self.state, events, self.now, self._plan)
        self._perform(commands)
        self._schedule_tick()

    def _plan(
        self,
        spec: JobSpec,
        world_size: int,
        profile: HardwareProfile | None,
        racks: Racks = (),
        refused: tuple[Layout, ...] = (),
    ) -> Plan:
        used_nodes = self.job.find_layout(self._count_nodes(world_size)).nodes
        group = max(1, round(self.group_nodes * used_nodes / self.full_nodes))
        return Plan(Layout(dp_shard=min(world_size, WORKERS_PER_NODE * group)), "twin")

    def _count_nodes(self, workers: int) -> int:
        """Nodes of the job if this number of workers of the sample may train."""
        return max(1, self.job.nodes - self.granted_nodes + workers // WORKERS_PER_NODE)

    def _schedule_tick(self) -> None:
        at = min((time for time in self._list_deadlines() if time > self.now), default=math.inf)
        if at < self.tick_at or self.tick_at <= self.now:
            self.tick_at = at
            if at < math.inf:
                self._at(at, self._tick)

    def _tick(self) -> None:
        if self.now < self.tick_at:
            return
        self.tick_at = math.inf
        self._feed(NodesSilent(dict(self.silent)) if self.silent else Tick())

    def _list_deadlines(self) -> Iterable[float]:
        """The times at which time alone may bring something about."""
        state, timeouts = self.state, self.state.config.timeouts
        wait = deadlines.find_wait(state)
        if wait is not None and wait.until is not None:
            yield wait.until + _EPSILON_S
        if isinstance(state.current, Quiescing) and state.current.interrupted_at is not None:
            yield state.current.interrupted_at + timeouts.unresponsive_s + timeouts.later_s(len(state.pool.workers))
            yield (state.current.left_at or 0.0) + timeouts.unresponsive_s + _EPSILON_S
        if state.stage in (Stage.RUNNING, Stage.SWITCHING) and not self.time.is_training:
            yield hangs.newest_progress(state) + hangs.threshold_s(state) + _EPSILON_S
        settle_s = timeouts.gather_s if state.stage is Stage.STARTING else timeouts.settle_s
        newest = max((worker.warm_at or 0.0 for worker in state.pool.workers), default=0.0)
        yield newest + settle_s + _EPSILON_S
        for worker in state.pool.workers:
            if worker.left_out is not None:
                yield worker.left_out.since + timeouts.left_out_s + _EPSILON_S
            if worker.slow_until is not None:
                yield worker.slow_until + _EPSILON_S
        yield state.budgets.grow_not_before + _EPSILON_S
        yield state.budgets.form_not_before + _EPSILON_S
        if (retry_at := getattr(getattr(state.current, "search", None), "retry_at", None)) is not None:
            yield retry_at + _EPSILON_S
        for requested_at in state.snapshots.requested.values():
            yield requested_at + state.quiesce_s + _EPSILON_S

    def _perform(self, commands: Sequence[Command]) -> None:
        runs = [command for command in commands if isinstance(command, Run)]
        leaving: list[SampledWorker] = []
        asked: list[int] = []
        yielding: RequestYield | None = None
        for command in commands:
            match command:
                case FindCheckpoint():
                    self._after(self.costs.storage_s, self._answer_search)
                case StartWorker(index=index, worker_id=worker_id, avoid_nodes=avoids, only_on=only_on):
                    self.sample.workers[index] = SampledWorker(index, worker_id, avoids, only_on)
                case KillWorker(index=index):
                    self.sample.remove(index)
                case Interrupt(index=index):
                    worker_in_run = self.sample.workers.get(index)
                    if worker_in_run is not None and worker_in_run.run is not None:
                        leaving.append(worker_in_run)
                case RequestYield():
                    yielding = command
                case RequestSnapshotParts(index=index):
                    asked.append(index)
                case Commit(name=name, parts=parts):
                    self._commit(name, parts)
                case SuspectNode(node_id=node_id):
                    self._after(_SUSPECTED_S, partial(self._avoid, node_id), outlives=True)
                case ShowIncident(incident=incident, closed_at=float() as closed_at):
                    self.result.num_incidents += 1
                    self.result.recovery_s.append(closed_at - (self.broken_at or incident.at))
                case End(end=end):
                    self.result.ends.append(f"{end.reason}: {end.message}")
                    self._after(self.costs.start_s, self._try_again)
                case _:
                    pass
        self._count(commands)
        if leaving:
            self._stop_training()
            self._after(self.costs.find_leave_s(self._count_gpus()), partial(self._leave, leaving))
        if asked:
            self._after(self.costs.leave_s, partial(self._answer_parts, asked))
        if runs:
            self._form_group(runs)
        if yielding is not None:
            boundary = self.time.find_end(self._count_done() + 1)
            self._at(boundary, partial(self._yield, yielding.generation, yielding.durable))
        self._place()

    def _count_gpus(self) -> int:
        return self.layout.nodes * self.job.gpus_per_node

    def _count(self, commands: Sequence[Command]) -> None:
        to_ranks = sum(isinstance(command, Run | Interrupt | RequestYield) for command in commands)
        to_workers = sum(isinstance(command, StartWorker | KillWorker | RequestSnapshotParts) for command in commands)
        per_rank = self._count_gpus() / max(1, len(self.state.group.workers))
        num = to_ranks * per_rank + to_workers * self.job.gpus_per_node / WORKERS_PER_NODE
        self.result.orders += num
        self.result.answers += num

    # What comes of the commands

    def _place(self) -> None:
        for worker in self.sample.place_waiting():
            self._after(self.costs.start_s, partial(self._report_warm, worker))

    def _report_warm(self, worker: SampledWorker) -> None:
        if self.sample.workers.get(worker.index) is not worker or worker.node is None or worker.node.is_down:
            return
        worker.is_warm = True
        info = WorkerInfo(
            worker_id=worker.worker_id,
            node_id=worker.node.node_id,
            node_ip=worker.node.node_id,
            pid=worker.index,
            store_port=1,
            device="cuda",
            snapshot_port=1,
            rack=worker.node.rack,
        )
        self._feed(WorkerWarm(worker.index, info))

    def _answer_search(self) -> None:
        if self.now < self.storage_until:
            self._feed(StorageAway("no answer"))
        else:
            self._feed(CheckpointFound(str(self.durable) if self.durable else None))

    def _answer_parts(self, indexes: Iterable[int]) -> None:
        workers = [self.sample.workers[index] for index in indexes if index in self.sample.workers]
        answers = [
            SnapshotPartsReported(worker.index, self.memory.get(worker.node.node_id, ()))
            for worker in workers
            if worker.node is not None and not worker.node.is_down
        ]
        if answers:
            self._feed(*answers)

    def _commit(self, name: str, parts: Sequence[SavedPart]) -> None:
        self.durable = CheckpointName.parse(name)
        first = parts[0]
        done = CheckpointCommitted(name, first.generation, first.step)
        self._after(self.costs.storage_s, partial(self._feed, done))

    def _avoid(self, node_id: str) -> None:
        """The control plane puts the node on probation, until it is repaired or has passed its test."""
        node = self.sample.find_node(node_id)
        if node is None or node.is_avoided:
            return
        node.is_avoided = True
        self.avoided[node_id] = AvoidedNode(node_id=node_id, reason="on probation")
        self._after(self.job.spec.health.probation_s, partial(self._release, node, node_id), outlives=True)
        self._note_missing()
        self._feed(NodesAvoided(tuple(self.avoided.values())))

    def _release(self, node: Node, node_id: str) -> None:
        if node.node_id == node_id and not node.is_broken and self.avoided.pop(node_id, None) is not None:
            node.is_avoided = False
            self._note_missing()
            self._feed(NodesAvoided(tuple(self.avoided.values())))

    def _form_group(self, runs: Sequence[Run]) -> None:
        self._stop_training()
        for run in runs:
            if (worker := self.sample.workers.get(run.index)) is not None:
                worker.run = run.assignment
        first = runs[0].assignment
        source = first.restore_snapshot
        self.layout = self._find_layout()
        gpus, params = self._count_gpus(), self.job.num_params
        form_s = self.costs.find_form_s(gpus, self.layout.axis_ranks)
        is_durable = source is None and first.restore_from is not None
        has_state = is_durable or self.state.history.has_formed
        restore_s = self.costs.find_restore_s(gpus, params, is_durable=is_durable) if has_state else 0.0
        if is_durable and self.now + form_s < self.storage_until:
            self._after(form_s, partial(self._find_no_storage, first.generation))
            restore_s = math.inf
        self.form_until = self.now + form_s
        self.purpose = "" if self.state.incident is not None else "switch" if has_state else "start"
        generation = first.generation
        durable = CheckpointName.parse(str(first.restore_from or "").rpartition("/")[2])
        start = source.step if source is not None else durable.step if durable is not None else 0
        self.result.from_storage += is_durable and self.state.history.has_formed
        self._after(form_s + restore_s, partial(self._report_formed, generation, start))

    def _find_no_storage(self, generation: int) -> None:
        """No rank can read the checkpoint: all of them leave."""
        if generation == self.state.group.generation and self.state.stage is Stage.FORMING:
            error = ErrorReport(type="OSError", message="no answer", traceback="", phase=Phase.RESTORING)
            workers = [worker for worker in self._group() if worker.run is not None and not worker.is_lost]
            self._feed(*(self._exit(worker, ExitKind.STORAGE_FAILED, error=error) for worker in workers))

    def _find_layout(self) -> TwinLayout:
        """The layout of the group that forms, by the nodes that it could have."""
        usable = min(self.state.num_usable, self.state.target.granted)
        return self.job.find_layout(self._count_nodes(usable))

    def _report_formed(self, generation: int, start: int) -> None:
        group = [self.sample.workers.get(index) for index in self.state.group.workers]
        workers = [worker for worker in group if worker is not None and not worker.is_lost]
        is_current = generation == self.state.group.generation and self.state.stage is Stage.FORMING
        if not is_current or len(workers) < len(group):
            return
        self.result.num_groups += 1
        budget, step_s = self.job.spec.snapshot.budget, self.time.ideal_s
        self.pace = self.costs.find_snapshot_pace(self._count_gpus(), self.job.num_params, step_s, budget)
        self.start_step = start
        self.time.begin(start, self.now + self.costs.first_step_s)
        self._change_speed()
        formed = GroupFormed(
            generation=generation,
            at=self.now,
            start_step=start,
            total_steps=1 << 40,
            form_s=0.0,
            build_s=0.0,
            restore_s=0.0,
            num_parameters=0,
        )
        progress = Progress(generation=generation, phase=Phase.FORWARD, step=start, at=self.now, counter=1)
        self._feed(
            ReportArrived(workers[0].index, formed), *(ProgressReported(worker.index, progress) for worker in workers)
        )
        self._at(self.time.find_end(start + 1) + _EPSILON_S, partial(self._report, generation))

    def _change_speed(self) -> None:
        """The group trains at the speed of its slowest worker."""
        if not self.time.is_training:
            return
        slowdown = max((worker.slowdown for worker in self._group()), default=1.0)
        self.time.change_speed(
            self.now, self.layout.step_s, snapshot_s=self.layout.step_s * self.pace[2], slowdown=slowdown
        )
        self.result.training.append((self.now, self.time.ideal_s / self.time.step_s))
        if slowdown > (self.job.spec.health.straggler_factor or math.inf):
            self._compare_next(self._count_done() + 1)

    def _compare_next(self, step: int) -> None:
        self._at(self.time.find_end(step) + _EPSILON_S, partial(self._compare, step, len(self.result.training)))

    def _compare(self, step: int, num_changes: int) -> None:
        """Rank 0 reports how long each rank has computed, after each step while one is slow."""
        if self.time.is_training and num_changes == len(self.result.training):
            self._compare_next(step + 1)
            self._report(self.state.group.generation, compares=True)

    def _group(self) -> list[SampledWorker]:
        return [self.sample.workers[index] for index in self.state.group.workers if index in self.sample.workers]

    def _report(self, generation: int, *, compares: bool = False) -> None:
        """Rank 0 reports the newest step."""
        if (
            not self.time.is_training
            or generation != self.state.group.generation
            or self._count_done() <= self.start_step
        ):
            return
        self.broken_at = None
        report = StepReport(
            generation=generation,
            step=self._count_done(),
            at=self.now,
            loss=1.0,
            grad_norm=1.0,
            lr=1.0,
            tokens=1,
            step_s=self.time.step_s,
            world_size=len(self.state.group.workers),
            compute_s=tuple(self.layout.step_s * worker.slowdown for worker in self._group()) if compares else (),
        )
        self._step(ReportArrived(self.state.group.workers[0], report))

    def _catch_up(self) -> None:
        """Report what the group has done until now: its steps, and the checkpoints that it has saved."""
        if not self.time.is_training or self._count_done() <= self.start_step:
            return
        generation, now = self.state.group.generation, self.now
        self.now = max(self.state.progress.last_event_at, self.time.find_end(self._count_done()))
        if self._count_done() > self.state.progress.step:
            for _ in range(max(1, _MEASURED - self.state.progress.num_measured)):
                self._report(generation)
        self._save_checkpoint(generation)
        self.now = now

    def _save_checkpoint(self, generation: int) -> None:
        """The newest checkpoint of this group is durable, if the storage was there to take it."""
        spec = self.job.spec.checkpoint
        every = spec.every_steps or max(1, round((spec.every_s or DAY_S) / self.time.step_s))
        write_s = self.costs.state_bytes * self.job.num_params / self.costs.storage_bandwidth
        written = self.time.count_steps(self.now - write_s)
        step = written // every * every
        known = self.durable.step if self.durable else 0
        if step <= max(known, self.start_step) or self.now < self.storage_until:
            return
        name = CheckpointName(step, self.attempt, generation)
        parts = [self._make_saved_part(name, rank) for rank in range(len(self.state.group.workers))]
        self._step(*(ReportArrived(i, part) for i, part in zip(self.state.group.workers, parts, strict=True)))
        self.result.answers += self._count_gpus() * (step - max(known, self.start_step)) // every

    def _make_saved_part(self, name: CheckpointName, rank: int) -> SavedPart:
        return SavedPart(
            generation=name.generation,
            step=name.step,
            rank=rank,
            world_size=len(self.state.group.workers),
            directory=f"/twin/{name}",
            files=(),
            stall_s=0.0,
            write_s=0.0,
        )

    def _keep_snapshots(self, *, is_boundary: bool) -> None:
        """What is in the memory of the group's nodes now. Before a group's first step, that of the group before is."""
        done, start = self._count_done(), self.start_step
        if done <= start:
            return
        copies, sends, _ = self.pace
        own = {done} if is_boundary else {start + 1 + (done - start - 1) // every * every for every in (copies, sends)}
        sent = start + 1 + (done - start - 1) // sends * sends
        parts: dict[str, list[SnapshotPart]] = {}
        for index in self.state.group.workers:
            worker = self.sample.workers.get(index)
            if worker is None or worker.run is None or worker.node is None:
                continue
            run = worker.run
            held = [(worker.node.node_id, step) for step in own]
            held += [(run.buddy.node_id, sent)] if run.buddy is not None else []
            for node_id, step in held:
                part = SnapshotPart(
                    generation=run.generation,
                    rank=run.shard,
                    world_size=run.num_shards,
                    step=step,
                    num_bytes=1,
                    node_id=node_id,
                )
                parts.setdefault(node_id, []).append(part)
        self.memory = {node_id: tuple(held) for node_id, held in parts.items()}

    def _leave(self, workers: Sequence[SampledWorker]) -> None:
        """The workers that were interrupted leave; one that is stuck only acknowledges."""
        events: list[Event] = []
        for worker in workers:
            if worker.run is None or self.sample.workers.get(worker.index) is not worker:
                continue
            if worker.node is None or worker.node.is_down:
                continue
            events.append(InterruptAcknowledged(worker.index, worker.run.generation))
            if not worker.is_stuck:
                events.append(self._exit(worker, ExitKind.INTERRUPTED))
        if events:
            self._feed(*events)

    def _yield(self, generation: int, durable: bool) -> None:
        """The group stops at the step boundary on request."""
        is_current = generation == self.state.group.generation and self.state.stage is Stage.SWITCHING
        if not self.time.is_training or not is_current:
            return
        self._catch_up()
        self._stop_training(is_boundary=True)
        self._feed(*(self._exit(worker, ExitKind.YIELDED, durable=durable) for worker in self._group()))

    def _exit(
        self, worker: SampledWorker, kind: ExitKind, *, durable: bool = False, error: ErrorReport | None = None
    ) -> RunReturned:
        run, node, step = worker.run, worker.node, self._count_done()
        assert run is not None and node is not None, "only a worker in run leaves it"
        worker.run = None
        name = CheckpointName(step, self.attempt, run.generation)
        worker_exit = WorkerExit(
            generation=run.generation,
            rank=run.rank,
            kind=kind,
            step=step,
            error=error,
            snapshot_parts=self.memory.get(node.node_id, ()),
            is_durable=durable,
            saved_part=self._make_saved_part(name, run.rank) if durable else None,
            at=self.now,
        )
        return RunReturned(worker.index, worker_exit)

    # Failures

    def _hit(self, failure: Failure) -> None:
        """Apply a failure to the nodes that it hits, if they are in the sample and not missing already."""
        self._catch_up()
        cause = failure.cause
        if cause.takes is Takes.STORAGE:
            self.storage_until = max(self.storage_until, self.now + 3600 * cause.repair_h)
            self.result.failures[cause.name] += 1
            return
        ranks = self.state.group.ranks
        hit = self.sample.choose_hit_nodes(failure, ranks, num_training=self.layout.nodes, total=self.job.total_nodes)
        if not hit:
            return
        self.result.failures[cause.name] += 1
        in_group = any(self.sample.is_training(node, ranks) for node in hit)
        if failure.takes_buddy and cause.takes is not Takes.PROCESS:
            hit += self.sample.find_buddies(hit[0])
        if in_group and self.time.is_training and cause.takes is not Takes.SLOW:
            self.broken_at = self.now
            self._stop_training()
        match cause.takes:
            case Takes.PROCESS:
                self._kill_process(hit[0])
            case Takes.GPU:
                self._break_gpu(hit[0], cause)
            case Takes.HANG:
                self._hang(hit[0], cause)
            case Takes.SLOW:
                self._slow_down(hit[0], cause)
            case _:
                self._lose_nodes(hit, cause)
        self._note_missing()
        self._schedule_tick()

    def _kill_process(self, node: Node) -> None:
        if not node.workers:
            return
        index = min(node.workers)
        is_warm = self.sample.workers[index].is_warm
        self.sample.remove(index)
        lost = WorkerLost(index, IncidentCause.WORKER_DIED, "run call", "its process ended")
        if is_warm:
            self._after(self.costs.death_s, partial(self._feed, lost))

    def _break_gpu(self, node: Node, cause: Cause) -> None:
        """One rank raises an error of its device. Its node is repaired once the job has left it."""
        worker = self.sample.workers.get(min(node.workers, default=-1))
        self._after(3600 * cause.repair_h, partial(self._repair, node, node.node_id), outlives=True)
        node.is_broken = True
        if worker is None or worker.run is None:
            self._after(_SUSPECTED_S, partial(self._avoid, node.node_id), outlives=True)
            return
        error = ErrorReport(
            type="AcceleratorError", message="Xid", traceback="", phase=Phase.FORWARD, error_class=ErrorClass.DEVICE
        )
        exit_ = self._exit(worker, ExitKind.WORKER_FAULT, error=error)
        self._after(self.costs.raised_s, partial(self._feed, exit_))

    def _hang(self, node: Node, cause: Cause) -> None:
        worker = self.sample.workers.get(min(node.workers, default=-1))
        if worker is None or worker.run is None or self.state.stage not in (Stage.RUNNING, Stage.SWITCHING):
            return
        worker.is_stuck = True

    def _slow_down(self, node: Node, cause: Cause) -> None:
        node.slowdown = cause.slowdown
        self._after(3600 * cause.repair_h, partial(self._speed_up, node), outlives=True)
        self._change_speed()

    def _speed_up(self, node: Node) -> None:
        node.slowdown = 1.0
        self._change_speed()

    def _lose_nodes(self, nodes: Sequence[Node], cause: Cause) -> None:
        for node in nodes:
            node.is_down = node.is_broken = True
            self.memory.pop(node.node_id, None)
            self._after(3600 * cause.repair_h, partial(self._repair, node, node.node_id), outlives=True)
        names = [node.node_id for node in nodes]
        self._after(self.costs.silent_node_s, partial(self._fall_silent, names))

    def _fall_silent(self, names: Sequence[str]) -> None:
        self.silent |= dict.fromkeys(names, "no answer")
        self._feed(NodesSilent(dict(self.silent)))

    def _repair(self, node: Node, node_id: str) -> None:
        """Make the node usable again, as a new node. A node that has another id by now stays as it is."""
        if node.node_id != node_id:
            return
        for index in [index for index in node.workers if index in self.sample.workers]:
            self.sample.remove(index)
            self._feed(WorkerLost(index, IncidentCause.NODE_DIED, "raylet", "its node was repaired"))
        self.silent.pop(node_id, None)
        self.avoided.pop(node_id, None)
        node.mark_repaired()
        self._note_missing()
        self._feed(NodesAvoided(tuple(self.avoided.values())))

    def _note_missing(self) -> None:
        num = self.sample.num_missing
        if not self.result.missing or self.result.missing[-1][1] != num:
            self.result.missing.append((self.now, num))


class _TwinTimeouts(Timeouts):
    num_left_out: int = 0
    """Workers of the job that are not in the sample."""

    def later_s(self, num_workers: int) -> float:
        return later_s(num_workers + self.num_left_out)


def find_timeouts(job: TwinJob, sampled: int) -> Timeouts:
    """Return the job's timeouts for a sample of its workers: longer by what the machine adds for those left out."""
    defaults = _TwinTimeouts(num_left_out=max(0, job.gpus - sampled)).with_spec(job.spec.timeouts)
    poll_s = poll_wait_s(job.gpus) - poll_wait_s(sampled)
    connect_s = later_to_form_s(job.gpus) - later_to_form_s(sampled)
    return defaults.model_copy(
        update={
            "silent_s": defaults.silent_s + poll_s,
            "form_s": defaults.form_s + connect_s,
            "absence_s": math.inf,
        }
    )
