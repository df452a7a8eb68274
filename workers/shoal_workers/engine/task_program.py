"""The program that trains a task: imports it, builds its model or takes that of the generation before, restores the
state, proves the layout, and hands over to the Trainer. Called by the engine, see engine.py.
"""

from __future__ import annotations

import gc
import os
import time
from functools import partial
from pathlib import Path

import torch

from shoal_workers.contract.data_preview import DATA_FILE
from shoal_workers.contract.messages import Assignment, Phase
from shoal_workers.contract.model import ModelShape, ParallelPlan
from shoal_workers.contract.spec import JobSpec, plan_of
from shoal_workers.contract.training_settings import with_settings
from shoal_workers.contract.worker_reports import GroupEntered
from shoal_workers.engine.group.process_group import Group
from shoal_workers.engine.media.recorder import Recorder
from shoal_workers.engine.model.build import build_runtime, shape_of, warm_up
from shoal_workers.engine.model.fast_build import build_for_restore
from shoal_workers.engine.model.runtime import ModelRuntime
from shoal_workers.engine.model.whole_state import refuse_if_too_large
from shoal_workers.engine.process.exits import GenerationEnd
from shoal_workers.engine.process.outbox import Outbox
from shoal_workers.engine.process.packages import add_packages
from shoal_workers.engine.process.position import Position
from shoal_workers.engine.process.warm_memory import MemoryToucher, keep_freed_memory
from shoal_workers.engine.profiling.profiling import Profiling
from shoal_workers.engine.proof.before_training import proof_of
from shoal_workers.engine.state.restore import is_restoring, when_all_have_restored
from shoal_workers.engine.state.saving import Saver
from shoal_workers.engine.step.batch_readers import BatchReaders
from shoal_workers.engine.step.data_preview import OF_JOB, describe
from shoal_workers.engine.step.generation import Generation, Membership
from shoal_workers.engine.task.data_identity import RankData, parts_of, refused_change
from shoal_workers.engine.task.task import LoadedTask, load_task
from shoal_workers.engine.task.user_code import Remarks, UserCode
from shoal_workers.engine.trainer import Trainer
from shoal_workers.node_lock import prepare_once
from shoal_workers.package_sets import root_of_node
from shoal_workers.snapshot_store.store import SnapshotStore

_COMPILED_CODE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


