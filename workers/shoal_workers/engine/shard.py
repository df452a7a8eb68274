"""ShardEngine: trains one shard of a job in this process, one generation after the other.

    training thread   prepare()   run(g1) ................ ShardExit   run(g2) ...
    control thread                    interrupt(g1)  request_yield(g2)  outbox.poll()

Two threads, no more: the training thread computes and communicates, the control thread only sets the fence, wakes the
training thread and reads the outbox. The engine knows nothing of Ray; actor.py and run.py drive it.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from datetime import timedelta

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import DeviceMesh

from shoal_workers.checkpoint.reader import load
from shoal_workers.contract.messages import Assignment, ExitKind, Formed, Phase, Progress, SaveFailed, ShardExit
from shoal_workers.contract.spec import JobSpec
from shoal_workers.engine.batches import Batches
from shoal_workers.engine.endings import Ending, classify
from shoal_workers.engine.errors import Fenced, StorageFailed
from shoal_workers.engine.extent import total_steps
from shoal_workers.engine.fence import Fence
from shoal_workers.engine.gradients import GradientPass
from shoal_workers.engine.group import Group
from shoal_workers.engine.outbox import Outbox
from shoal_workers.engine.position import PhaseHook, Position
from shoal_workers.engine.saving import Saver
from shoal_workers.engine.sharding import shard_model
from shoal_workers.engine.state import apply_extra, tensors_of
from shoal_workers.engine.stint import Stint
from shoal_workers.engine.task import Dataset, LoadedTask, load_task
from shoal_workers.engine.trainer import Built, Signals, Trainer
from shoal_workers.engine.user_code import UserCode
from shoal_workers.engine.validation import Validation


class ShardEngine:
    """One process's engine. See the module docstring for which thread may call what.

    Args:
        checkpoint_root: URL of the job's checkpoint directory (it already contains the job id).
        on_phase: for tests: called on the training thread at each phase entry, with the number of completed steps.
    """

    def __init__(
        self,
        spec: JobSpec,
        *,
        job_id: str,
        shard_id: str,
        checkpoint_root: str,
        outbox: Outbox,
        on_phase: PhaseHook | None = None,
    ) -> None:
        self._spec = spec
        self._job_id = job_id
        self._shard_id = shard_id
        self._outbox = outbox
        self._device = torch.device("cuda", torch.cuda.current_device()) if spec.worker.gpus else torch.device("cpu")
        # Every process hosts a store from the start, so that any of them can be the next rank 0 at once.
        self._server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        self._saver = Saver(checkpoint_root, outbox)
        self._position = Position(on_phase)
        self._user_code = UserCode(lambda: self._position.phase)
        self._fence = Fence()
        self._lock = threading.Lock()
        self._stint: Stint | None = None
        self._task: LoadedTask | None = None
        self._train_data: Dataset | None = None
        self._validation_data: Dataset | None = None

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
        """Training thread: import the task, let it prepare, open its data. Idempotent.

        Raises:
            TaskFailed: the task's own code raised.
        """
        if self._train_data is not None:
            return
        self._position.enter(Phase.PREPARING)
        with self._user_code:
            self._task = load_task(self._spec)
            self._task.prepare(self._position.note)
            self._validation_data = self._task.build_dataset("validation") if self._spec.validation.samples else None
            self._train_data = self._task.build_dataset("train")
        # What the imports made will never be garbage: without this each collection between generations looks at it all.
        gc.collect()
        gc.freeze()
        self._position.enter(Phase.IDLE)

    def run(self, assignment: Assignment) -> ShardExit:
        """Training thread: live through one generation. Every expected end is a ShardExit, never an exception."""
        stint = self._begin(assignment)
        if stint is None:
            return ShardExit(
                generation=assignment.generation, rank=assignment.rank, kind=ExitKind.STALE, step=self._position.step
            )
        is_clean = False
        try:
            try:
                ending = self._live(assignment, stint.group)
                is_clean = ending.is_clean
                if is_clean:
                    stint.group.part()
            finally:
                stint.group.dissolve(is_clean=is_clean)
            ending = self._settle(assignment, ending)
        finally:
            self._leave(stint)
        return ShardExit(
            generation=assignment.generation,
            rank=assignment.rank,
            kind=ending.kind,
            step=self._position.step,
            error=ending.error,
        )

    def interrupt(self, generation: int) -> bool:
        """Control thread: fence every generation up to this one, and wake the training thread out of it.

        Returns at once; a sweeper goes on waking until the training thread has left `run`. Idempotent.

        Returns:
            Whether the training thread was in such a generation.
        """
        with self._lock:
            self._fence.raise_to(generation)
            stint = self._stint
            if stint is None or stint.generation > generation:
                return False
            stint.wake_until_left()
            return True

    def request_yield(self, generation: int) -> None:
        """Control thread: let every rank stop after the same step, with a durable checkpoint part of it."""
        self._fence.ask_yield(generation)

    def close(self) -> None:
        """Training thread, when no generation runs: stop the checkpoint writer."""
        self._saver.close()

    def _begin(self, assignment: Assignment) -> Stint | None:
        """None if the generation is over before it began."""
        with self._lock:
            assert self._stint is None, "one generation at a time"
            if self._fence.is_fenced(assignment.generation):
                return None
            group = Group(assignment, self._device, lambda: self._check(assignment.generation))
            self._stint = Stint(assignment.generation, group)
            self._position.begin(assignment.generation)
            return self._stint

    def _leave(self, stint: Stint) -> None:
        with self._lock:
            self._stint = None
        stint.leave()
        self._position.enter(Phase.IDLE)

    def _check(self, generation: int) -> None:
        if self._fence.is_fenced(generation):
            raise Fenced(f"generation {generation} is fenced")

    def _live(self, assignment: Assignment, group: Group) -> Ending:
        """Form, build, restore, train. When it returns, nothing on the stack holds the model any more."""
        signals = Signals(
            check=lambda: self._check(assignment.generation),
            is_yield_asked=lambda: self._fence.is_yield_asked(assignment.generation),
        )
        try:
            self.prepare()
            built = self._build(assignment, group, signals)
            trainer = Trainer(self._spec, assignment, built, self._position, self._saver, self._outbox, signals)
            return trainer.train()
        except BaseException as error:
            is_fenced = self._fence.is_fenced(assignment.generation)
            ended = classify(error, self._position.phase, is_fenced=is_fenced, is_formed=group.is_formed)
            if ended is None:
                raise
            return ended

    def _build(self, assignment: Assignment, group: Group, signals: Signals) -> Built:
        task, train_data = self._task, self._train_data
        assert task is not None and train_data is not None
        start = time.perf_counter()
        self._position.enter(Phase.FORMING)
        mesh = group.form()
        formed = time.perf_counter()
        self._position.enter(Phase.BUILDING)
        built = self._build_model(task, train_data, assignment, mesh, signals)
        signals.check()
        restore_start = time.perf_counter()
        if assignment.restore_from is not None:
            self._position.enter(Phase.RESTORING)
            self._position.reach(self._restore(built, assignment.restore_from))
            signals.check()
        if assignment.rank == 0:
            self._outbox.tell(
                Formed(
                    generation=assignment.generation,
                    at=time.time(),
                    start_step=self._position.step,
                    total_steps=built.total_steps,
                    form_s=formed - start,
                    build_s=restore_start - formed,
                    restore_s=time.perf_counter() - restore_start,
                    num_parameters=sum(p.numel() for p in built.model.parameters()),
                )
            )
        return built

    def _build_model(
        self, task: LoadedTask, train_data: Dataset, assignment: Assignment, mesh: DeviceMesh, signals: Signals
    ) -> Built:
        spec, position = self._spec, self._position
        _choose_kernels(deterministic=spec.deterministic)
        with self._user_code:
            model = task.build_model()
            shard_model(model, mesh, spec.precision, task.shard_units(model))
            update = task.build_update(model, spec.optimizer)
            tokens_per_sample = task.tokens_per_sample
        validation = None
        if self._validation_data is not None and len(self._validation_data):
            batches = Batches(task, self._validation_data, self._device)
            validation = Validation(spec, assignment, task, model, batches, position, signals.check)
        batches = Batches(task, train_data, self._device)
        return Built(
            model=model,
            update=update,
            gradients=GradientPass(spec, assignment, task, model, batches, position, signals.check),
            validation=validation,
            device=self._device,
            total_steps=total_steps(
                spec.stop,
                global_size=spec.batch.global_size,
                num_samples=batches.num_samples,
                tokens_per_sample=tokens_per_sample,
            ),
            tokens_per_sample=tokens_per_sample,
        )

    def _restore(self, built: Built, directory: str) -> int:
        """Read the checkpoint into the live tensors; returns its step."""
        with self._user_code:
            built.update.materialise_state()
            tensors = tensors_of(built.model, built.update)
        extra = load(tensors, directory=directory)
        return apply_extra(extra, built.update)

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
        return ending


def _choose_kernels(*, deterministic: bool) -> None:
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic, warn_only=False)
