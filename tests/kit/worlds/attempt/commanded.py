"""The machine's side of the world: it is fed events, and its commands are carried out.

    machine --commands--> Commanded --(what comes of them)--> pending events --deliver--> machine

Whatever a worker or the storage answers is pending until a test delivers it, so every order can be tried.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from kit.worlds.attempt.kept_journal import KeptJournal
from kit.worlds.attempt.parts import (
    TICK_S,
    TOTAL_STEPS,
    FakeWorker,
    copy_of,
    directed,
    from_journal,
)
from kit.worlds.attempt.watch import Watch
from shoal_service.core.attempt import machine
from shoal_service.core.attempt.messages import (
    CheckpointCommitted,
    CheckpointFound,
    Command,
    Commit,
    CompareModels,
    Emit,
    End,
    Event,
    FindCheckpoint,
    ForgetDamaged,
    Interrupt,
    InterruptAcknowledged,
    KillWorker,
    ModelsCompared,
    NoteCommit,
    Order,
    Reopened,
    RequestSnapshotParts,
    RequestYield,
    Run,
    ShowIncident,
    SnapshotPartsReported,
    StartWorker,
    SuspectNode,
    Tick,
    WorkerLost,
    unanswered,
)
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.parts import Stage
from shoal_service.planner import plan
from shoal_workers.contract.layout import ShardLevel
from shoal_workers.contract.snapshots import SnapshotPart

REPORTED = (Emit, ShowIncident, SuspectNode, End)
"""Commands that are no orders: they are in the outbox before the journal is written."""


@dataclass
class Commanded:
    """`state` is the machine's."""

    state: Attempt
    now: float = 1000.0
    total_steps: int = TOTAL_STEPS
    step_s: dict[ShardLevel, float] = field(default_factory=dict)
    """Seconds of a step in groups of that level; 0.5 for others."""
    workers: dict[int, FakeWorker] = field(default_factory=dict)
    committed: dict[str, bool] = field(default_factory=dict)
    """Checkpoints in storage: False: damaged."""
    is_storage_empty: bool = False
    """The directory is there without them, as an NFS mount that is missing."""
    commits: list[Commit] = field(default_factory=list)
    """Requests without an answer."""
    finds: list[FindCheckpoint] = field(default_factory=list)
    pending: dict[str, list[Event]] = field(default_factory=dict)
    """Events that were not delivered yet, by channel. Those of one channel arrive in order."""
    history: list[Event] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    known: set[str] = field(default_factory=set)
    """Committed checkpoints that were reported to the machine and not reported as damaged since."""
    known_gone: set[int] = field(default_factory=set)
    """Workers that the machine killed or that were reported to it as lost."""
    issued: list[Order] = field(default_factory=list)
    """Orders without an answer, as the journal keeps them."""
    dies_after: int | None = None
    """The supervisor dies once after this number of orders of the next turn that has more; None: it lives."""
    strays: set[int] = field(default_factory=set)
    """Workers that no journal names, since their supervisor died; the control plane ends them with the attempt."""
    lost_in_turn: set[int] = field(default_factory=set)
    """Workers whose loss was one of several events of this turn."""
    num_steps: int = 0
    left: set[tuple[int, int]] = field(default_factory=set)
    """(worker, generation) that the worker has left."""
    states: set[tuple[int, int]] = field(default_factory=set)
    """(generation, step) that a group has reached."""
    num_nodes: int | None = None
    """Workers are spread over this number of nodes; None: one node per worker."""
    node_memory_bytes: int = 0
    """Memory of each node; 0: its workers do not know it."""
    deaths: dict[str, int] = field(default_factory=dict)
    """How often each node has died."""
    memory: dict[str, list[tuple[int, SnapshotPart]]] = field(default_factory=dict)
    """Node and worker -> its snapshots, newest last."""
    lost_memory: set[tuple[int, int]] = field(default_factory=set)
    data_before: str = ""
    """Content hash of the data of the checkpoint, if groups that form find that they read other data."""
    """(generation, step) of snapshots that are reported but can no longer be read."""

    difference: str = ""
    """Between the models of new code and of the code before."""
    answers_comparisons: bool = True
    script_step: int = 0
    """Step of the script's own newest checkpoint, if the job has a script."""
    reports_steps: bool = True
    """Whether the script reports its steps."""

    def __post_init__(self) -> None:
        self.watch = Watch(self)
        self.journal = KeptJournal()

    def feed(self, *events: Event) -> tuple[Command, ...]:
        """Several events are one turn."""
        before, is_tick = self.state, events == (Tick(),)
        is_sampled = not is_tick and len(self.history) % 4 == 0  # test_every_pair.py compares every event
        copy = copy_of(before) if is_sampled else before
        after, commands = machine.step_all(before, events, self.now, plan)
        if is_sampled or (is_tick and commands):
            assert before == copy, "the input was mutated"
            assert machine.step_all(before, events, self.now, plan) == (after, commands), "not a function of its input"
        if after.stage is not before.stage or len(self.history) % 8 == 0:
            assert self.journal.written(after) == after, "the journal, or the changes since an entry, lose something"
        self.state = after
        self.history += events
        for event in events:
            self._learn(event)
        self.lost_in_turn = {e.index for e in events if isinstance(e, WorkerLost)} if len(events) > 1 else set()
        self.watch.change(before, after)
        if before.stage is Stage.ENDED:
            assert commands == () and after == before
        self.issued = list(unanswered(dict(enumerate(self.issued)), after).values())
        orders = [c for c in commands if not isinstance(c, REPORTED)]
        if self.dies_after is not None and len(orders) > self.dies_after:
            performed, self.dies_after = orders[: self.dies_after], None
            self.issued += [o for o in orders if not isinstance(o, KillWorker) or o not in performed]
            ends = tuple(c for c in commands if isinstance(c, End))  # reported once all is done
            reached = tuple(c for c in commands if c not in ends and (isinstance(c, REPORTED) or c in performed))
            self.perform(reached, runs=[c for c in orders if isinstance(c, Run)])
            self.restart_supervisor()
            self.perform(ends)
        else:
            self.issued += [o for o in orders if not isinstance(o, (KillWorker, ForgetDamaged))]
            self.perform(commands)
        return commands

    def direct(self, **changes: Any) -> tuple[Command, ...]:
        """A directive comes that differs from the last one in these values."""
        return self.feed(directed(self.state.target, **changes))

    def restart_supervisor(self) -> None:
        """The state and the orders come from the journal; the requests to the storage are lost with their answers, and
        repeated. The successor has the next life."""
        assert from_journal(self.state) == self.state
        self.state = replace(from_journal(self.state), life=self.state.life + 1)
        self.finds, self.commits = [], []
        self.pending.pop("find", None)
        self.pending.pop("commit", None)
        ended = {order.index for order in self.issued if isinstance(order, KillWorker)}
        for order in self.issued:
            if not (isinstance(order, Interrupt) and order.index in ended):  # overdue from the start
                self._repeat(order)
        self.issued = [o for o in self.issued if not isinstance(o, (KillWorker, ForgetDamaged))]
        self.feed(Reopened())

    def _repeat(self, order: Order) -> None:
        """Perform an order of the journal like a worker that cannot know whether it is new: nothing is done twice."""
        worker = (
            self.workers.get(order.index) if not isinstance(order, (FindCheckpoint, Commit, ForgetDamaged)) else None
        )
        match order:
            case StartWorker() if worker is not None and worker.index not in self.strays:
                return
            case KillWorker(index, _) if index in self.known_gone:
                return
            case Run(index, assignment) if worker is not None and (
                worker.run == assignment or (index, assignment.generation) in self.left or not worker.alive
            ):
                return  # it answers with the same exit, which is on its way
            case Run(index, assignment):
                assert worker is not None
                worker.run, worker.step, worker.yields, worker.fenced = assignment, 0, None, False
            case Interrupt() | RequestYield() | RequestSnapshotParts() | CompareModels() if (
                worker is None or not worker.alive
            ):
                return
            case Interrupt(index, generation) if not worker.is_stopped:
                worker.fenced = True
                self.post(f"acknowledged-{index}", InterruptAcknowledged(index, generation))
            case RequestYield(_, _, durable):
                worker.yields = durable
            case _:
                self.perform((order,))

    def perform(self, commands: tuple[Command, ...], *, runs: list[Run] | None = None) -> None:
        """`runs`: all of the turn, if `commands` has only some of them."""
        runs = [c for c in commands if isinstance(c, Run)] if runs is None else runs
        for command in commands:
            match command:
                case KillWorker() | Run() | Interrupt() | RequestSnapshotParts() | RequestYield() | CompareModels() if (
                    command.index in self.lost_in_turn
                ):
                    # decided before its loss was handled: only a kill reaches a worker that was believed lost
                    self.known_gone.add(command.index)
                    if isinstance(command, KillWorker):
                        self.gone(command.index)
                case FindCheckpoint():
                    self.finds.append(command)
                case StartWorker(index, worker_id, avoid_nodes, only_on):
                    self.known_gone.discard(index)
                    if index in self.strays and self.workers[index].alive:
                        self.strays.discard(index)  # found by its name
                        self.workers[index].is_warm = False
                        continue
                    assert index not in self.workers or index in self.strays
                    self.strays.discard(index)
                    node_id = self._place(index, avoid_nodes, only_on)
                    self.workers[index] = FakeWorker(index, worker_id, node_id=node_id)
                case KillWorker(index, _):
                    assert self.is_believed_alive(index), (
                        index,
                        self.workers.get(index),
                        index in self.known_gone,
                        self.history[-12:],
                    )
                    self.known_gone.add(index)
                    self.gone(index)
                case Run(index, assignment):
                    if command is runs[0]:
                        self.watch.runs(runs)
                    worker = self.workers[index]
                    worker.run, worker.step, worker.yields, worker.fenced = assignment, 0, None, False
                case Interrupt(index, generation):
                    if not any(
                        isinstance(c, KillWorker) and c.index == index for c in commands
                    ):  # overdue from the start
                        self.watch.call(index, generation)
                    worker = self.workers[index]
                    if not worker.is_stopped:
                        worker.fenced = True
                        self.post(f"acknowledged-{index}", InterruptAcknowledged(index, generation))
                case RequestSnapshotParts(index):
                    assert self.is_believed_alive(index)
                    if self.workers[index].alive and not self.workers[index].is_stopped:
                        self.post(
                            f"held-{index}", SnapshotPartsReported(index, self.held_on(self.workers[index].node_id))
                        )
                case CompareModels(index, trained):
                    assert self.is_believed_alive(index) and self.is_believed_alive(trained)
                    if self.answers_comparisons and not self.workers[index].is_stopped:
                        self.post(f"compared-{index}", ModelsCompared(index, self.difference))
                case SuspectNode() | NoteCommit():
                    pass
                case RequestYield(index, generation, durable):
                    self.watch.call(index, generation)
                    self.workers[index].yields = durable
                case Commit():
                    assert len({part.rank for part in command.parts}) == command.parts[0].world_size
                    self.commits.append(command)
                case ForgetDamaged(name, message):
                    is_distrusted = message.startswith("not trusted")
                    assert is_distrusted or self.committed[name] is False, "a good checkpoint was called damaged"
                    self.known.discard(name)
                case End(end):
                    self.watch.end(end)
                    believed = [i for i in self.workers if self.is_believed_alive(i) and i not in self.strays]
                    alive = [i for i in believed if self.workers[i].alive]
                    assert alive == [], "left running at the end"
                case Emit() | ShowIncident():
                    pass
            self.commands.append(command)
        assert not any(isinstance(c, End) for c in commands) or isinstance(self.commands[-1], End), (
            "the last word is the end"
        )

    def _learn(self, event: Event) -> None:
        match event:
            case CheckpointFound(name) | CheckpointCommitted(name):
                if name is not None and name not in self.state.checkpoints.damaged:
                    self.known.add(name)
            case WorkerLost(index):
                self.known_gone.add(index)

    def _place(self, index: int, avoid_nodes: tuple[str, ...], only_on: str) -> str:
        """The node on which the worker starts; empty: no node has room, and it never starts."""
        if only_on:
            place = only_on.rstrip("'")
            return only_on if only_on == place + "'" * self.deaths.get(place, 0) else ""
        if self.num_nodes is None:
            return f"n{index}"
        places = [f"n{(index + turn) % self.num_nodes}" for turn in range(self.num_nodes)]
        places = [place + "'" * self.deaths.get(place, 0) for place in places]
        return next((place for place in places if place not in avoid_nodes), "")

    def is_believed_alive(self, index: int) -> bool:
        return index in self.workers and index not in self.known_gone

    def post(self, channel: str, event: Event) -> None:
        self.pending.setdefault(channel, []).append(event)

    def deliver(self, channel: str) -> None:
        event = self.pending[channel].pop(0)
        if not self.pending[channel]:
            del self.pending[channel]
        self.feed(event)

    def deliver_together(self, channels: list[str]) -> None:
        """All that is pending in these channels, in one turn."""
        self.feed(*(event for channel in channels for event in self.pending.pop(channel)))

    def deliver_all(self) -> None:
        while self.pending:
            self.deliver(min(self.pending))

    def pass_time(self, seconds: float) -> None:
        """Time passes, with ticks as the executor gives them."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + TICK_S)
            self.feed(Tick())
        if seconds == 0:
            self.feed(Tick())

    def gone(self, index: int) -> None:
        worker = self.workers[index]
        worker.alive, worker.run = False, None
        for channel in [name for name in self.pending if name.rpartition("-")[2] == str(index)]:
            self.pending.pop(channel)

    def held_on(self, node_id: str) -> tuple[SnapshotPart, ...]:
        return tuple(holding for _, holding in self.memory.get(node_id, []))
