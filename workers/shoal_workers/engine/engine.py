"""Engine: trains one shard of a job in this process, one generation after the other.

    training thread   prepare()   run(g1) ................ WorkerExit   run(g2) ...
    control thread                    interrupt(g1)  request_yield(g2)  outbox.poll()

Two threads, no more: the training thread computes and communicates, the control thread only sets the fence, wakes the
training thread and reads the outbox. The engine knows nothing of Ray; actor.py and run.py drive it.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from dataclasses import replace
from datetime import timedelta

import torch
from torch._C._distributed_c10d import TCPStore

from shoal_workers.contract.messages import (
    Assignment,
    ExitKind,
    GroupFormed,
    Phase,
    Progress,
    SaveFailed,
    WorkerExit,
)
from shoal_workers.contract.model.plan import ParallelPlan
from shoal_workers.contract.model.plan_of import plan_of
from shoal_workers.contract.spec import JobSpec
from shoal_workers.engine.errors import Fenced, StorageFailed
from shoal_workers.engine.extent import total_steps
from shoal_workers.engine.group.collective_wait import leaving, replace_wait
from shoal_workers.engine.group.fence import Fence
from shoal_workers.engine.group.functional_collectives import replace_functional_all_reduce
from shoal_workers.engine.group.generation_scope import GenerationScope
from shoal_workers.engine.group.mesh import Meshes
from shoal_workers.engine.group.process_group import Group
from shoal_workers.engine.model.fast_build import build_for_restore
from shoal_workers.engine.model.model_calls import ModelCalls
from shoal_workers.engine.model.reuse import Kept, park, revive
from shoal_workers.engine.model.task import Dataset, LoadedTask, load_task
from shoal_workers.engine.model.user_code import UserCode
from shoal_workers.engine.parallel.assemble import assemble
from shoal_workers.engine.process.exits import Ending, classify
from shoal_workers.engine.process.outbox import Outbox
from shoal_workers.engine.process.position import PhaseHook, Position
from shoal_workers.engine.process.warm_memory import MemoryAtHand, keep_freed_memory
from shoal_workers.engine.process.warm_up import warm_up
from shoal_workers.engine.state.double_buffered_state import DoubleBufferedState
from shoal_workers.engine.state.recent_reports import Recent
from shoal_workers.engine.state.restore import Restored, is_restoring, restore
from shoal_workers.engine.state.saving import Saver
from shoal_workers.engine.state.state_view import StateView
from shoal_workers.engine.step.batches import Batches
from shoal_workers.engine.step.gradients import GradientPass
from shoal_workers.engine.step.loss_scaling import Scaling
from shoal_workers.engine.step.passes import Setting
from shoal_workers.engine.step.validation import Validation
from shoal_workers.engine.trainer import Built, Keepers, Signals, Trainer
from shoal_workers.snapshot_store.store import SnapshotStore


class Engine:
    """One process's engine. See the module docstring for which thread may call what.

    Args:
        checkpoint_root: URL of the job's checkpoint directory (it already contains the job id).
        ram: keeps snapshots in memory; None: an unexpected death costs the steps since the last checkpoint.
        on_phase: for tests: called on the training thread at each phase entry, with the number of completed steps.
    """

    def __init__(
        self,
        spec: JobSpec,
        *,
        job_id: str,
        worker_id: str,
        checkpoint_root: str,
        outbox: Outbox,
        ram: SnapshotStore | None = None,
        expected_bytes: int = 0,
        on_phase: PhaseHook | None = None,
    ) -> None:
        """`expected_bytes`: memory that training will take on a CPU; touched from `prepare` until the first `run`."""
        self._spec = spec
        self._job_id = job_id
        self._worker_id = worker_id
        self._outbox = outbox
        self._ram = ram
        self._device = torch.device("cuda", torch.cuda.current_device()) if spec.worker.gpus else torch.device("cpu")
        # Every process hosts a store from the start, so that any of them can be the next rank 0 at once.
        self._server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        replace_wait()
        replace_functional_all_reduce()
        self._expected_bytes = expected_bytes if self._device.type == "cpu" else 0
        self._saver = Saver(checkpoint_root, outbox)
        self._position = Position(on_phase)
        self._user_code = UserCode(lambda: self._position.phase)
        self._fence = Fence()
        self._lock = threading.Lock()
        self._scope: GenerationScope | None = None
        self._task: LoadedTask | None = None
        self._train_data: Dataset | None = None
        self._validation_data: Dataset | None = None
        self._kept: Kept | None = None
        self._memory: MemoryAtHand | None = None

    @property
    def store_port(self) -> int:
        """Port of this process's own TCPStore."""
        return self._server.port

    @property
    def device(self) -> str:
        """ "cpu" or "cuda"."""
        return self._device.type

    @property
    def progress(self) -> Progress:
        """Any thread."""
        return self._position.progress()

    def prepare(self) -> None:
        """Training thread: import the task, let it prepare, open its data, form a first group of one. Idempotent.

        Raises:
            TaskFailed: the task's own code raised.
        """
        if self._train_data is not None:
            return
        self._position.enter(Phase.PREPARING)
        keep_freed_memory()
        with self._user_code:
            self._task = load_task(self._spec)
            self._task.prepare(self._position.note)
            self._validation_data = self._task.build_dataset("validation") if self._spec.validation.samples else None
            self._train_data = self._task.build_dataset("train")
        warm_up(self._server, self._device)
        self._memory = MemoryAtHand(self._expected_bytes)
        # What the imports made will never be garbage: without this each collection between generations looks at it all.
        gc.collect()
        gc.freeze()
        self._position.enter(Phase.IDLE)

    def run(self, assignment: Assignment) -> WorkerExit:
        """Training thread: live through one generation. Every expected end is a WorkerExit, never an exception."""
        scope = self._begin(assignment)
        if scope is None:
            return self._exit(assignment, Ending(ExitKind.STALE))
        is_clean = False
        try:
            try:
                with leaving(scope.group.leave_if_lost if self._device.type == "cpu" else None):
                    ending = self._live(assignment, scope.group)
                is_clean = ending.is_clean
                if is_clean:
                    scope.group.part()
            finally:
                scope.group.dissolve(is_clean=is_clean)
            ending = self._settle(assignment, ending)
        finally:
            self._leave(scope)
        return self._exit(assignment, ending)

    def interrupt(self, generation: int) -> bool:
        """Control thread: fence every generation up to this one, and wake the training thread out of it.

        Returns at once; a sweeper goes on waking until the training thread has left `run`. Idempotent.

        Returns:
            Whether the training thread was in such a generation.
        """
        with self._lock:
            self._fence.raise_to(generation)
            scope = self._scope
            if scope is None or scope.generation > generation:
                return False
            scope.wake_until_left()
            return True

    def request_yield(self, generation: int, *, durable: bool = True) -> None:
        """Control thread: let every rank stop after the same step, with its snapshot in memory, or a durable part."""
        self._fence.ask_yield(generation, durable=durable or self._ram is None)

    def close(self) -> None:
        """Training thread, when no generation runs: stop the checkpoint writer, drop the snapshots."""
        self._saver.close()
        if self._ram is not None:
            self._ram.close()

    def _begin(self, assignment: Assignment) -> GenerationScope | None:
        """None if the generation is over before it began."""
        with self._lock:
            assert self._scope is None, "one generation at a time"
            if self._fence.is_fenced(assignment.generation):
                return None
            group = Group(assignment, self._device, lambda: self._check(assignment.generation))
            self._scope = GenerationScope(assignment.generation, group, self._outbox.say)
            self._position.begin(assignment.generation)
            return self._scope

    def _leave(self, scope: GenerationScope) -> None:
        with self._lock:
            self._scope = None
        scope.leave()
        self._position.enter(Phase.IDLE)

    def _check(self, generation: int) -> None:
        if self._fence.is_fenced(generation):
            raise Fenced(f"generation {generation} is fenced")

    def _live(self, assignment: Assignment, group: Group) -> Ending:
        """Form, build, restore, train. When it returns, nothing on the stack holds a process group any more."""
        signals = Signals(
            check=lambda: self._check(assignment.generation),
            is_yield_asked=lambda: self._fence.is_yield_asked(assignment.generation),
            is_durable_asked=lambda: self._fence.is_durable_asked(assignment.generation),
        )
        try:
            self.prepare()
            built, restored = self._build(assignment, group, signals)
            scaling = Scaling(self._spec, restored.loss_scale)
            keepers = Keepers(self._saver, self._ram, Recent(restored.past), scaling)
            trainer = Trainer(self._spec, assignment, built, self._position, keepers, self._outbox, signals)
            return trainer.train()
        except BaseException as error:
            is_fenced = self._fence.is_fenced(assignment.generation)
            ended = classify(error, self._position.phase, is_fenced=is_fenced, is_formed=group.is_formed)
            if ended is None:
                raise
            return ended
        finally:
            if self._kept is not None:
                park(self._kept)

    def _build(self, assignment: Assignment, group: Group, signals: Signals) -> tuple[Built, Restored]:
        """The generation, and what it starts from."""
        task, train_data = self._task, self._train_data
        assert task is not None and train_data is not None
        start = time.perf_counter()
        if self._memory is not None:
            self._memory.stop()
        kept = self._fitting(assignment)
        self._position.enter(Phase.FORMING)
        meshes = group.form()
        formed = time.perf_counter()
        self._position.enter(Phase.BUILDING)
        if kept is None or not revive(kept, meshes):
            kept = self._build_model(task, assignment, meshes)
        self._kept = kept
        built = self._assemble(task, train_data, kept, meshes, signals, assignment.generation)
        signals.check()
        restore_start = time.perf_counter()
        restored = Restored(0, 0, 0)
        if is_restoring(assignment):
            self._position.enter(Phase.RESTORING)
            with self._user_code:
                kept.update.materialise_state()
                kept.view.tensors()
            restored = restore(kept.living, kept.update, assignment, self._ram, signals.check)
            self._position.reach(restored.step)
        # Only when all have what they need is the group formed: one may have found a damaged file or a lost memory.
        everyones = [Restored.parse(told) for told in group.gather("restored", str(restored))]
        if assignment.rank == 0:
            self._outbox.tell(
                GroupFormed(
                    generation=assignment.generation,
                    at=time.time(),
                    start_step=self._position.step,
                    total_steps=built.total_steps,
                    form_s=formed - start,
                    build_s=restore_start - formed,
                    restore_s=time.perf_counter() - restore_start,
                    num_parameters=kept.num_parameters,
                    restored_bytes=sum(one.num_bytes for one in everyones),
                    remote_bytes=sum(one.remote_bytes for one in everyones),
                    past=restored.past,
                )
            )
        return built, restored

    def _fitting(self, assignment: Assignment) -> Kept | None:
        """The model of the last generation, if it can go on as it is; else it is let go before another is made."""
        kept, self._kept = self._kept, None
        fits = kept is not None and is_restoring(assignment) and kept.fits(assignment)
        return kept if fits else None

    def _build_model(self, task: LoadedTask, assignment: Assignment, meshes: Meshes) -> Kept:
        spec = self._spec
        _choose_kernels(deterministic=spec.deterministic)
        with self._user_code:
            model = build_for_restore(task.build_model) if is_restoring(assignment) else task.build_model()
            num_parameters = sum(parameter.numel() for parameter in model.parameters())
            calls = ModelCalls(task.loss, model)
            assembly = assemble(model, spec, plan_of(spec), meshes, task.shard_units)
            update = task.build_update(assembly, spec.optimizer)
        view = StateView(assembly, update)
        return Kept(
            rank=assignment.rank,
            assembly=assembly,
            meshes=meshes,
            calls=calls,
            update=update,
            view=view,
            living=DoubleBufferedState(assembly, update, view),
            num_parameters=num_parameters,
        )

    def _assemble(
        self,
        task: LoadedTask,
        train_data: Dataset,
        kept: Kept,
        meshes: Meshes,
        signals: Signals,
        generation: int,
    ) -> Built:
        spec = self._spec
        setting = Setting(
            spec=spec,
            plan=plan_of(spec) or ParallelPlan(),
            task=task,
            assembly=kept.assembly,
            meshes=meshes,
            position=self._position,
            check=signals.check,
        )
        batches = Batches(task, train_data, self._device)
        gradients = GradientPass(setting, batches, kept.calls, self._device)
        validation = None
        if self._validation_data is not None and len(self._validation_data):
            validating = Batches(task, self._validation_data, self._device)
            validation = Validation(setting, gradients.passes, validating, generation)
        with self._user_code:
            tokens_per_sample = task.tokens_per_sample
        return Built(
            assembly=kept.assembly,
            update=kept.update,
            view=kept.view,
            living=kept.living,
            gradients=gradients,
            validation=validation,
            device=self._device,
            total_steps=total_steps(
                spec.stop,
                global_size=spec.batch.global_size,
                num_samples=batches.num_samples,
                tokens_per_sample=tokens_per_sample,
            ),
            tokens_per_sample=tokens_per_sample,
            export=task.export,
        )

    def _settle(self, assignment: Assignment, ending: Ending) -> Ending:
        """A clean end waits until its checkpoint part is durable and told. The group is gone by then."""
        if ending.pending is None:
            return ending
        try:
            outcome = self._saver.outcome(ending.pending, lambda: self._check(assignment.generation))
            if isinstance(outcome, SaveFailed):
                raise StorageFailed(
                    f"the checkpoint of the last step could not be written to {outcome.directory}: {outcome.error}"
                )
        except (Fenced, StorageFailed) as error:
            is_fenced = self._fence.is_fenced(assignment.generation)
            ended = classify(error, Phase.SAVING, is_fenced=is_fenced, is_formed=True)
            assert ended is not None
            return ended
        return replace(ending, is_durable=True)

    def _exit(self, assignment: Assignment, ending: Ending) -> WorkerExit:
        return WorkerExit(
            generation=assignment.generation,
            rank=assignment.rank,
            kind=ending.kind,
            step=self._position.step,
            error=ending.error,
            snapshot_parts=self._ram.snapshot_parts() if self._ram is not None else (),
            is_durable=ending.is_durable,
            at=time.time(),
        )


def _choose_kernels(*, deterministic: bool) -> None:
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic, warn_only=False)
