"""Engine: runs one rank of a job in this worker, one generation after the other, and takes it out of a broken group.

    training thread   prepare()   run(g1) ................ WorkerExit   run(g2) ...
    control thread                    interrupt(g1)  request_yield(g2)  outbox.poll()

There are two threads. The training thread computes and communicates. The control thread only sets the fence, wakes the
training thread and reads the outbox. The engine does not import Ray; actor.py and standalone.py call it.

What is run is a program, `TaskProgram` or `LoopProgram`. It enters a generation, runs it to its end, and keeps what the
next generation can use again. The engine calls on the training thread:

    prepare(expected_bytes)                     everything that needs no group; idempotent
    begin(assignment)                           before the group forms: frees what this generation cannot use
    enter(membership, group) -> GroupEntered    the group is formed; the state is as the assignment says
    run()                                       until the generation is FINISHED or YIELDED; every other end is raised
    park()                                      after every end, also if it was never entered; never raises

It classifies whatever is raised there. Any thread may read `shape`: that of the model that was trained last, None if
none was. `sums_gradients` says if the program needs `Group.gradients`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from shoal_workers.contract.messages import Assignment, ExitKind, Phase, Progress, StepPart, WorkerExit
from shoal_workers.contract.model import ModelShape
from shoal_workers.contract.profiles import ProfileRequest
from shoal_workers.contract.spec import JobSpec
from shoal_workers.contract.suspects import Collective, Link, Resource, Suspect
from shoal_workers.contract.worker_reports import GroupFormed
from shoal_workers.engine.generation_ends import Fenced, StorageFailed
from shoal_workers.engine.group.collectives import (
    interruptible_waits,
    replace_functional_all_reduce,
    replace_wait,
    waited_s,
)
from shoal_workers.engine.group.device_clock import device_clock
from shoal_workers.engine.group.fence import Fence
from shoal_workers.engine.group.gloo import replace_constructor
from shoal_workers.engine.group.network_interface import choose_interface
from shoal_workers.engine.group.process_group import GenerationScope, Group
from shoal_workers.engine.group.rendezvous import StoreConnections
from shoal_workers.engine.group.store.server import StoreServer
from shoal_workers.engine.loop.loop_program import LoopProgram
from shoal_workers.engine.loop.run import Run
from shoal_workers.engine.media.current import logging_to
from shoal_workers.engine.media.recorder import Recorder
from shoal_workers.engine.parallel.cutting import replace_detach
from shoal_workers.engine.process.exits import GenerationEnd, classify
from shoal_workers.engine.process.outbox import Outbox
from shoal_workers.engine.process.position import PhaseHook, Position
from shoal_workers.engine.profiling.profiling import Profiling
from shoal_workers.engine.state.saving import Saver
from shoal_workers.engine.step.generation import Membership
from shoal_workers.engine.task.task_collectives import guard_collectives
from shoal_workers.engine.task_program import TaskProgram
from shoal_workers.snapshot_store.store import SnapshotStore

_MEDIA_S = 10.0
"""Seconds that the clean end of a generation waits for logged media to be stored."""


def prepare_process() -> None:
    """Makes what torch does once per process fit for generations: waits that can be left, groups that connect within a
    time limit, collectives that are known. Idempotent; call it before the first group."""
    replace_wait()
    replace_constructor()
    replace_functional_all_reduce()
    replace_detach()
    guard_collectives()


class Engine:
    """The engine of one worker. The module docstring tells which thread may call what.

    Args:
        checkpoint_root: URL of the job's checkpoint directory (it already contains the job id).
        store: this worker's rendezvous store, used by the generations of which it is rank 0; `close` closes it.
        snapshot_store: keeps snapshots in memory; None: an unexpected death costs the steps since the last checkpoint.
        node_directory: of this attempt on this node; its workers prepare one after the other. None: they do not wait.
        may_change_data: the job's own checkpoints may have been made with other data.
        loop: what `spec.loop` would give to `shoal.run`, if this process has it already.
        is_trial: the loop is not proven: this is a part of the proof.
        by_axis: see `Group`.
        on_phase: for tests: called on the training thread at each phase entry, with the number of completed steps.
    """

    def __init__(
        self,
        spec: JobSpec,
        *,
        checkpoint_root: str,
        outbox: Outbox,
        store: StoreServer,
        snapshot_store: SnapshotStore | None = None,
        on_phase: PhaseHook | None = None,
        node_directory: Path | None = None,
        may_change_data: bool = False,
        loop: Callable[[Run], None] | None = None,
        is_trial: bool = False,
        by_axis: bool | None = None,
    ) -> None:
        self._outbox = outbox
        self._by_axis = by_axis
        self._snapshot_store = snapshot_store
        self._device = torch.device("cuda", torch.cuda.current_device()) if spec.worker.gpus else torch.device("cpu")
        self._store = store
        self._store_connections = StoreConnections(store.key)
        prepare_process()
        self._position = Position(on_phase, waited_s)
        self._saver = Saver(checkpoint_root, outbox, stall_s=spec.timeouts.save_s, note=self._position.note)
        self._profiling = Profiling(checkpoint_root, outbox, self._position, has_gpu=self._device.type == "cuda")
        self._recorder = Recorder(checkpoint_root, spec.media, say=outbox.log_text)
        self._fence = Fence()
        self._lock = threading.Lock()
        self._scope: GenerationScope | None = None
        self._program: TaskProgram | LoopProgram
        if spec.loop is not None:
            self._program = LoopProgram(
                spec,
                function=loop,
                position=self._position,
                saver=self._saver,
                snapshot_store=snapshot_store,
                host=store.host,
                recorder=self._recorder,
                outbox=outbox,
                make_engine=None if is_trial else Engine,
            )
        else:
            self._program = TaskProgram(
                spec,
                device=self._device,
                position=self._position,
                outbox=outbox,
                saver=self._saver,
                profiling=self._profiling,
                snapshot_store=snapshot_store,
                host=store.host,
                recorder=self._recorder,
                node_directory=node_directory,
                may_change_data=may_change_data,
            )
        self._is_prepared = False

    @property
    def store_port(self) -> int:
        """Port of this worker's own rendezvous store."""
        return self._store.port

    @property
    def device(self) -> str:
        """ "cpu" or "cuda"."""
        return self._device.type

    @property
    def progress(self) -> Progress:
        """Called from any thread."""
        return self._position.progress()

    def part_seconds(self) -> Mapping[StepPart, float]:
        """Called from any thread: what the training thread has spent its time on since this process began."""
        return self._position.part_seconds()

    def sample_links(self) -> None:
        """Called from any thread every few seconds: notes what `signs` compares the links with."""
        scope = self._scope
        if scope is not None:
            scope.group.sample_links()

    def signs(self) -> tuple[Collective | None, tuple[Link, ...]]:
        """Returns, on any thread, the newest collective of the training thread, and the links to the other nodes."""
        scope = self._scope
        return (scope.group.collectives.newest, scope.group.links()) if scope is not None else (None, ())

    def prepare(self, expected_bytes: int = 0) -> None:
        """Training thread: import the task, let it prepare, open its data, form a first group of one. Idempotent.

        Args:
            expected_bytes: memory that training on a CPU is predicted to take; touched from here until the first `run`.

        Raises:
            TaskFailed: the task's own code raised.
            PackagesNotInstalled: what `code.pip` names cannot be installed.
        """
        if self._is_prepared:
            return
        choose_interface(self._store.host, self._store.port)  # else gloo asks a name server for this host's address
        self._program.prepare(expected_bytes)
        self._is_prepared = True

    def build_model(self) -> ModelShape:
        """Training thread, when no generation runs: the shape of the task's model, of which nothing is kept.

        Raises:
            TaskFailed: the task's own code raised.
        """
        assert isinstance(self._program, TaskProgram), "only a task says what it would train"
        self.prepare()
        return self._program.build_model()

    @property
    def model_shape(self) -> ModelShape | None:
        """Returns, on any thread, the shape of the model that was trained last; None if none was."""
        return self._program.shape

    def run(self, assignment: Assignment) -> WorkerExit:
        """Training thread: run one generation. Every expected end is a WorkerExit, never an exception."""
        scope = self._enter(assignment)
        if scope is None:
            return self._exit(assignment, GenerationEnd(ExitKind.STALE))
        is_clean = False
        try:
            try:
                # On a GPU a wait only orders streams: there is nothing to leave.
                leave = scope.group.leave_if_lost if self._device.type == "cpu" else None
                with interruptible_waits(leave, scope.group.collectives, device_clock(self._device)):
                    end = self._train(assignment, scope.group)
                end = _with_deviation(end, assignment.rank, scope.group)
                is_clean = end.is_clean
                if is_clean:
                    scope.group.wait_for_others()
            finally:
                scope.group.destroy(is_clean=is_clean)
            end = self._until_durable(assignment, end)
            self._recorder.end(within_s=_MEDIA_S if is_clean else 0.0)
        finally:
            self._leave(scope)
        return self._exit(assignment, end)

    def interrupt(self, generation: int) -> bool:
        """Control thread: fence every generation up to this one, and wake the training thread out of it.

        Returns at once; a sweeper thread keeps waking until the training thread has left `run`. Idempotent.

        Returns:
            Whether the training thread was in such a generation.
        """
        with self._lock:
            # The fence first: a training thread that wakes up and does not find it raised waits again.
            self._fence.raise_to(generation)
            scope = self._scope
            if scope is None or scope.generation > generation:
                return False
            scope.interrupt_until_left()
            return True

    def request_yield(self, generation: int, *, durable: bool = True) -> None:
        """Control thread: let every rank stop after the same step, with a durable part or only a snapshot."""
        self._fence.request_yield(generation, durable=durable or self._snapshot_store is None)

    def request_profile(self, generation: int, request: ProfileRequest) -> None:
        """Control thread: profile this rank from its next step boundary; the outbox gets the result. Idempotent."""
        self._profiling.request(generation, request)

    def note_commit(self, generation: int, step: int, error: str = "") -> None:
        """Control thread: the checkpoint of the last step is committed; `error`: why it could not be. Idempotent."""
        self._saver.note_commit(generation, step, error)

    def close(self) -> None:
        """Training thread, when no generation runs: stop the checkpoint writer and the store, drop the snapshots."""
        self._recorder.close()
        self._saver.close()
        self._store_connections.close()
        self._store.close()
        if self._snapshot_store is not None:
            self._snapshot_store.close()

    def _enter(self, assignment: Assignment) -> GenerationScope | None:
        """Returns None if the generation was fenced before it began."""
        with self._lock:
            # The same lock as in `interrupt`, which therefore either finds the scope, or has raised the fence before.
            assert self._scope is None, "one generation at a time"
            fence = self._fence.of(assignment.generation)
            if fence.is_raised:
                return None
            group = Group(
                assignment,
                self._device,
                self._store_connections,
                check=fence.check,
                on_connecting=lambda: self._position.enter(Phase.CONNECTING),
                has_gradients=self._program.sums_gradients,
                by_axis=self._by_axis,
            )
            self._scope = GenerationScope(assignment.generation, group, self._outbox.log_text)
            self._position.begin(assignment.generation)
            return self._scope

    def _leave(self, scope: GenerationScope) -> None:
        with self._lock:
            self._scope = None
        scope.leave()
        self._position.enter(Phase.IDLE)

    def _train(self, assignment: Assignment, group: Group) -> GenerationEnd:
        """Form, enter, run. When this returns, nothing on the stack refers to a process group any more."""
        try:
            self.prepare()
            self._recorder.begin(
                attempt=assignment.attempt,
                generation=assignment.generation,
                rank=assignment.rank,
                is_fenced=lambda: self._fence.of(assignment.generation).is_raised,
            )
            self._form(assignment, group)
            with logging_to(self._recorder, self._position):
                return self._program.run()
        except BaseException as error:
            is_fenced = self._fence.of(assignment.generation).is_raised
            end = classify(error, self._position.phase, is_fenced=is_fenced, is_formed=group.is_formed)
            if end is None:
                raise
            return end
        finally:
            self._program.park()

    def _form(self, assignment: Assignment, group: Group) -> None:
        """Form the group, and let the program enter the generation: the next thing is a step."""
        start = time.perf_counter()
        self._program.begin(assignment)
        self._position.enter(Phase.FORMING)
        membership = Membership(
            assignment=assignment,
            meshes=group.form(),
            device=self._device,
            position=self._position,
            outbox=self._outbox,
            fence=self._fence.of(assignment.generation),
            collectives=group.collectives,
        )
        form_s = time.perf_counter() - start
        entered = self._program.enter(membership, group)
        if assignment.rank == 0:
            self._outbox.report(
                GroupFormed(
                    generation=assignment.generation,
                    at=time.time(),
                    start_step=self._position.step,
                    form_s=form_s,
                    **dict(entered),
                )
            )

    def _until_durable(self, assignment: Assignment, end: GenerationEnd) -> GenerationEnd:
        """A clean end waits until its checkpoint part is durable and reported. The group is gone by then."""
        if end.pending is None:
            return end
        fence = self._fence.of(assignment.generation)
        try:
            outcome = self._saver.durable_part(end.pending, fence.check)
        except (Fenced, StorageFailed) as error:
            failed = classify(error, Phase.SAVING, is_fenced=fence.is_raised, is_formed=True)
            assert failed is not None
            return failed
        return replace(end, saved_part=outcome)

    def _exit(self, assignment: Assignment, end: GenerationEnd) -> WorkerExit:
        return WorkerExit(
            generation=assignment.generation,
            rank=assignment.rank,
            kind=end.kind,
            step=self._position.step,
            error=end.error,
            snapshot_parts=self._snapshot_store.snapshot_parts() if self._snapshot_store is not None else (),
            is_durable=end.saved_part is not None,
            saved_part=end.saved_part,
            at=time.time(),
            suspect=end.suspect,
        )


def _with_deviation(end: GenerationEnd, rank: int, group: Group) -> GenerationEnd:
    """A broken collective: whether this rank itself has called others than in the step before."""
    deviation = group.collectives.newest.deviation
    if not deviation or end.is_clean or end.suspect is not None:
        return end
    return replace(end, suspect=Suspect(resource=Resource.PROGRAM, ranks=(rank,), evidence=(f"it {deviation}",)))
