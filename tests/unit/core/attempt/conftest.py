"""A world for the attempt machine: processes, storage and time; the machine's commands make them, a test bends them.

    machine --commands--> World --(what comes of them)--> pending events --deliver--> machine

Whatever a process or the storage answers is pending until a test delivers it, so every order can be tried. The world
looks at each command that the machine gives, and fails the test on one that could do harm.

Over 400 lines: one world, whose parts check each other; tests do not import each other, so it cannot be split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from shoal_service.core.attempt import machine
from shoal_service.core.attempt.commands import (
    AskHoldings,
    Command,
    Commit,
    Emit,
    End,
    FindCheckpoint,
    ForgetDamaged,
    Interrupt,
    KillProcess,
    RequestYield,
    Run,
    ShowIncident,
    StartProcess,
    SuspectNode,
)
from shoal_service.core.attempt.events import (
    Beat,
    CheckpointCommitted,
    CheckpointFound,
    CommitFailed,
    Event,
    HoldingsTold,
    InterruptHeard,
    NewsArrived,
    ProcessFailedToStart,
    ProcessLost,
    ProcessUnreachable,
    ProcessWarm,
    RunReturned,
    Tick,
)
from shoal_service.core.attempt.state import Attempt, Stage, Timeouts
from shoal_service.views import AttemptEnd, IncidentView
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.memory import Endpoint, Holding, MemorySource
from shoal_workers.contract.messages import (
    Assignment,
    ErrorReport,
    ExitKind,
    Formed,
    Phase,
    Progress,
    SavedPart,
    SaveFailed,
    ShardExit,
    ShardInfo,
    ShardNews,
    StepReport,
)
from shoal_workers.contract.spec import ElasticitySpec, JobSpec

ROOT = "/checkpoints/j1"
TOTAL_STEPS = 12
TICK_S = 0.25
MEMORY_PORT = 7000
TIMEOUTS = Timeouts(quiesce_s=5.0, form_s=20.0, start_s=60.0, gather_s=3.0, settle_s=3.0, commit_s=20.0, switch_s=40.0)


@dataclass
class FakeProcess:
    """One shard process. It does what a shard does, when the test says so."""

    index: int
    shard_id: str
    alive: bool = True
    is_warm: bool = False
    is_stuck: bool = False
    """Its training thread cannot be woken."""
    is_stopped: bool = False
    """SIGSTOP, or cut off: it does not even hear what it is told."""
    node_id: str = ""
    run: Assignment | None = None
    step: int = 0
    yields: bool | None = None
    """Asked to stop at the next step boundary; True: with a durable checkpoint."""
    fenced: bool = False


@dataclass
class World:
    """See the module docstring. `state` is the machine's."""

    state: Attempt
    now: float = 1000.0
    total_steps: int = TOTAL_STEPS
    processes: dict[int, FakeProcess] = field(default_factory=dict)
    committed: dict[str, bool] = field(default_factory=dict)
    """Checkpoints in storage: False: damaged."""
    commits: list[Commit] = field(default_factory=list)
    """Asked for, not answered."""
    finds: list[FindCheckpoint] = field(default_factory=list)
    pending: dict[str, list[Event]] = field(default_factory=dict)
    """By channel; what one channel carries arrives in order."""
    history: list[Event] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    known: set[str] = field(default_factory=set)
    """Committed checkpoints that the machine was told of, and that were not called damaged since."""
    told_gone: set[int] = field(default_factory=set)
    """Processes that the machine killed, or was told of as lost."""
    num_steps: int = 0
    states: set[tuple[int, int]] = field(default_factory=set)
    """(generation, step) that a group has reached."""
    num_nodes: int | None = None
    """Processes are spread over so many; None: each has one of its own."""
    deaths: dict[str, int] = field(default_factory=dict)
    """Of nodes."""
    memory: dict[str, list[tuple[int, Holding]]] = field(default_factory=dict)
    """By node, with the process whose snapshots they are; newest last."""
    lost_memory: set[tuple[int, int]] = field(default_factory=set)
    """(generation, step) of snapshots that can no longer be read, although they are told of."""

    # --- what the machine is told, and what it says -----------------------------------------------------------------

    def feed(self, event: Event) -> tuple[Command, ...]:
        before, copy = self.state, _copy_of(self.state)
        after, commands = machine.step(before, event, self.now)
        if commands or not isinstance(event, Tick):
            assert before == copy, "the input was mutated"
            assert machine.step(before, event, self.now) == (after, commands), "not a function of its input"
        if after.stage is not before.stage or len(self.history) % 8 == 0:
            assert Attempt.model_validate_json(after.model_dump_json()) == after, "the journal would lose something"
        self.state = after
        self.history.append(event)
        self._learn(event)
        self._look_at(before, after)
        if before.stage is Stage.ENDED:
            assert commands == () and after == before
        self.perform(commands)
        return commands

    def perform(self, commands: tuple[Command, ...]) -> None:
        runs = [c for c in commands if isinstance(c, Run)]
        for command in commands:
            match command:
                case FindCheckpoint():
                    self.finds.append(command)
                case StartProcess(index, shard_id, avoid_nodes, only_on):
                    assert index not in self.processes
                    node_id = self._place(index, avoid_nodes, only_on)
                    self.processes[index] = FakeProcess(index, shard_id, node_id=node_id)
                case KillProcess(index, _):
                    assert self._is_believed_alive(index)
                    self.told_gone.add(index)
                    self._gone(index)
                case Run(index, assignment):
                    if command is runs[0]:
                        self._look_at_runs(runs)
                    process = self.processes[index]
                    process.run, process.step, process.yields, process.fenced = assignment, 0, None, False
                case Interrupt(index, generation):
                    if not any(isinstance(c, KillProcess) and c.index == index for c in commands):  # overdue at once
                        self._look_at_call(index, generation)
                    process = self.processes[index]
                    if not process.is_stopped:
                        process.fenced = True
                        self.post(f"heard-{index}", InterruptHeard(index, generation))
                case AskHoldings(index):
                    assert self._is_believed_alive(index)
                    if not self.processes[index].is_stopped:
                        self.post(f"held-{index}", HoldingsTold(index, self.held_on(self.processes[index].node_id)))
                case SuspectNode():
                    pass
                case RequestYield(index, generation, durable):
                    self._look_at_call(index, generation)
                    self.processes[index].yields = durable
                case Commit():
                    assert len({part.rank for part in command.parts}) == command.parts[0].world_size
                    self.commits.append(command)
                case ForgetDamaged(name, _):
                    assert self.committed[name] is False, "a good checkpoint was called damaged"
                    self.known.discard(name)
                case End():
                    alive = [i for i, p in self.processes.items() if p.alive and self._is_believed_alive(i)]
                    assert alive == [], "left running at the end"
                case Emit() | ShowIncident():
                    pass
            self.commands.append(command)
        assert self.state.stage is not Stage.ENDED or isinstance(self.commands[-1], End), "the last word is the end"

    def _learn(self, event: Event) -> None:
        match event:
            case CheckpointFound(name) if name is not None:
                self.known.add(name)
            case CheckpointCommitted(name):
                if self.committed.get(name, True) or name not in self.state.damaged:
                    self.known.add(name)
            case ProcessLost(index):
                self.told_gone.add(index)

    def _look_at(self, before: Attempt, after: Attempt) -> None:
        assert after.generation in (before.generation, before.generation + 1)
        if before.newest is not None and before.newest not in after.damaged:
            assert after.newest is not None and _name(after.newest) >= _name(before.newest)
        assert after.stage is not Stage.ENDED or after.processes == ()

    def _look_at_runs(self, runs: list[Run]) -> None:
        state = self.state
        assert len(runs) <= state.granted
        if state.spec.parallelism == "auto":  # else some may idle
            assert state.min_workers <= len(runs)
        assert [c.assignment.rank for c in runs] == list(range(len(runs)))
        assert {c.assignment.generation for c in runs} == {state.generation}
        assert {c.assignment.world_size for c in runs} == {len(runs)}
        assert len({(c.assignment.store_host, c.assignment.store_port, c.assignment.layout) for c in runs}) == 1
        newest = max((_name(name) for name in self.known), default=None)
        expected = None if newest is None else f"{ROOT}/{newest}"
        assert {c.assignment.restore_from for c in runs} == {expected}, "not the newest good checkpoint"
        source = runs[0].assignment.restore_memory
        assert all(c.assignment.restore_memory == source for c in runs)
        if source is not None:
            self._look_at_source(source, newest)
        self._look_for_a_better(source.step if source is not None else newest.step if newest is not None else 0)
        self._look_at_buddies(runs)
        for process in self.processes.values():
            assert not (process.alive and process.run), f"{process} still runs an older generation"
        for command in runs:
            assert self._is_believed_alive(command.index) and self.state.process(command.index).warm

    def _place(self, index: int, avoid_nodes: tuple[str, ...], only_on: str) -> str:
        """The node on which it comes up; empty: there is none, and it never does."""
        if only_on:
            place = only_on.rstrip("'")
            return only_on if only_on == place + "'" * self.deaths.get(place, 0) else ""
        if self.num_nodes is None:
            return f"n{index}"
        places = [f"n{(index + turn) % self.num_nodes}" for turn in range(self.num_nodes)]
        places = [place + "'" * self.deaths.get(place, 0) for place in places]
        return next((place for place in places if place not in avoid_nodes), "")

    def _look_at_source(self, source: MemorySource, newest: CheckpointName | None) -> None:
        assert newest is None or source.step >= newest.step, "what is durable is newer"
        assert len(source.parts) == source.world_size
        assert (source.generation, source.step) in self.states, "no group was ever there"
        for rank, endpoint in enumerate(source.parts):
            server = self.processes[endpoint.port - MEMORY_PORT]
            assert self._is_believed_alive(server.index) and server.is_warm and server.node_id == endpoint.node_id
            if not any(p.alive and p.node_id == endpoint.node_id for p in self.processes.values()):
                continue  # the node has died with its memory, and nobody has heard of it yet
            held = [(h.generation, h.rank, h.step) for h in self.held_on(endpoint.node_id)]
            assert (source.generation, rank, source.step) in held, "it was never told to lie there"

    def _look_for_a_better(self, step: int) -> None:
        """What the last group that trained left whole in the memory of nodes that answer is used, if everybody had the
        chance to tell of it."""
        state = self.state
        servers = [self.processes[p.index] for p in state.usable if p.info.memory_port]
        if any(p.is_stopped for p in servers) or any(name.startswith("held") for name in self.pending):
            return
        found: dict[tuple[int, int, int], set[int]] = {}
        for node_id in {p.node_id for p in servers}:
            for held in self.held_on(node_id):
                found.setdefault((held.step, held.generation, held.world_size), set()).add(held.rank)
        for (better, generation, world_size), ranks in found.items():
            usable = generation >= state.oldest_snapshot and (generation, better) not in state.unreadable
            usable = usable and generation == max(generation for generation, _ in self.states)
            assert better <= step or not usable or len(ranks) < world_size, f"step {better} is whole in memory"

    def _look_at_buddies(self, runs: list[Run]) -> None:
        nodes = {c.assignment.rank: self.processes[c.index].node_id for c in runs}
        copies: dict[Endpoint, int] = {}
        for command in runs:
            buddy = command.assignment.buddy
            expected = len(set(nodes.values())) > 1 and self.state.keeps_snapshots
            assert (buddy is not None) == expected
            if buddy is not None:
                assert buddy.node_id != nodes[command.assignment.rank] and buddy.node_id in nodes.values()
                copies[buddy] = copies.get(buddy, 0) + 1

    def _look_at_call(self, index: int, generation: int) -> None:
        assert self._is_believed_alive(index), "a call to a process that is known to be gone"
        assert generation == self.state.generation
        returned = [e for e in self.history if isinstance(e, RunReturned) and e.index == index]
        assert all(e.exit.generation != generation for e in returned), "it has left this generation"

    def _is_believed_alive(self, index: int) -> bool:
        return index in self.processes and index not in self.told_gone

    # --- what happens in the world ----------------------------------------------------------------------------------

    def post(self, channel: str, event: Event) -> None:
        self.pending.setdefault(channel, []).append(event)

    def deliver(self, channel: str) -> None:
        event = self.pending[channel].pop(0)
        if not self.pending[channel]:
            del self.pending[channel]
        self.feed(event)

    def deliver_all(self) -> None:
        while self.pending:
            self.deliver(min(self.pending))

    def pass_time(self, seconds: float) -> None:
        """With ticks as the executor gives them."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + TICK_S)
            self.feed(Tick())
        if seconds == 0:
            self.feed(Tick())

    def start_all(self) -> None:
        """Every process that starts becomes warm."""
        for process in list(self.processes.values()):
            self.start(process.index)
        self.deliver_all()

    def start(self, index: int) -> None:
        process = self.processes[index]
        if process.alive and not process.is_warm and process.node_id:
            process.is_warm = True
            info = ShardInfo(
                shard_id=process.shard_id, node_id=process.node_id, node_ip="10.0.0.1", pid=4000 + index,
                store_port=5000 + index, device="cpu",
                memory_port=MEMORY_PORT + index if self.state.keeps_snapshots else 0,
            )  # fmt: skip
            self.post(f"warm-{index}", ProcessWarm(index, info))

    def fail_to_start(self, index: int) -> None:
        error = ErrorReport(type="ImportError", message="no torchvision", traceback="...", phase=Phase.PREPARING)
        self.post(f"warm-{index}", ProcessFailedToStart(index, error))

    def answer_storage(self, *, ok: bool = True) -> None:
        self.answer_finds()
        self.answer_commits(ok=ok)

    def answer_finds(self) -> None:
        finds, self.finds = self.finds, []
        for find in finds:
            names = [n for n in self.committed if n not in find.excluding]
            self.post("find", CheckpointFound(max(names, key=_name, default=None)))

    def answer_commits(self, *, ok: bool = True) -> None:
        commits, self.commits = self.commits, []
        for commit in commits:
            first = commit.parts[0]
            if ok:
                self.committed.setdefault(commit.name, True)
                self.post("commit", CheckpointCommitted(commit.name, first.generation, first.step))
            else:
                self.post("commit", CommitFailed(commit.name, first.generation, first.step, "disk full"))

    def damage_newest(self) -> None:
        if self.committed:
            self.committed[max(self.committed, key=_name)] = False

    def die(self, index: int, cause: IncidentCause = IncidentCause.SHARD_DIED) -> None:
        """What it had not told yet is lost with it."""
        self._gone(index)
        self.post(f"lost-{index}", ProcessLost(index, cause, "run call", "killed by signal 9"))

    def _gone(self, index: int) -> None:
        process = self.processes[index]
        process.alive, process.run = False, None
        for channel in [name for name in self.pending if name.rpartition("-")[2] == str(index)]:
            self.pending.pop(channel)

    def die_node(self, node_id: str) -> None:
        """With everything that lies in its memory. A machine that comes back is another node."""
        self.memory.pop(node_id, None)
        place = node_id.rstrip("'")
        self.deaths[place] = self.deaths.get(place, 0) + 1
        for process in self.processes.values():
            if process.node_id == node_id and process.alive:
                self.die(process.index, IncidentCause.NODE_DIED)

    def stop(self, index: int, *, unreachable: bool = False) -> None:
        """SIGSTOP: it does nothing and hears nothing. Unreachable: calls to it fail as well, and that is told."""
        process = self.processes[index]
        process.is_stopped = process.is_stuck = True
        for channel in (f"exit-{index}", f"heard-{index}", f"held-{index}"):
            self.pending.pop(channel, None)
        if unreachable:
            self.post(f"unreachable-{index}", ProcessUnreachable(index, "connection timed out"))

    def held_on(self, node_id: str) -> tuple[Holding, ...]:
        return tuple(holding for _, holding in self.memory.get(node_id, []))

    def beat(
        self, index: int, *, beat: int, step: int | None = None, phase: Phase = Phase.BACKWARD, standing_s: float = 0.0
    ) -> None:
        """It answers a poll."""
        process = self.processes[index]
        if process.run is not None:
            progress = Progress(
                generation=process.run.generation, phase=phase, step=process.step if step is None else step,
                at=self.now, beat=beat, standing_s=standing_s,
            )  # fmt: skip
            self.feed(Beat(index, progress))

    def report(self, *compute_s: float) -> None:
        """A step in which the ranks computed for so long."""
        group = self.group()
        for process in group:
            process.step += 1
        self.states.add((group[0].run.generation, group[0].step))
        self.snapshot()
        report = _step_report(group[0].run, group[0].step, self.now)
        self.tell(group[0], report.model_copy(update={"compute_s": compute_s}))
        self.deliver_all()

    def _progress(self, process: FakeProcess) -> Progress:
        assert process.run is not None
        return Progress(
            generation=process.run.generation, phase=Phase.FORWARD, step=process.step, at=self.now, beat=process.step
        )

    def snapshot(self, without: int | None = None) -> None:
        """Every member keeps its part of this step, and its buddy a copy; of each the last two."""
        for process in self.group() if self.state.keeps_snapshots else ():
            run = process.run
            if run.rank == without:
                continue
            places = [process.node_id, *([run.buddy.node_id] if run.buddy else [])]
            for node_id in places:
                part = Holding(
                    generation=run.generation, rank=run.rank, world_size=run.world_size, step=process.step,
                    num_bytes=10, node_id=node_id,
                )  # fmt: skip
                held = self.memory.setdefault(node_id, [])
                own = [entry for entry in held if entry[0] == process.index]
                self.memory[node_id] = [
                    *(e for e in held if e[0] != process.index), *own[-1:], (process.index, part)
                ]  # fmt: skip

    def group(self) -> list[FakeProcess]:
        """The living members that are in `run` of the current generation, by rank."""
        found = [p for p in self.processes.values() if p.alive and p.run and p.run.generation == self.state.generation]
        return sorted(found, key=lambda p: p.run.rank)

    @property
    def is_whole(self) -> bool:
        group = self.group()
        return bool(group) and len(group) == group[0].run.world_size and not any(p.is_stuck or p.fenced for p in group)

    def leave(self, process: FakeProcess, kind: ExitKind, error: ErrorReport | None = None) -> None:
        assert process.run is not None
        shard_exit = ShardExit(
            generation=process.run.generation, rank=process.run.rank, kind=kind, step=process.step, error=error,
            holdings=self.held_on(process.node_id), at=self.now,
            is_durable=kind is ExitKind.FINISHED or (kind is ExitKind.YIELDED and process.yields is True),
        )  # fmt: skip
        process.run = None
        self.post(f"exit-{process.index}", RunReturned(process.index, shard_exit))

    def form(self) -> None:
        """The group comes together, restores, and says so; or finds its checkpoint damaged."""
        group = self.group()
        if not self.is_whole:
            return
        source = group[0].run.restore_memory
        if source is not None and not self._can_be_read(source):
            for process in group:
                self.leave(process, ExitKind.MEMORY_LOST, _error("MemoryLost", "a part is gone"))
            return
        url = group[0].run.restore_from if source is None else None
        name = None if url is None else url.rsplit("/", 1)[1]
        if name is not None and not self.committed[name]:
            for process in group:
                self.leave(process, ExitKind.DAMAGED_CHECKPOINT, _error("ChecksumMismatch", "flipped byte"))
            return
        start = source.step if source is not None else 0 if name is None else _name(name).step
        for process in group:
            process.step = start
        self.tell(
            group[0],
            Formed(
                generation=group[0].run.generation, at=self.now, start_step=start, total_steps=self.total_steps,
                form_s=0.1, build_s=0.2, restore_s=0.3, num_parameters=10, restored_bytes=40,
            ),
        )  # fmt: skip

    def _can_be_read(self, source: MemorySource) -> bool:
        servers = [self.processes[endpoint.port - MEMORY_PORT] for endpoint in source.parts]
        there = all(
            server.alive and not server.is_stopped
            and any((h.generation, h.rank, h.step) == (source.generation, rank, source.step)
                    for h in self.held_on(server.node_id))
            for rank, server in enumerate(servers)
        )  # fmt: skip
        return there and (source.generation, source.step) not in self.lost_memory

    def train(self, steps: int = 1, *, save_every: int = 4, late: int | None = None) -> None:
        """So many steps of a formed group. It stops where it was asked to, or at the end, with a part of that step.
        The rank `late` has not taken its snapshots yet."""
        for _ in range(steps):
            group = self.group()
            if not self.is_whole:
                return
            if group[0].step < self.total_steps:
                for process in group:
                    process.step += 1
                self.num_steps += 1
                self.states.add((group[0].run.generation, group[0].step))
                self.snapshot(without=late)
                self.tell(group[0], _step_report(group[0].run, group[0].step, self.now))
                if self.state.keeps_snapshots:
                    for process in group:
                        self.post(f"news-{process.index}", Beat(process.index, self._progress(process)))
            step = group[0].step
            kind = ExitKind.FINISHED if step == self.total_steps else ExitKind.YIELDED
            leaves = step == self.total_steps or any(p.yields is not None for p in group)
            if step == self.total_steps or any(p.yields for p in group) or step % save_every == 0:
                self.save()
            if leaves:
                for process in group:
                    self.leave(process, kind)

    def save(self) -> None:
        for process in self.group():
            self.tell(process, part_of(process.run, process.step))

    def fail_save(self, process: FakeProcess) -> None:
        run = process.run
        directory = f"{ROOT}/{CheckpointName(process.step, run.attempt, run.generation)}"
        self.tell(
            process,
            SaveFailed(
                generation=run.generation, step=process.step, rank=run.rank, directory=directory, error="disk full"
            ),
        )

    def obey_interrupts(self) -> None:
        for process in self.group():
            if process.fenced and not process.is_stuck:
                self.leave(process, ExitKind.INTERRUPTED)

    def break_collectives(self) -> None:
        """Whoever notices that a member is missing leaves with a report about somebody else."""
        for process in self.group():
            if not process.is_stuck:
                self.leave(process, ExitKind.COLLECTIVE_FAILED, _error("DistError", "connection reset by peer"))

    def tell(self, process: FakeProcess, item: ShardNews) -> None:
        self.post(f"news-{process.index}", NewsArrived(process.index, item))

    def cooperate(self) -> None:
        """One round in which everybody does what is asked of them, and time passes."""
        for process in list(self.processes.values()):
            self.start(process.index)
        self.answer_storage()
        self.obey_interrupts()
        if self.state.stage is Stage.FORMING:
            self.form()
        self.deliver_all()
        if self.state.stage is Stage.SWITCHING:
            self.train(1)
        self.deliver_all()
        self.answer_storage()
        self.deliver_all()
        self.pass_time(2.0)

    # --- what tests ask for -----------------------------------------------------------------------------------------

    @property
    def end(self) -> AttemptEnd | None:
        ends = [c.end for c in self.commands if isinstance(c, End)]
        assert len(ends) <= 1
        return ends[0] if ends else None

    @property
    def world_size(self) -> int:
        return len(self.state.members)

    def events(self, type_: str) -> list[dict[str, Any]]:
        return [c.data for c in self.commands if isinstance(c, Emit) and c.type == type_]

    def incidents(self) -> list[IncidentView]:
        """The last that was shown of each."""
        return list({c.incident.id: c.incident for c in self.commands if isinstance(c, ShowIncident)}.values())

    def count(self, kind: type) -> int:
        return sum(isinstance(c, kind) for c in self.commands)

    def open(self, *, then: int | None = None) -> World:
        """To STARTING, or to RUNNING after `then` steps."""
        self.answer_storage()
        self.deliver_all()
        if then is not None:
            self.start_all()
            self.form()
            self.deliver_all()
            assert self.state.stage is Stage.RUNNING
            self.run(then)
        return self

    def run(self, steps: int) -> None:
        """Train, and store what is saved."""
        for _ in range(steps):
            self.train(1)
            self.deliver_all()
            self.answer_storage()
            self.deliver_all()

    def recover(self) -> None:
        """Survivors are woken, and the next group forms."""
        self.deliver_all()
        self.obey_interrupts()
        self.deliver_all()
        self.form()
        self.deliver_all()

    def until(self, *stages: Stage, rounds: int = 80) -> None:
        """Cooperate until one of the stages is reached."""
        for _ in range(rounds):
            if self.state.stage in stages:
                return
            self.cooperate()
        raise AssertionError(f"still {self.state.stage} after {rounds} rounds")


NewWorld = Callable[..., World]


@pytest.fixture
def new_world() -> NewWorld:
    """new_world(workers=3, min_workers=1, standby=0, memory=False, nodes=None, **spec): an attempt that has just been
    opened; with `memory`, its processes keep snapshots."""
    return make_world


def make_world(
    workers: int = 3,
    *,
    min_workers: int = 1,
    standby: int = 0,
    wait_s: float = 30.0,
    memory: bool = False,
    nodes: int | None = None,
    **spec: Any,
) -> World:
    elasticity = ElasticitySpec(min_workers=min_workers, max_workers=8, standby=standby, wait_s=wait_s)
    document = {"stop": {"steps": TOTAL_STEPS}, "batch": {"global_size": 8, "micro_size": 1}, **spec}
    document.setdefault("health", {"hang_floor_s": 3600.0})  # tests of other things may let time pass
    document["snapshot"] = {"enabled": memory}
    world = World(
        Attempt(
            job_id="j1",
            attempt=1,
            spec=JobSpec.model_validate(document).model_copy(update={"elasticity": elasticity}),
            checkpoint_root=ROOT,
            granted=workers,
            timeouts=TIMEOUTS,
            since=1000.0,
        ),
        num_nodes=nodes,
    )
    world.perform(machine.open_attempt())
    return world


def part_of(run: Assignment, step: int) -> SavedPart:
    return SavedPart(
        generation=run.generation, step=step, rank=run.rank, world_size=run.world_size,
        directory=f"{ROOT}/{CheckpointName(step, run.attempt, run.generation)}", files=(), stall_s=0.1, write_s=0.2,
    )  # fmt: skip


def _copy_of(state: Attempt) -> Attempt:
    """Shares only what cannot be changed."""
    parts = {name: dict(by_rank) for name, by_rank in state.parts.items()}
    dicts = {name: dict(getattr(state, name)) for name in ("exits", "told", "asked", "beats")}
    return state.model_copy(update={**dicts, "parts": parts})


def _step_report(run: Assignment, step: int, at: float) -> StepReport:
    return StepReport(
        generation=run.generation, step=step, at=at, loss=3.0, grad_norm=1.0, lr=1e-3, tokens=8, step_s=0.5,
        world_size=run.world_size,
    )  # fmt: skip


def _error(type_: str, message: str) -> ErrorReport:
    return ErrorReport(type=type_, message=message, traceback="Traceback ...", phase=Phase.FORWARD)


def _name(text: str) -> CheckpointName:
    parsed = CheckpointName.parse(text)
    assert parsed is not None
    return parsed
