"""The program that runs a loop of the user's own: finds its function once, and calls it in each generation with another
`Run`. Called by the engine, see engine.py.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.amp import GradScaler
from torch.distributed import DistError

from shoal_workers.checkpoint.errors import CheckpointError
from shoal_workers.contract.messages import Assignment, Phase
from shoal_workers.contract.model import ModelShape
from shoal_workers.contract.spec import JobSpec
from shoal_workers.contract.worker_reports import GroupEntered, StepReport
from shoal_workers.engine.generation_ends import EngineError, Fenced, GroupBroken, TaskFailed
from shoal_workers.engine.group.collectives import is_collective_error
from shoal_workers.engine.group.process_group import Group
from shoal_workers.engine.loop.boundary import LoopEnd
from shoal_workers.engine.loop.entry import load_function
from shoal_workers.engine.loop.proof import LoopProof
from shoal_workers.engine.loop.run import Run
from shoal_workers.engine.loop.trials import TrialEngine
from shoal_workers.engine.media.recorder import Recorder
from shoal_workers.engine.process.exits import GenerationEnd
from shoal_workers.engine.process.outbox import Outbox
from shoal_workers.engine.process.packages import add_packages
from shoal_workers.engine.process.position import Position
from shoal_workers.engine.process.warm_memory import keep_freed_memory
from shoal_workers.engine.state.restore import is_restoring, read_source, start_step
from shoal_workers.engine.state.saving import Saver
from shoal_workers.engine.state.training_state import Recent
from shoal_workers.engine.step.generation import Membership
from shoal_workers.engine.task.user_code import is_of_task, make_error_report
from shoal_workers.snapshot_store.snapshot_errors import SnapshotLost
from shoal_workers.snapshot_store.store import SnapshotStore


class LoopProgram:
    """Training thread only.

    Args:
        function: the loop; None means `spec.loop` names the file that has it.
        host: this host's address.
        make_engine: `Engine`, for the trials that prove the loop; None means it is not proven.
    """

    shape: ModelShape | None = None
    sums_gradients = True

    def __init__(
        self,
        spec: JobSpec,
        *,
        function: Callable[[Run], None] | None,
        position: Position,
        saver: Saver,
        snapshot_store: SnapshotStore | None,
        host: str,
        recorder: Recorder,
        outbox: Outbox,
        make_engine: Callable[..., TrialEngine] | None,
    ) -> None:
        self._outbox = outbox
        self._make_engine = make_engine
        self._proof: LoopProof | None = None
        self._spec = spec
        self._function = function
        self._position = position
        self._saver = saver
        self._store = snapshot_store
        self._host = host
        self._recorder = recorder
        self._run: Run | None = None

    def prepare(self, expected_bytes: int = 0) -> None:
        self._position.enter(Phase.PREPARING)
        keep_freed_memory()
        add_packages(self._spec.code, self._position.note)
        if self._function is None:
            assert self._spec.loop is not None
            self._function = self._user(load_function, self._spec.loop)
        gc.collect()
        gc.freeze()  # what the imports have made is never garbage
        self._position.enter(Phase.IDLE)

    def begin(self, assignment: Assignment) -> None:
        """Before the group forms: what is forked here has none of its connections."""
        make_engine, self._make_engine = self._make_engine, None  # later the function has been called in this process
        if assignment.rank == 0 and make_engine is not None and not is_restoring(assignment):
            assert self._function is not None
            self._proof = LoopProof(self._spec, self._function, make_engine, self._outbox.log_text)

    def enter(self, membership: Membership, group: Group) -> GroupEntered:
        """The state is restored when the loop names it; what is restored is known before."""
        membership.position.reach(start_step(membership.assignment))
        self._run = Run(
            membership,
            group,
            self._spec,
            store=self._store,
            saver=self._saver,
            host=self._host,
            recorder=self._recorder,
        )
        self._run.observer = self._proof
        return GroupEntered(
            total_steps=None,
            build_s=0.0,
            restore_s=0.0,
            num_parameters=0,
            past=self._reports_of_snapshot(membership),
        )

    def _reports_of_snapshot(self, membership: Membership) -> tuple[StepReport, ...]:
        """Return the reports of the last steps, which a rank 0 that has died may not have sent."""
        if membership.rank != 0 or membership.assignment.restore_snapshot is None:
            return ()
        return Recent.parse(read_source(membership, {}, self._store).extra["reports"])

    def run(self) -> GenerationEnd:
        run, self._run = self._run, None
        assert run is not None and self._function is not None, "the generation is entered first"
        try:
            with _scalers_refused():
                self._user(self._function, run)
            end: GenerationEnd = self._user(run.finish)
            return end
        except LoopEnd as left:
            return left.end
        except BaseException as error:
            if isinstance(error, (Fenced, GroupBroken)) or is_collective_error(error):
                run.keep()
            raise
        finally:
            run.close()
            if self._proof is not None:
                self._proof.close()
                self._proof = None

    def park(self) -> None:
        self._run = None

    def _user(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls code of the user. What it raises is the user's, unless Shoal or a broken collective has raised it."""
        try:
            return function(*arguments)
        except (EngineError, SnapshotLost, CheckpointError, DistError):
            raise
        except BaseException as error:
            is_storage = isinstance(error, OSError) and self._position.phase in (Phase.RESTORING, Phase.SAVING)
            if is_storage or is_collective_error(error) or not is_of_task(error):
                raise
            raise TaskFailed(make_error_report(error, self._position.phase, in_task_call=True)) from None


@contextmanager
def _scalers_refused() -> Iterator[None]:
    """Makes an enabled GradScaler raise ValueError as it scales a loss."""
    plain = GradScaler.scale

    def scale(scaler: GradScaler, outputs: Any) -> Any:
        if scaler.is_enabled():
            raise ValueError(
                "a GradScaler scales the loss, and run.update() would sum and clip the scaled gradients. Use "
                "torch.autocast with bfloat16, which needs no scaler, or make it with GradScaler(enabled=False)."
            )
        return plain(scaler, outputs)

    GradScaler.scale = scale  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        GradScaler.scale = plain  # type: ignore[method-assign]
