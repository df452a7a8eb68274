"""State of one attempt of a job, in parts: everything that `machine.step` decides from.

A frozen value that round-trips through JSON (`ATTEMPT_JSON`): it is also the supervisor's journal. The parts are plain
frozen dataclasses because mypy checks `dataclasses.replace`, so a misspelt field is a type error. `Turn` replaces them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pydantic import TypeAdapter

from shoal_service.core.attempt.state.budgets import Budgets
from shoal_service.core.attempt.state.checkpoints import CheckpointIndex
from shoal_service.core.attempt.state.code import Code
from shoal_service.core.attempt.state.group import Group
from shoal_service.core.attempt.state.health import Health
from shoal_service.core.attempt.state.history import History
from shoal_service.core.attempt.state.incident import Incident
from shoal_service.core.attempt.state.progress import GroupProgress
from shoal_service.core.attempt.state.snapshots import SnapshotIndex
from shoal_service.core.attempt.state.stages import CurrentStage, Stage
from shoal_service.core.attempt.state.target import AttemptConfig, Target
from shoal_service.core.attempt.state.worker import Worker, WorkerPool
from shoal_service.core.goodput import Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    config: AttemptConfig
    target: Target
    current: CurrentStage
    """The stage, with what only that stage knows."""
    life: int = 1
    """Of the supervisor; see `contract.ids`."""
    group: Group = field(default_factory=Group)
    pool: WorkerPool = field(default_factory=WorkerPool)
    snapshots: SnapshotIndex = field(default_factory=SnapshotIndex)
    checkpoints: CheckpointIndex = field(default_factory=CheckpointIndex)
    budgets: Budgets = field(default_factory=Budgets)
    health: Health = field(default_factory=Health)
    history: History = field(default_factory=History)
    incident: Incident | None = None
    """The open one."""
    progress: GroupProgress = field(default_factory=GroupProgress)
    code: Code = field(default_factory=Code)
    ledger: Ledger = field(default_factory=Ledger)
    """Where the worker-seconds went; kept by `booking`, never decided upon."""

    @property
    def stage(self) -> Stage:
        return self.current.stage

    @property
    def group_active(self) -> bool:
        """Workers of the group are in `run`, or still on their way out of it."""
        return self.stage in (Stage.FORMING, Stage.RUNNING, Stage.SWITCHING, Stage.QUIESCING)

    @property
    def in_run(self) -> tuple[int, ...]:
        """Indexes of the group's workers that have not left this generation, by rank."""
        running = {worker.index for worker in self.pool.workers if worker.in_run}
        return tuple(index for index in self.group.workers if index in running)

    @property
    def all_left(self) -> bool:
        """No worker of the group is in `run`."""
        ranks = self.group.ranks
        # The newest first: those that leave in the order in which they started are not passed over again and again.
        return not any(worker.in_run and worker.index in ranks for worker in reversed(self.pool.workers))

    @property
    def num_usable(self) -> int:
        """Workers that the grant allows to train."""
        return min(self.target.granted, len(self.usable))

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Those that may train: of the current version of the code. The others belong to an update of it."""
        return tuple(worker for worker in self.pool.workers if worker.code == self.code.current)

    @property
    def usable(self) -> tuple[Worker, ...]:
        return tuple(worker for worker in self.workers if worker.is_usable)

    @property
    def is_finishing(self) -> bool:
        """The last step is done."""
        return self.history.total_steps is not None and self.progress.step >= self.history.total_steps


ATTEMPT_JSON = TypeAdapter(Attempt)


def essential(state: Attempt) -> Attempt:
    """What must be in the journal. Left out are the ledger and the progress of a healthy group: it changes with every
    step and every poll, and a restarted supervisor learns it anew. The executor writes the journal when this differs,
    and every few seconds for the step alone. Parts that an event did not touch are the same objects, so comparing two
    states costs next to nothing."""
    return replace(state, progress=_NO_PROGRESS, ledger=_NO_LEDGER)


_NO_PROGRESS = GroupProgress()
_NO_LEDGER = Ledger()
