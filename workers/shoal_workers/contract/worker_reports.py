"""Reports of a worker: steps, saved parts, costs, notices. The supervisor pulls them with `poll`, in order.

Made by the engine; read by the supervisor, by `shoal_workers.run` and by benchmarks. Each report has its generation.
Names of the task's own metrics in them are limited here, for the engine and the service.
"""

from __future__ import annotations

import re

from pydantic import Field

from shoal_workers.contract.base import Frozen
from shoal_workers.contract.plain_text import OfTask
from shoal_workers.contract.profiles import Profiled
from shoal_workers.contract.proofs import LayoutProof


class _AtStep(Frozen):
    """What happened in one generation at one step."""

    generation: int
    step: int
    at: float


class StepReport(_AtStep, OfTask):
    """One completed optimizer step, reported by rank 0. A script reports what it logs: what it does not is None."""

    step: int
    """Optimizer steps completed: the first report of a run is step 1."""
    at: float
    """Wall-clock time of completion, seconds since the epoch."""
    loss: float | None
    """Mean over the global batch, before the update."""
    grad_norm: float | None
    """Global L2 norm before clipping."""
    lr: float | None
    tokens: int | None
    """Tokens (or samples) of the global batch."""
    step_s: float
    """Seconds since the previous step's end, or since training began in this generation."""
    world_size: int
    compute_s: tuple[float, ...] = ()
    """Seconds of the step that each rank did not spend waiting for others. Empty: not measured."""
    data_s: tuple[float, ...] = ()
    """Seconds of the step in which each rank made batches."""
    cpu_wait_s: tuple[float, ...] = ()
    """Seconds since the previous step in which each rank's training thread was ready to run and had no CPU."""
    saving_s: tuple[float, ...] = ()
    """Seconds before the step for which a checkpoint kept each rank's training thread, for example because the previous
    one was not written yet."""
    validating_s: float = 0.0
    """Seconds of `step_s` in which rank 0 validated, after the previous step."""
    metrics: dict[str, float] = Field(default_factory=dict)
    """The task's own metrics: means over the global batch, as the loss. One that is not finite is left out."""
    total_steps: int | None = None
    """The step with which a script says that it ends; None if it says nothing, or it is a task."""


class ValidationReport(_AtStep, OfTask):
    """Mean validation loss after a step, reported by rank 0."""

    loss: float
    """Mean loss in nats per token (or the task's own unit)."""
    bits_per_byte: float | None
    """The loss in bits per byte; None if the task does not say how many bytes a token has."""
    samples: int
    metrics: dict[str, float] = Field(default_factory=dict)
    """The task's own metrics: means over the samples, as the loss. One that is not finite is left out."""


class GroupEntered(OfTask):
    """All ranks have entered a generation."""

    total_steps: int | None
    """None if a script decides when it ends."""
    build_s: float
    restore_s: float
    num_parameters: int
    past: tuple[StepReport, ...] = ()
    """Reports of the last steps that the restored snapshot contains: a rank 0 that died may not have sent them."""
    restored_bytes: int = 0
    """Bytes that all ranks together read from memory or storage."""
    data: str = ""
    """Content hash of the training data, equal on all ranks; empty: the dataset has none."""
    data_before: str = ""
    """Content hash in the checkpoint that this generation began with, if it differs from `data`; else empty."""
    remote_bytes: int = 0
    """Part of `restored_bytes` that came over the network from another node's memory."""
    proof: LayoutProof | None = None
    """Proof of the generation's layout; null: the assignment demanded none."""


class GroupFormed(GroupEntered):
    """The group of a generation is formed and restored, and its first step begins; reported by rank 0."""

    generation: int
    at: float
    start_step: int | None
    """Steps contained in the state; the next completed one is start_step + 1. None if a script has begun, and its first
    StepReport tells."""
    form_s: float


class SavedFile(Frozen):
    name: str
    bytes: int
    crc32: int


class SavedPart(Frozen):
    """One rank's files of a checkpoint are durable. The supervisor commits once every rank has reported its part."""

    generation: int
    step: int
    rank: int
    world_size: int
    directory: str
    """URL of the checkpoint directory."""
    files: tuple[SavedFile, ...]
    stall_s: float
    """Seconds that training waited for the staging copy."""
    write_s: float