class TaskProgram:
    """Training thread only, except `shape`.

    Args:
        host: this host's address, which differs between ranks; messages about data name it.
        node_directory: of this attempt on this node; its workers prepare one after the other. None if they do not wait.
        may_change_data: the job's own checkpoints may have been made with other data.
    """

    sums_gradients = False

    def __init__(
        self,
        spec: JobSpec,
        *,
        device: torch.device,
        position: Position,
        outbox: Outbox,
        saver: Saver,
        profiling: Profiling,
        snapshot_store: SnapshotStore | None,
        host: str,
        recorder: Recorder,
        node_directory: Path | None,
        may_change_data: bool,
    ) -> None:
        self._spec = spec
        self._device = device
        self._position = position
        self._outbox = outbox
        self._saver = saver
        self._profiling = profiling
        self._snapshot_store = snapshot_store
        self._host = host
        self._recorder = recorder
        self._node_directory = node_directory
        self._may_change_data = may_change_data
        self._remarks = Remarks()
        self._task: LoadedTask | None = None
        self._readers: BatchReaders | None = None
        self._settings = spec
        """The spec with the settings of the generation that was begun last."""
        self.runtime: ModelRuntime | None = None
        """The model of the newest generation; None if there is none yet, or it could not be kept."""
        self._built_lr = 0.0
        """`optimizer.lr` for which the runtime was built."""
        self.shape: ModelShape | None = None
        self._trainer: Trainer | None = None
        self._memory_toucher: MemoryToucher | None = None

    def prepare(self, expected_bytes: int = 0) -> None:
        """Imports the task, lets it prepare, opens its data, and builds a first tiny model. Idempotent.

        Args:
            expected_bytes: touched from here until the first generation begins, so that its first step is fast.

        Raises:
            TaskFailed: the task's own code raised.
            PackagesNotInstalled: what `code.pip` names cannot be installed.
        """
        if self._task is not None:
            return
        self._position.enter(Phase.PREPARING)
        keep_freed_memory()
        add_packages(self._spec.code, self._position.note)
        if self._spec.compile:
            share_compiled_code()
        with UserCode(lambda: self._position.phase, remark=self._remarks.add) as user_code:
            task = load_task(self._spec)
            user_code.place = task.line_of
            if self._node_directory is None or not task.has_preparation:
                task.prepare(self._position.note)
            else:
                prepare_once(task.prepare, self._position.note, self._node_directory)
            task.open_data()
        for text in task.remarks:
            self._position.note(text)
            self._remarks.add(text)
        batch = self._spec.batch
        if (
            batch.num_workers
        ):  # before there is a model: what a forked process holds would be kept twice once it changes
            self._readers = BatchReaders(task, batch.num_workers, batch.prefetch_factor, self._outbox.log_text)
        self._task = task
        warm_up(self._device)
        self._memory_toucher = MemoryToucher(expected_bytes if self._device.type == "cpu" else 0)
        # The objects of the imports are never garbage. Without this each collection between generations visits them
        # all.
        gc.collect()
        gc.freeze()
        self._position.enter(Phase.IDLE)

    def build_model(self) -> ModelShape:
        """The shape of the task's model, of which nothing is kept. When no generation runs.

        Raises:
            TaskFailed: the task's own code raised.
        """
        assert self._task is not None, "prepare comes first"
        self._position.enter(Phase.BUILDING)
        try:
            with UserCode(lambda: self._position.phase, self._task.line_of, self._remarks.add):
                return shape_of(build_for_restore(self._task.build_model))
        finally:
            self._position.enter(Phase.IDLE)

    def begin(self, assignment: Assignment) -> None:
        """Frees the model of the last generation unless it fits this one: two would not fit into memory."""
        if self._memory_toucher is not None:
            self._memory_toucher.stop()
        self._settings = self._spec if assignment.settings is None else with_settings(self._spec, assignment.settings)
        fits = self.runtime is not None and is_restoring(assignment) and self.runtime.fits(assignment)
        if not fits or self._built_lr != self._settings.optimizer.lr:
            self.runtime = None

    def enter(self, membership: Membership, group: Group) -> GroupEntered:
        """Builds or reuses the model, and restores the state: the next thing is a step."""
        assert self._task is not None, "prepare comes first"
        start = time.perf_counter()
        membership.position.enter(Phase.BUILDING)
        generation = self._generation(membership, self._task)
        if generation.rank == 0 and not is_restoring(membership.assignment):
            self._preview_data(self._task)
        proof = proof_of(generation, group)
        if self.runtime is not None and not self.runtime.revive(membership.meshes):
            self.runtime = None  # freed before another one is built
        touched_bytes = self._memory_toucher.num_bytes if self._memory_toucher is not None else 0
        check_whole = partial(refuse_if_too_large, generation, group, self._host, touched_bytes)
        if self.runtime is None:
            self.runtime = build_runtime(generation, check_whole)
        else:
            check_whole(None)
        runtime, self._built_lr = self.runtime, self._settings.optimizer.lr
        self.shape = runtime.shape
        self._trainer = trainer = Trainer(generation, runtime, self._saver, self._snapshot_store, self._profiling)
        membership.check()
        built = time.perf_counter()
        restored = trainer.restore()
        own_data, train_data = RankData(self._task.content_hash, self._host), self._task.train_data
        all_restored = when_all_have_restored(group, restored, own_data, lambda: parts_of(train_data))
        runtime.state.keeps_restored = not all_restored.frees_source
        if restored.data_change is not None and restored.is_own and not self._may_change_data:
            raise refused_change(restored.data_change, restored.step)
        return GroupEntered(
            total_steps=trainer.total_steps,
            build_s=built - start,
            restore_s=time.perf_counter() - built,
            num_parameters=runtime.num_parameters,
            restored_bytes=all_restored.num_bytes,
            remote_bytes=all_restored.remote_bytes,
            past=restored.past,
            data=own_data.content_hash,
            data_before=restored.data_change.before if restored.data_change is not None else "",
            proof=proof,
        )

    def _preview_data(self, task: LoadedTask) -> None:
        """Store what training reads, for people, before there is a model that may fail."""
        try:
            self._recorder.store(DATA_FILE, lambda: describe(task, self._spec, OF_JOB).model_dump_json().encode())
        except Exception as error:  # of a sample that is never trained, perhaps: not a reason to end the job
            self._outbox.log_text(f"the data could not be described for the page: {type(error).__name__}: {error}")

    def run(self) -> GenerationEnd:
        """Trains until the end. The trainer is dropped then: it refers to the generation's groups."""
        trainer, self._trainer = self._trainer, None
        assert trainer is not None, "the generation is entered first"
        return trainer.train()

    def park(self) -> None:
        """Keeps the model for the next generation. If it cannot be, the next one builds its own, because how this one
        has ended counts more."""
        self._trainer = None
        try:
            if self.runtime is not None:
                self.runtime.park()
        except Exception as error:
            self.runtime = None
            self._outbox.log_text(f"the model is built again, because it could not be kept: {error}")

    def _generation(self, membership: Membership, task: LoadedTask) -> Generation:
        return Generation(
            assignment=membership.assignment,
            meshes=membership.meshes,
            device=membership.device,
            position=membership.position,
            outbox=membership.outbox,
            fence=membership.fence,
            collectives=membership.collectives,
            spec=self._settings,
            task=task,
            plan=plan_of(self._spec) or ParallelPlan(),
            remarks=self._remarks,
            readers=self._readers,
        )


def share_compiled_code(root: Path | None = None) -> Path:
    """Let all workers of this node and user keep the code that torch.compile generates in one directory, and return it.

    torch's default has a known name in /tmp: whoever makes it first chooses what others load and run, and a node may
    empty /tmp. This one can be written by this user only, unless `code.env` names another. torch reads the variable
    whenever it compiles.
    """
    if (chosen := os.environ.get(_COMPILED_CODE_VARIABLE)) is not None:
        return Path(chosen)
    directory = root or root_of_node().parent / "compiled"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.environ[_COMPILED_CODE_VARIABLE] = str(directory)
    return directory
