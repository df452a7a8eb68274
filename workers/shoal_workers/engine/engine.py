"""Engine: trains one rank of a job in this worker, one generation after the other.

    training thread   prepare()   run(g1) ................ WorkerExit   run(g2) ...
    control thread                    interrupt(g1)  request_yield(g2)  outbox.poll()

There are two threads. The training thread computes and communicates. The control thread only sets the fence, wakes the
training thread and reads the outbox. The engine does not import Ray; actor.py and standalone.py call it.
"""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import replace
from pathlib import Path

import torch

from shoal_workers.contract.messages import Assignment, ExitKind, Phase, Progress, WorkerExit
from shoal_workers.contract.model import ModelShape, ParallelPlan
from shoal_workers.contract.profiles import ProfileRequest
from shoal_workers.contract.spec import JobSpec, plan_of, with_settings
from shoal_workers.contract.suspects import Collective, Link, Resource, Suspect
from shoal_workers.contract.worker_reports import GroupFormed
from shoal_workers.engine.generation_ends import Fenced, StorageFailed
from shoal_workers.engine.group.collectives import interruptible_waits, replace_functional_all_reduce, replace_wait
from shoal_workers.engine.group.fence import Fence
from shoal_workers.engine.group.gloo import replace_constructor
from shoal_workers.engine.group.network_interface import choose_interface
from shoal_workers.engine.group.process_group import GenerationScope, Group
from shoal_workers.engine.group.rendezvous import StoreConnections
from shoal_workers.engine.group.store.server import StoreServer
from shoal_workers.engine.model.build import build_runtime, shape_of, warm_up
from shoal_workers.engine.model.fast_build import build_for_restore
from shoal_workers.engine.model.runtime import ModelRuntime
from shoal_workers.engine.parallel.cutting import replace_detach
from shoal_workers.engine.process.exits import GenerationEnd, classify
from shoal_workers.engine.process.outbox import Outbox
from shoal_workers.engine.process.packages import add_packages
from shoal_workers.engine.process.position import PhaseHook, Position
from shoal_workers.engine.process.warm_memory import MemoryToucher, keep_freed_memory
from shoal_workers.engine.profiling.profiling import Profiling
from shoal_workers.engine.proof.before_training import proof_of
from shoal_workers.engine.state.restore import is_restoring, when_all_have_restored
from shoal_workers.engine.state.saving import Saver
from shoal_workers.engine.step.generation import Generation
from shoal_workers.engine.task.data_identity import RankData, parts_of, refused_change
from shoal_workers.engine.task.task import LoadedTask, load_task
from shoal_workers.engine.task.task_collectives import guard_collectives
from shoal_workers.engine.task.user_code import Remarks, UserCode
from shoal_workers.engine.trainer import Trainer
from shoal_workers.node_lock import prepare_once
from shoal_workers.snapshot_store.store import SnapshotStore