class SaveFailed(OfTask):
    """One rank could not write its part. Training continues; the checkpoint is not committed."""

    generation: int
    step: int
    rank: int
    directory: str
    error: str
    is_stalled: bool = False
    """The storage did not fail: it accepted nothing for `timeouts.save_s`."""


class StepSkipped(_AtStep):
    """Loss or gradient norm was not finite: the step updated nothing; its samples are skipped. Reported by rank 0."""

    loss: float | None
    """None if the loss is not finite, which JSON cannot express."""
    grad_norm: float | None
    ranks: tuple[int, ...] = ()
    """Ranks whose own loss was not finite; empty: only the gradient was not, or the ranks are not known."""


class PreemptionNotice(Frozen):
    """This worker will soon be terminated (SIGTERM, or a notice of the platform). It trains on until then."""

    generation: int
    at: float
    grace_s: float
    """Seconds that the worker expects to have until it is terminated."""
    reason: str


class SnapshotCost(Frozen):
    """Cost of the snapshots, reported by rank 0 when their pace changes and at the end of a generation."""

    generation: int
    step: int
    every_steps: float
    """Steps between two snapshots, on average: 2.5 means alternately 2 and 3."""
    buddy_every_steps: float
    """Steps between two copies to the buddy, on average."""
    copy_s: float
    """Seconds that one snapshot takes on the training thread of the slowest rank; moving average."""
    buddy_s: float
    """CPU seconds per copy to the buddy, including the local copy that is made for it if live slots hold the state; 0:
    there is no buddy."""
    share: float
    """Fraction of the step time that snapshots cost at this pace; `snapshot.budget` limits it."""
    num_bytes: int
    """Size of one rank's snapshot."""
    buddy_step: int | None = None
    """Newest step of which every rank's copy has arrived at its buddy; None if there is none in this generation."""
    buddy_flight_steps: int = 1
    """Steps that complete until a copy has arrived at every buddy; the largest number of this generation."""
    copies_reason: str = ""
    """Why snapshots are copies of the state; empty: the state itself is in shared memory."""


class SnapshotsStopped(_AtStep, OfTask):
    """This rank has no memory for snapshots: until the next generation none is whole, whatever the other ranks keep."""

    rank: int
    only_copies: bool
    """The rank still keeps its own state in shared memory, but sends no copies to other nodes."""
    message: str


class ReplayMismatch(_AtStep):
    """A replayed micro-batch had another result on this rank than on two others: this rank computes wrong results."""

    rank: int
    message: str


class ReplicasEqual(_AtStep):
    """All ranks that hold the same state hold the same bits of it; reported by rank 0."""

    cpu_s: float
    """CPU seconds that the checksums took on rank 0; 0 on a GPU."""


class ReplicaMismatch(_AtStep):
    """Ranks that should hold the same state hold other bits than the rest, or than each other; reported by rank 0."""

    step: int
    """Completed steps of the state that differs."""
    ranks: tuple[int, ...]
    is_certain: bool
    """True: these ranks are wrong, since a majority holds other values or only theirs are not finite. False: it is not
    known which ranks are wrong."""
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
    | SnapshotsStopped
    | ReplayMismatch
    | ReplicasEqual
    | ReplicaMismatch
    | Profiled
)


MAX_METRICS = 16
"""Largest number of a task's metrics in training, and in validation. Each is a Prometheus series and a curve."""
MAX_NAME_CHARS = 40
_NAME = re.compile(rf"[A-Za-z][A-Za-z0-9_./-]{{0,{MAX_NAME_CHARS - 1}}}")


def is_metric_name(name: object) -> bool:
    """Return whether a task may report a metric of this name: a label in Prometheus, a column of a table, a title."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def suggested_name(name: object) -> str:
    """A valid metric name that resembles `name`, which is not valid."""
    text = re.sub(r"[^A-Za-z0-9_./-]+", "_", str(name))[:MAX_NAME_CHARS].strip("_")
    return text if is_metric_name(text) else f"m_{text}"[:MAX_NAME_CHARS]
