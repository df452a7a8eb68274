"""How a job goes on when workers come, go or fail: how many it has, where its state is kept, when a worker or a step
counts as faulty, how long each wait lasts, and how often it is tried again.

These sections of a spec are the same for a task, a loop and a script. The attempt machine (`core/attempt`) decides with
them; the engine saves, takes snapshots and checks steps as they say. Pure.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from shoal_workers.contract.base import Frozen, PositiveInt
from shoal_workers.contract.rules import Rule, Section


class ElasticitySpec(Section):
    """How far the job may shrink and grow."""

    min_workers: int = Field(1, ge=1, le=100_000)
    """With fewer workers the job does not train; it waits for capacity."""
    max_workers: int = Field(1, ge=1, le=100_000)
    """The job never uses more workers than this."""
    standby: int = Field(0, ge=0, le=1_000)
    """Warm spare workers that are ready to replace a dead rank."""
    wait_s: float = Field(1800.0, gt=0, le=30 * 86400, allow_inf_nan=False)
    """Seconds that a running job may wait for `min_workers`; then it fails with the reason capacity_timeout."""

    rules = (
        Rule(
            lambda elasticity: elasticity.min_workers > elasticity.max_workers,
            lambda elasticity: (
                f"elasticity.min_workers {elasticity.min_workers} is larger than elasticity.max_workers "
                f"{elasticity.max_workers}. Set max_workers to at least {elasticity.min_workers}."
            ),
        ),
    )


class DamagePolicy(StrEnum):
    STOP = "stop"
    START_OVER = "start_over"


class CheckpointSpec(Frozen):
    """Durable, sharded, asynchronous checkpoints."""

    url: str | None = Field(None, max_length=4096)
    """An fsspec URL or an absolute directory that every node can reach. Clients on the server's machine take a relative
    one from their working directory. Default: under the service's own state directory."""
    every_steps: PositiveInt | None = 100
    """Steps between two checkpoints; null: by time only."""
    every_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Seconds between two checkpoints; null: by steps only."""
    keep: int = Field(3, ge=1, le=10_000)
    """Number of committed checkpoints to keep, newest first; the newest undamaged one is never deleted."""
    keep_best: int = Field(0, ge=0, le=1_000)
    """Number of checkpoints to keep besides, those of the best validations by `validation.metric`. A validation that is
    among them saves a checkpoint."""
    wait_s: float = Field(300.0, gt=0, le=86400, allow_inf_nan=False)
    """How long an attempt that looks for its newest checkpoint waits for a storage that does not answer, seconds. It
    asks again meanwhile; then the job fails."""
    tensorboard: bool = False
    """Also write the series as TensorBoard event files, beside the checkpoints. `url` must be a directory then."""
    all_damaged: DamagePolicy = DamagePolicy.STOP
    """If checkpoints exist and every one of them is damaged: stop the job, or start over from step 0."""


class SnapshotSpec(Frozen):
    """Snapshots in memory. With them, an unexpected death of a worker costs at most one step on CPU with an elementwise
    optimizer, else the steps between two copies of the state."""

    enabled: bool = True
    """Keep snapshots in shared memory, and a copy of each on another node if there is one."""
    budget: float = Field(0.01, gt=0, le=1, allow_inf_nan=False)
    """Fraction of the step time that snapshots may cost. They are taken, and copied to another node, as often as this
    allows, at most once per step."""


class NonFinitePolicy(StrEnum):
    STOP = "stop"
    SKIP = "skip"
    ROLL_BACK = "roll_back"


class HealthSpec(Frozen):
    """When a worker or a step counts as faulty, and what happens then."""

    hang_factor: float = Field(10.0, ge=2, le=1e6, allow_inf_nan=False)
    """A group counts as hung if it makes no progress for this many median step times, for four times its slowest step,
    and for `hang_floor_s`. In the first steps of a group, and while it validates, for 30 s at least."""
    hang_floor_s: float = Field(3.0, gt=0, le=86400, allow_inf_nan=False)
    """Minimum time without progress before a group counts as hung, seconds."""
    non_finite: NonFinitePolicy = NonFinitePolicy.STOP
    """If a loss or gradient is not finite: stop the job, skip the step, or roll back to the newest durable checkpoint
    and skip the step when it is reached again."""
    max_non_finite: int = Field(3, ge=1, le=10_000)
    """The job stops after this many consecutive skipped steps or rollbacks."""
    straggler_factor: float | None = Field(2.0, gt=1, le=1e6, allow_inf_nan=False)
    """A rank is a straggler if it computes longer than this many times the group's median; null: never."""
    straggler_steps: int = Field(20, ge=1, le=1_000_000)
    """A straggler is replaced after this many consecutive slow steps, if a spare worker or a node is available."""
    replay_every_steps: PositiveInt | None = None
    """Check for silent corruption: steps after which each rank recomputes another rank's micro-batch and compares
    the bits; null: never."""
    checksum_every_steps: PositiveInt | None = 100
    """Check for silent corruption: steps after which ranks that hold the same parameters and optimizer state compare
    checksums of them; null: never. Needs dp_replicate or tp above 1."""
    probation_s: float = Field(600.0, gt=0, le=30 * 86400, allow_inf_nan=False)
    """Seconds for which the job avoids a node that it suspects; then, and once before, the node is tested. The job uses
    it again only after a test passes."""


class TimeoutsSpec(Frozen):
    """How long each wait may last without progress, seconds: progress of what is waited for moves the deadline on. The
    wait for lost workers is `elasticity.wait_s`; hangs of a training group are `health.hang_*`."""

    start_s: float = Field(600.0, gt=0, le=30 * 86400, allow_inf_nan=False)
    """Time for `elasticity.min_workers` workers to start and to prepare (import, download, tokenise)."""
    form_s: float = Field(120.0, gt=0, le=86400, allow_inf_nan=False)
    """Time for a group to meet and to build its model."""
    restore_s: float = Field(300.0, gt=0, le=86400, allow_inf_nan=False)
    """Time for a group to read its state from memory or from a checkpoint."""
    save_s: float = Field(120.0, gt=0, le=86400, allow_inf_nan=False)
    """The longest wait for the storage to accept more of a checkpoint. Then the checkpoint counts as not saved, and
    training goes on."""
    commit_s: float = Field(120.0, gt=0, le=86400, allow_inf_nan=False)
    """The longest wait for a commit marker. The wait for the storage to list its checkpoints is `checkpoint.wait_s`."""


class RetrySpec(Frozen):
    """Failures of the user's code or of the whole job. A lost worker is not a failure: the group re-forms."""

    max_failures: int = Field(2, ge=0, le=10_000)
    """Number of restarts from the newest checkpoint, each only if steps were completed since the last failure."""
    max_recoveries: int = Field(1000, ge=0, le=10**9)
    """Number of re-formations after lost workers within a day; one more fails the job with the reason recovery_budget.
    A job that makes no progress ends earlier: after six re-formations without a new step."""