class Engine:
    """The engine of one worker. The module docstring tells which thread may call what.

    Args:
        checkpoint_root: URL of the job's checkpoint directory (it already contains the job id).
        store: this worker's rendezvous store, used by the generations of which it is rank 0; `close` closes it.
        snapshot_store: keeps snapshots in memory; None: an unexpected death costs the steps since the last checkpoint.
        node_directory: of this attempt on this node; its workers prepare one after the other. None: they do not wait.
        may_change_data: the job's own checkpoints may have been made with other data.
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
    ) -> None:
        self._spec = spec
        self._outbox = outbox
        self._snapshot_store = snapshot_store
        self._node_directory = node_directory
        self._may_change_data = may_change_data
        self._device = torch.device("cuda", torch.cuda.current_device()) if spec.worker.gpus else torch.device("cpu")
        self._store = store
        self._store_connections = StoreConnections(store.key)
        replace_wait()
        replace_constructor()
        replace_functional_all_reduce()
        replace_detach()
        guard_collectives()
        self._remarks = Remarks()
        self._position = Position(on_phase)
        self._saver = Saver(checkpoint_root, outbox, stall_s=spec.timeouts.save_s, note=self._position.note)
        self._profiling = Profiling(checkpoint_root, outbox, self._position, has_gpu=self._device.type == "cuda")
        self._fence = Fence()
        self._lock = threading.Lock()
        self._scope: GenerationScope | None = None
        self._task: LoadedTask | None = None
        self._runtime: ModelRuntime | None = None
        self._model_shape: ModelShape | None = None
        self._built_lr = 0.0
        """`optimizer.lr` for which the runtime was built."""
        self._memory_toucher: MemoryToucher | None = None

    @property
    def store_port(self) -> int:
        """Port of this worker's own rendezvous store."""
        return self._store.port

    @property
    def num_store_keys(self) -> int:
        """Keys in this worker's own rendezvous store: those of one generation at most."""
        return self._store.num_keys

    @property
    def device(self) -> str:
        """ "cpu" or "cuda"."""
        return self._device.type

    @property
    def progress(self) -> Progress:
        """Called from any thread."""
        return self._position.progress()

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
        if self._task is not None:
            return
        self._position.enter(Phase.PREPARING)
        keep_freed_memory()
        add_packages(self._spec.code, self._position.note)
        with UserCode(lambda: self._position.phase, remark=self._remarks.add) as user_code:
            task = load_task(self._spec)
            user_code.place = task.line_of
            if self._node_directory is None or not task.has_preparation:
                task.prepare(self._position.note)
            else:
                prepare_once(task.prepare, self._position.note, self._node_directory)
            task.open_data()
        self._task = task
        choose_interface(self._store.host, self._store.port)  # else gloo asks a name server for this host's address
        warm_up(self._device)
        self._memory_toucher = MemoryToucher(expected_bytes if self._device.type == "cpu" else 0)
        # The objects of the imports are never garbage. Without this each collection between generations visits them
        # all.
        gc.collect()
        gc.freeze()
        self._position.enter(Phase.IDLE)

    def build_model(self) -> ModelShape:
        """Training thread, when no generation runs: the shape of the task's model, of which nothing is kept.

        Raises:
            TaskFailed: the task's own code raised.
        """
        self.prepare()
        assert self._task is not None
        self._position.enter(Phase.BUILDING)
        try:
            with UserCode(lambda: self._position.phase, self._task.line_of, self._remarks.add):
                return shape_of(build_for_restore(self._task.build_model))
        finally:
            self._position.enter(Phase.IDLE)

    @property
    def model_shape(self) -> ModelShape | None:
        """Returns, on any thread, the shape of the model that was trained last; None if none was."""
        return self._model_shape

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
                with interruptible_waits(leave, scope.group.collectives):
                    end = self._train(assignment, scope.group)
                end = _with_deviation(end, assignment.rank, scope.group)
                is_clean = end.is_clean
                if is_clean:
                    scope.group.wait_for_others()
            finally:
                scope.group.destroy(is_clean=is_clean)
            end = self._until_durable(assignment, end)
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
            scope.wake_until_left()
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
        """Form, build, restore, train. When this returns, nothing on the stack refers to a process group any more."""
        try:
            self.prepare()
            return self._form(assignment, group).train()
        except BaseException as error:
            is_fenced = self._fence.is_fenced(assignment.generation)
            end = classify(error, self._position.phase, is_fenced=is_fenced, is_formed=group.is_formed)
            if end is None:
                raise
            return end
        finally:
            self._park()

    def _park(self) -> None:
        """Keep the model for the next generation; if it cannot be, the next one builds its own: how this one has ended
        counts more."""
        try:
            if self._runtime is not None:
                self._runtime.park()
        except Exception as error:
            self._runtime = None
            self._outbox.log_text(f"the model is built again, because it could not be kept: {error}")

    def _form(self, assignment: Assignment, group: Group) -> Trainer:
        """Form the group, build or reuse the model, and restore the state: the next thing is a step."""
        assert self._task is not None, "prepare comes first"
        start = time.perf_counter()
        if self._memory_toucher is not None:
            self._memory_toucher.stop()
        spec = self._spec if assignment.settings is None else with_settings(self._spec, assignment.settings)
        runtime = self._take_reusable_runtime(assignment, spec)
        self._position.enter(Phase.FORMING)
        meshes = group.form()
        formed = time.perf_counter()
        self._position.enter(Phase.BUILDING)
        generation = Generation(
            spec=spec,
            assignment=assignment,
            task=self._task,
            meshes=meshes,
            device=self._device,
            position=self._position,
            outbox=self._outbox,
            fence=self._fence.of(assignment.generation),
            plan=plan_of(self._spec) or ParallelPlan(),
            collectives=group.collectives,
            remarks=self._remarks,
        )
        proof = proof_of(generation, group)
        if runtime is None or not runtime.revive(meshes):
            runtime = build_runtime(generation)
        self._runtime, self._built_lr, self._model_shape = runtime, spec.optimizer.lr, runtime.shape
        trainer = Trainer(generation, runtime, self._saver, self._snapshot_store, self._profiling)
        generation.check()
        built = time.perf_counter()
        restored = trainer.restore()
        own_data, train_data = RankData(self._task.content_hash, self._store.host), self._task.train_data
        all_restored = when_all_have_restored(group, restored, own_data, lambda: parts_of(train_data))
        runtime.state.keeps_restored = not all_restored.frees_source
        if restored.data_change is not None and restored.is_own and not self._may_change_data:
            raise refused_change(restored.data_change, restored.step)
        if assignment.rank == 0:
            self._outbox.report(
                GroupFormed(
                    generation=assignment.generation,
                    at=time.time(),
                    start_step=self._position.step,
                    total_steps=trainer.total_steps,
                    form_s=formed - start,
                    build_s=built - formed,
                    restore_s=time.perf_counter() - built,
                    num_parameters=runtime.num_parameters,
                    restored_bytes=all_restored.num_bytes,
                    remote_bytes=all_restored.remote_bytes,
                    past=restored.past,
                    data=own_data.content_hash,
                    data_before=restored.data_change.before if restored.data_change is not None else "",
                    proof=proof,
                )
            )
        return trainer

    def _take_reusable_runtime(self, assignment: Assignment, spec: JobSpec) -> ModelRuntime | None:
        """The model of the last generation if it fits this one. Otherwise it is freed before another one is built."""
        runtime, self._runtime = self._runtime, None
        fits = runtime is not None and is_restoring(assignment) and runtime.fits(assignment)
        fits = fits and self._built_lr == spec.optimizer.lr
        return runtime if fits else None

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
