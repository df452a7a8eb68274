"""A world for the attempt machine: workers, storage and time; the machine's commands make them, a test bends them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kit.worlds.attempt.commanded import Commanded
from kit.worlds.attempt.parts import (
    MEMORY_PORT,
    ROOT,
    FakeWorker,
    error_of,
    name_of,
    part_of,
    step_report,
)
from shoal_service.core.attempt.checkpoints import describe_missing
from shoal_service.core.attempt.messages import (
    CheckpointCommitted,
    CheckpointFound,
    CommitFailed,
    Emit,
    End,
    ProgressReported,
    ReportArrived,
    RunReturned,
    ShowIncident,
    StorageAway,
    WorkerFailedToStart,
    WorkerLost,
    WorkerUnreachable,
    WorkerWarm,
)
from shoal_service.core.attempt.state.parts import Stage
from shoal_service.core.endings import AttemptEnd
from shoal_service.supervisor.reporting.status import make_incident_view
from shoal_service.views import IncidentView
from shoal_workers.contract.job import IncidentCause
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.messages import ErrorReport, ExitKind, Phase, Progress, WorkerExit, WorkerInfo
from shoal_workers.contract.proofs import LayoutProof
from shoal_workers.contract.snapshots import SnapshotPart, SnapshotSource
from shoal_workers.contract.worker_reports import GroupFormed, SaveFailed, WorkerReport


@dataclass
class World(Commanded):
    """The events that a test causes, and the queries for its assertions."""

    def start_all(self) -> None:
        """Every worker that starts becomes warm."""
        for worker in list(self.workers.values()):
            self.start(worker.index)
        self.deliver_all()

    def start(self, index: int) -> None:
        """It becomes warm, if a supervisor that lives has asked for it."""
        worker = self.workers[index]
        if worker.alive and not worker.is_warm and worker.node_id and index not in self.strays:
            worker.is_warm = True
            info = WorkerInfo(
                worker_id=worker.worker_id,
                node_id=worker.node_id,
                node_ip="10.0.0.1",
                pid=4000 + index,
                store_port=5000 + index,
                device="cpu",
                snapshot_port=MEMORY_PORT + index if self.state.target.keeps_snapshots else 0,
                memory_bytes=self.node_memory_bytes,
            )
            self.post(f"warm-{index}", WorkerWarm(index, info))

    def fail_to_start(self, index: int) -> None:
        error = ErrorReport(type="ImportError", message="no torchvision", traceback="...", phase=Phase.PREPARING)
        self.post(f"warm-{index}", WorkerFailedToStart(index, error))

    def answer_storage(self, *, ok: bool = True) -> None:
        self.answer_finds()
        self.answer_commits(ok=ok)

    def answer_finds(self) -> None:
        finds, self.finds = self.finds, []
        for find in finds:
            there = {} if self.is_storage_empty else self.committed
            if missing := describe_missing(find.expected, max(map(name_of, there), default=None)):
                self.post("find", StorageAway(missing, is_missing=True))
                continue
            names = [n for n in there if n not in find.excluding]
            self.post("find", CheckpointFound(max(names, key=name_of, default=None)))

    def answer_commits(self, *, ok: bool = True) -> None:
        commits, self.commits = self.commits, []
        for commit in commits:
            first = commit.parts[0]
            if ok:
                self.committed.setdefault(commit.name, True)
                self.post("commit", CheckpointCommitted(commit.name, first.generation, first.step))
            else:
                self.post("commit", CommitFailed(commit.name, first.generation, "disk full"))

    def damage_newest(self) -> None:
        if self.committed:
            self.committed[max(self.committed, key=name_of)] = False

    def die(self, index: int, cause: IncidentCause = IncidentCause.WORKER_DIED) -> None:
        """Its unacknowledged reports are lost."""
        self.gone(index)
        self.post(f"lost-{index}", WorkerLost(index, cause, "run call", "killed by signal 9"))

    def die_node(self, node_id: str) -> None:
        """The node dies with its memory. A machine that restarts is a new node."""
        self.memory.pop(node_id, None)
        place = node_id.rstrip("'")
        self.deaths[place] = self.deaths.get(place, 0) + 1
        for worker in self.workers.values():
            if worker.node_id == node_id and worker.alive:
                self.die(worker.index, IncidentCause.NODE_DIED)

    def stop(self, index: int, *, unreachable: bool = False) -> None:
        """SIGSTOP: the worker neither acts nor receives. Unreachable: calls to it also fail, and the machine
        receives that."""
        worker = self.workers[index]
        worker.is_stopped = worker.is_stuck = True
        for channel in (f"exit-{index}", f"acknowledged-{index}", f"held-{index}"):
            self.pending.pop(channel, None)
        if unreachable:
            self.post(f"unreachable-{index}", WorkerUnreachable(index))

    def beat(
        self, index: int, *, beat: int, step: int | None = None, phase: Phase = Phase.BACKWARD, stalled_s: float = 0.0
    ) -> None:
        """It answers a poll."""
        worker = self.workers[index]
        if worker.run is not None:
            progress = Progress(
                generation=worker.run.generation,
                phase=phase,
                step=worker.step if step is None else step,
                at=self.now,
                counter=beat,
                stalled_s=stalled_s,
            )
            self.feed(ProgressReported(index, progress))

    def report(self, *compute_s: float) -> None:
        """One step with the given computing seconds of the ranks."""
        group = self.group()
        for worker in group:
            worker.step += 1
        self.states.add((group[0].run.generation, group[0].step))
        self.snapshot()
        report = step_report(group[0].run, group[0].step, self.now)
        self.send(group[0], report.model_copy(update={"compute_s": compute_s}))
        self.deliver_all()

    def _progress(self, worker: FakeWorker) -> Progress:
        assert worker.run is not None
        return Progress(
            generation=worker.run.generation, phase=Phase.FORWARD, step=worker.step, at=self.now, counter=worker.step
        )

    def snapshot(self, without: int | None = None) -> None:
        """Every rank stores its part of this step, and its buddy stores a copy; the last two steps are kept."""
        for worker in self.group() if self.state.target.keeps_snapshots else ():
            run = worker.run
            if run.rank == without:
                continue
            places = [worker.node_id, *([run.buddy.node_id] if run.buddy else [])]
            for node_id in places:
                part = SnapshotPart(
                    generation=run.generation,
                    rank=run.shard,
                    world_size=run.num_shards,
                    step=worker.step,
                    num_bytes=10,
                    node_id=node_id,
                )
                held = self.memory.setdefault(node_id, [])
                own = [entry for entry in held if entry[0] == worker.index]
                self.memory[node_id] = [*(e for e in held if e[0] != worker.index), *own[-1:], (worker.index, part)]

    def group(self) -> list[FakeWorker]:
        """The live ranks that are in `run` of the current generation, ordered by rank."""
        generation = self.state.group.generation
        found = [p for p in self.workers.values() if p.alive and p.run and p.run.generation == generation]
        return sorted(found, key=lambda p: p.run.rank)

    @property
    def is_whole(self) -> bool:
        group = self.group()
        return bool(group) and len(group) == group[0].run.world_size and not any(p.is_stuck or p.fenced for p in group)

    def leave(
        self, worker: FakeWorker, kind: ExitKind, error: ErrorReport | None = None, *, has_output: bool = False
    ) -> None:
        assert worker.run is not None
        worker_exit = WorkerExit(
            generation=worker.run.generation,
            rank=worker.run.rank,
            kind=kind,
            step=0 if self.state.target.is_script else worker.step,
            error=error,
            snapshot_parts=self.held_on(worker.node_id),
            at=self.now,
            has_output=has_output,
            is_durable=kind is ExitKind.FINISHED or (kind is ExitKind.YIELDED and worker.yields is True),
        )
        self.left.add((worker.index, worker.run.generation))
        worker.run = None
        self.post(f"exit-{worker.index}", RunReturned(worker.index, worker_exit))

    def form(self, *, proof: LayoutProof | None = None) -> None:
        """The group passes the rendezvous, restores and reports; or it finds its checkpoint damaged."""
        group = self.group()
        if not self.is_whole:
            return
        source = group[0].run.restore_snapshot
        if source is not None and not self._can_be_read(source):
            for worker in group:
                self.leave(worker, ExitKind.SNAPSHOT_LOST, error_of("SnapshotLost", "a part is gone"))
            return
        url = group[0].run.restore_from if source is None else None
        name = None if url is None else url.rsplit("/", 1)[1]
        if name is not None and not self.committed[name]:
            for worker in group:
                self.leave(worker, ExitKind.DAMAGED_CHECKPOINT, error_of("ChecksumMismatch", "flipped byte"))
            return
        start = source.step if source is not None else 0 if name is None else name_of(name).step
        if self.state.target.is_script:
            self._begin_script(group)
            return
        for worker in group:
            worker.step = start
        self.send(
            group[0],
            GroupFormed(
                generation=group[0].run.generation,
                at=self.now,
                start_step=start,
                total_steps=self.total_steps,
                form_s=0.1,
                build_s=0.2,
                restore_s=0.3,
                num_parameters=10,
                restored_bytes=40,
                data="b2",
                data_before=self.data_before,
                proof=proof,
            ),
        )

    def _begin_script(self, group: list[FakeWorker]) -> None:
        """A process of the script runs on every rank, and goes on from its own checkpoint."""
        for worker in group:
            worker.step = self.script_step
        began = GroupFormed(
            generation=group[0].run.generation,
            at=self.now,
            start_step=None,
            total_steps=None,
            form_s=0.1,
            build_s=0.0,
            restore_s=0.0,
            num_parameters=0,
        )
        self.send(group[0], began)

    def _can_be_read(self, source: SnapshotSource) -> bool:
        servers = [self.workers[endpoint.port - MEMORY_PORT] for endpoint in source.parts]
        there = all(
            server.alive
            and not server.is_stopped
            and any(
                (h.generation, h.rank, h.step) == (source.generation, rank, source.step)
                for h in self.held_on(server.node_id)
            )
            for rank, server in enumerate(servers)
        )
        return there and (source.generation, source.step) not in self.lost_memory

    def train(self, steps: int = 1, *, save_every: int = 4, late: int | None = None) -> None:
        """Train this many steps of a formed group. It stops at a requested yield or at the end, with a part of that
        step. The rank `late` has not taken its snapshots yet."""
        for _ in range(steps):
            group = self.group()
            if not self.is_whole:
                return
            if group[0].step < self.total_steps:
                for worker in group:
                    worker.step += 1
                self.num_steps += 1
                self.states.add((group[0].run.generation, group[0].step))
                self.snapshot(without=late)
                run = group[0].run
                report = step_report(run, group[0].step, self.now, self.step_s.get(run.layout.shard, 0.5))
                if self.reports_steps:
                    self.send(group[0], report)
                if self.state.target.keeps_snapshots:
                    for worker in group:
                        self.post(f"reports-{worker.index}", ProgressReported(worker.index, self._progress(worker)))
            step = group[0].step
            kind = ExitKind.FINISHED if step == self.total_steps else ExitKind.YIELDED
            leaves = step == self.total_steps or any(p.yields is not None for p in group)
            if step == self.total_steps or any(p.yields for p in group) or step % save_every == 0:
                self.save()
            if leaves:
                for worker in group:
                    self.leave(worker, kind)

    def save(self) -> None:
        if self.state.target.is_script:
            self.script_step = self.group()[0].step
            return
        for worker in self.group():
            self.send(worker, part_of(worker.run, worker.step))

    def kill_script(self, worker: FakeWorker) -> None:
        """The process of the script on this rank is killed, and the worker lives on."""
        self.leave(worker, ExitKind.SCRIPT_DIED)

    def fail_save(self, worker: FakeWorker) -> None:
        run = worker.run
        directory = f"{ROOT}/{CheckpointName(worker.step, run.attempt, run.generation)}"
        self.send(
            worker,
            SaveFailed(
                generation=run.generation, step=worker.step, rank=run.rank, directory=directory, error="disk full"
            ),
        )

    def obey_interrupts(self) -> None:
        for worker in self.group():
            if worker.fenced and not worker.is_stuck:
                self.leave(worker, ExitKind.INTERRUPTED)

    def break_collectives(self) -> None:
        """A rank that notices a missing peer leaves and reports the peer."""
        for worker in self.group():
            if not worker.is_stuck:
                self.leave(worker, ExitKind.COLLECTIVE_FAILED, error_of("DistError", "connection reset by peer"))

    def send(self, worker: FakeWorker, item: WorkerReport) -> None:
        self.post(f"reports-{worker.index}", ReportArrived(worker.index, item))

    def cooperate(self) -> None:
        """One round: every worker executes its requests, and time passes."""
        for worker in list(self.workers.values()):
            self.start(worker.index)
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

    @property
    def end(self) -> AttemptEnd | None:
        ends = [c.end for c in self.commands if isinstance(c, End)]
        assert len(ends) <= 1
        return ends[0] if ends else None

    @property
    def world_size(self) -> int:
        return len(self.state.group.workers)

    def events(self, type_: str) -> list[dict[str, Any]]:
        emitted = [c.event for c in self.commands if isinstance(c, Emit)]
        return [event.data() for event in emitted if event.type == type_]

    def incidents(self) -> list[IncidentView]:
        """The last that was shown of each."""
        return list(
            {
                c.incident.id: make_incident_view(c.incident, closed_at=c.closed_at)
                for c in self.commands
                if isinstance(c, ShowIncident)
            }.values()
        )

    def count(self, kind: type) -> int:
        return sum(isinstance(c, kind) for c in self.commands)

    def open(self, *, then: int | None = None) -> World:
        """Bring the attempt to STARTING, or to RUNNING with `then` completed steps."""
        self.finish_storage()
        if self.state.target.is_script:
            self.pass_time(0)  # no search for a checkpoint is answered
        if then is not None:
            self.start_all()
            self.join()
            assert self.state.stage is Stage.RUNNING
            self.run(then)
        return self

    def run(self, steps: int) -> None:
        """Train, and store what is saved."""
        for _ in range(steps):
            self.advance()
            self.finish_storage()

    def advance(self) -> None:
        """Train one step; what is saved is not committed yet."""
        self.train(1)
        self.deliver_all()

    def finish_storage(self, *, ok: bool = True) -> None:
        """The storage answers all that it was asked."""
        self.answer_storage(ok=ok)
        self.deliver_all()

    def join(self, *, proof: LayoutProof | None = None) -> None:
        """The group forms, and reports it."""
        self.form(proof=proof)
        self.deliver_all()

    def quiesce(self) -> None:
        """Survivors are woken, and leave the lost group."""
        self.deliver_all()
        self.obey_interrupts()
        self.deliver_all()

    def recover(self) -> None:
        """Survivors are woken, and the next group forms."""
        self.quiesce()
        self.join()

    def lose(self, index: int, cause: IncidentCause = IncidentCause.WORKER_DIED) -> None:
        """A worker dies, and the others go on without it."""
        self.die(index, cause)
        self.recover()

    def until(self, *stages: Stage, rounds: int = 80) -> None:
        """Cooperate until one of the stages is reached."""
        for _ in range(rounds):
            if self.state.stage in stages:
                return
            self.cooperate()
        raise AssertionError(f"still {self.state.stage} after {rounds} rounds")
