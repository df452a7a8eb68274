"""What a worker reports without being asked: steps, saved parts, costs, notices. Pulled with `poll`, in order.

Made by the engine; read by the supervisor, by `shoal_workers.run` and by benchmarks. Each report has its generation.
"""

from __future__ import annotations

from shoal_workers.contract.base import Frozen


class StepReport(Frozen):
    """One completed optimizer step, told by rank 0."""

    generation: int
    step: int
    """Optimizer steps completed: the first report of a run is step 1."""
    at: float
    """Wall-clock time of completion, seconds since the epoch."""
    loss: float
    """Mean over the global batch, before the update."""
    grad_norm: float
    """Global L2 norm before clipping."""
    lr: float
    tokens: int
    """Tokens (or samples) of the global batch."""
    step_s: float
    """Seconds since the previous step's end, or since training began in this generation."""
    world_size: int
    compute_s: tuple[float, ...] = ()
    """Per rank: seconds of the step that it did not spend waiting for others. Empty: not measured."""


class ValidationReport(Frozen):
    """Mean validation loss after a step, told by rank 0."""

    generation: int
    step: int
    at: float
    loss: float
    """Nats per token (or the task's own unit)."""
    bits_per_byte: float | None
    """Only for byte-level tasks."""
    samples: int


class GroupFormed(Frozen):
    """Rank 0 says that the group of a generation is up and restored; the next thing is a step."""

    generation: int
    at: float
    start_step: int
    """Steps already contained in the state: the next completed one is start_step + 1."""
    total_steps: int
    form_s: float
    build_s: float
    restore_s: float
    num_parameters: int
    past: tuple[StepReport, ...] = ()
    """The last steps before `start_step`, as far as the snapshot knows them: a rank 0 that died may not have told."""
    restored_bytes: int = 0
    """Read by all ranks together, from memory or storage."""
    remote_bytes: int = 0
    """That part of it which came over the network from another node's memory."""


class SavedFile(Frozen):
    name: str
    bytes: int
    crc32: int


class SavedPart(Frozen):
    """One rank's files of a checkpoint are durable. The supervisor commits once it holds every rank's part."""

    generation: int
    step: int
    rank: int
    world_size: int
    directory: str
    """URL of the checkpoint directory."""
    files: tuple[SavedFile, ...]
    stall_s: float
    """Seconds that training stood still for the staging copy."""
    write_s: float


class SaveFailed(Frozen):
    """One rank could not write its part; training goes on, the checkpoint will not be committed."""

    generation: int
    step: int
    rank: int
    directory: str
    error: str


class StepSkipped(Frozen):
    """Loss or gradient norm was not finite; nothing was updated, the step's samples are used up. Told by rank 0."""

    generation: int
    step: int
    at: float
    loss: float | None
    """None: not finite, which JSON cannot say."""
    grad_norm: float | None


class PreemptionNotice(Frozen):
    """This process is about to be taken away (SIGTERM, or the platform's notice); it goes on until it is."""

    generation: int
    at: float
    grace_s: float
    """Seconds that it expects to have left."""
    reason: str


class SnapshotCost(Frozen):
    """What the RAM tier costs, told by rank 0 each time the pace changes and at the end of a generation."""

    generation: int
    step: int
    every_steps: float
    """A snapshot is taken after every so many steps, on average: 2.5 are 2 and 3 in turn."""
    buddy_every_steps: float
    copy_s: float
    """Seconds of the training thread that one snapshot takes, on the slowest rank; moving average."""
    buddy_s: float
    """CPU seconds of sending one to the buddy, and of the copy that is sent where snapshots are none; 0: there is no
    buddy."""
    share: float
    """Of the step time, at this pace; the budget is snapshot.budget."""
    num_bytes: int
    """Of one rank's snapshot."""


class ReplayMismatch(Frozen):
    """A replayed micro-batch gave another result on this rank than on its owner and the referee: it computes wrong."""

    generation: int
    step: int
    at: float
    rank: int
    message: str


WorkerReport = (
    StepReport
    | ValidationReport
    | GroupFormed
    | SavedPart
    | SaveFailed
    | StepSkipped
    | PreemptionNotice
    | SnapshotCost
    | ReplayMismatch
)
