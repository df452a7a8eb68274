"""What one generation works with on one rank: `Membership` is the rank's part in the group, whatever the group runs;
`Generation` adds the task that it trains.

The engine makes the first for each formed group, `TaskProgram` the second. The model is part of neither: a model may
outlive its generation (see engine/model/runtime.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from shoal_workers.contract.batch_partition import MicroBatch, micro_batches_of_rank
from shoal_workers.contract.layout import Layout
from shoal_workers.contract.messages import Assignment
from shoal_workers.contract.model import ParallelPlan
from shoal_workers.contract.spec import JobSpec
from shoal_workers.contract.worker_reports import WorkerReport
from shoal_workers.engine.group.collectives import CollectiveLog
from shoal_workers.engine.group.fence import GenerationFence
from shoal_workers.engine.group.mesh import Meshes
from shoal_workers.engine.parallel.sharding import compute_dtype
from shoal_workers.engine.process.outbox import Outbox
from shoal_workers.engine.process.position import Position
from shoal_workers.engine.step.batch_readers import BatchReaders
from shoal_workers.engine.task.task import LoadedTask
from shoal_workers.engine.task.user_code import Remarks, UserCode


@dataclass(frozen=True, slots=True)
class Membership:
    """One rank's part in a formed group. It knows no task. Training thread only."""

    assignment: Assignment
    meshes: Meshes
    device: torch.device
    position: Position
    outbox: Outbox
    fence: GenerationFence
    collectives: CollectiveLog
    """What the training thread calls."""

    @property
    def number(self) -> int:
        return self.assignment.generation

    @property
    def rank(self) -> int:
        return self.assignment.rank

    @property
    def layout(self) -> Layout:
        return self.assignment.layout

    def check(self) -> None:
        """Raises Fenced if the generation is over."""
        self.fence.check()

    def say(self, text: str) -> None:
        """Add a line to the job's log, once for all ranks: on rank 0."""
        if self.rank == 0:
            self.outbox.log_text(text)

    def report(self, report: WorkerReport) -> None:
        """Send what all ranks know alike, once: on rank 0."""
        if self.rank == 0:
            self.outbox.report(report)


@dataclass(frozen=True, slots=True)
class Generation(Membership):
    """Shared by everything that trains a task in one generation. Training thread only."""

    spec: JobSpec
    task: LoadedTask
    plan: ParallelPlan
    """How the task's model may be split; empty for a task without a plan."""
    remarks: Remarks = field(default_factory=Remarks)
    """Remarks on the task, for the job's log."""
    readers: BatchReaders | None = None
    """Read samples ahead; None if the training thread reads them."""

    @property
    def user_code(self) -> UserCode:
        """Context manager around calls into the task."""
        return UserCode(lambda: self.position.phase, self.task.line_of, self.remarks.add)

    @property
    def compute_dtype(self) -> torch.dtype:
        return compute_dtype(self.spec.precision)

    def own_micro_batches(self) -> tuple[MicroBatch, ...]:
        """The micro-batches that this rank computes in each step."""
        rank = self.layout.data_rank(self.rank)
        return micro_batches_of_rank(self.spec.batch.num_micro_batches, rank, self.layout.num_data_ranks)
