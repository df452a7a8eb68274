"""JobSpec: what a user requests. Validated once at the edge of the system, then passed as a value.

Use `checks.spec_errors.parse_spec` to make one: it also checks `model` and `data` of the built-in tasks. Messages of
rules over several fields contain the arithmetic.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from shoal_workers.contract.base import Frozen, whole
from shoal_workers.contract.code.spec import VARIABLE_NAMES, Secrets
from shoal_workers.contract.code.spec import CodeSpec as CodeSpec
from shoal_workers.contract.course.continuing import ContinueFrom as ContinueFrom
from shoal_workers.contract.course.sweep import SweepSpec as SweepSpec
from shoal_workers.contract.course.sweep import add_label
from shoal_workers.contract.course.training import ScheduleSpec as ScheduleSpec
from shoal_workers.contract.course.training import StopSpec as StopSpec
from shoal_workers.contract.course.training import ValidationSpec as ValidationSpec
from shoal_workers.contract.layout import ContextMethod, Recompute, Schedule, ShardLevel
from shoal_workers.contract.metrics.spec import MetricsSpec as MetricsSpec
from shoal_workers.contract.model.lm import LM_TASK
from shoal_workers.contract.model.plan import ParallelPlan
from shoal_workers.contract.placing import (
    JOB_NAME,
    LABEL,
    USER,
    Annotations,
    CapacityKind,
    JobLabels,
    Moment,
    Placement,
    is_job_name,
    is_label,
    is_user,
)
from shoal_workers.contract.placing import WorkerSpec as WorkerSpec
from shoal_workers.contract.webhooks.spec import MAX_WEBHOOKS, WebhookSpec

_TASK = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*")
_CHARACTERS = {
    "name": (is_job_name, "letters, digits, and inner dashes, dots and underscores"),
    "project": (is_label, "lower-case letters, digits and inner dashes"),
    "user": (is_user, "letters, digits, and inner dashes, dots, underscores and at signs"),
}
PositiveInt = Annotated[int, Field(ge=1, le=2**53)]


class Precision(StrEnum):
    """Floating-point types that a model computes in, or that gradients travel in."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class BatchSpec(Frozen):
    """The global batch is the same at every world size."""

    global_size: PositiveInt = 32
    """Samples per optimizer step, over all ranks."""
    micro_size: PositiveInt = 4
    """Samples per forward and backward pass on one rank. Must divide `global_size`."""

    @model_validator(mode="after")
    def _divides(self) -> BatchSpec:
        if self.global_size % self.micro_size:
            below = self.global_size - self.global_size % self.micro_size
            hint = " or ".join(str(n) for n in (below, below + self.micro_size) if n)
            raise ValueError(
                f"batch.global_size {self.global_size} is not a multiple of batch.micro_size {self.micro_size}: "
                f"{self.global_size} = {self.global_size // self.micro_size} x {self.micro_size} "
                f"+ {self.global_size % self.micro_size}. Set global_size to {hint}, or choose another micro_size."
            )
        return self

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per optimizer step, over all ranks."""
        return self.global_size // self.micro_size


class OptimizerSpec(Frozen):
    """AdamW (Loshchilov & Hutter 2019). A task that defines `build_optimizer` overrides it."""

    name: Literal["adamw"] = "adamw"
    """The only built-in optimizer."""
    lr: float = Field(3e-4, gt=0, le=1e3, allow_inf_nan=False)
    """Peak learning rate."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the mean of the gradients."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of the mean of the squared gradients."""
    eps: float = Field(1e-8, gt=0, le=1)
    """Added to the square root of the mean squared gradient, so that the update never divides by 0."""
    weight_decay: float = Field(0.1, ge=0, le=1e3)
    """Applied only to parameters with two or more dimensions."""
    clip_norm: float | None = Field(1.0, gt=0, allow_inf_nan=False)
    """Gradients with a larger global L2 norm are scaled down to this norm; null: never."""
    fused: bool | Literal["auto"] = "auto"
    """One kernel for the whole update; "auto": only if the parameters are on a GPU. The fused kernel rounds differently
    from the plain update, so with `deterministic: true` it is refused, and "auto" means false."""


class ParallelismSpec(Frozen):
    """Fixed degrees. If the world size is not their product, `otherwise` decides."""

    dp_replicate: PositiveInt = 1
    """Replicas of the sharded model (HSDP)."""
    dp_shard: PositiveInt | Literal["auto"] = "auto"
    """Ways to shard the model; "auto": the world size divided by the other degrees."""
    tp: PositiveInt = 1
    """Tensor parallel ranks, with sequence-parallel activations."""
    pp: PositiveInt = 1
    """Pipeline ranks."""
    cp: PositiveInt = 1
    """Context parallel ranks, which split each sequence."""
    ep: PositiveInt = 1
    """Expert parallel ranks; must divide dp_shard."""
    shard: ShardLevel | Literal["auto"] = "auto"
    """What dp_shard splits: optimizer state (ZeRO-1), also gradients (ZeRO-2), or also parameters: full (ZeRO-3)."""
    schedule: Schedule | Literal["auto"] = "auto"
    """The pipeline schedule."""
    recompute: Recompute | Literal["auto"] = "auto"
    """Activation checkpointing."""
    context: ContextMethod | Literal["auto"] = "auto"
    """How attention reads the tokens of other context-parallel ranks."""
    offload: bool = False
    """Keep parameters and optimizer state in CPU memory between their uses."""
    otherwise: Literal["replan", "idle"] = "replan"
    """If the degrees do not fit the world size, for example after a worker was lost: choose other degrees, or keep the
    degrees and leave the surplus ranks idle."""

    @property
    def model_degree(self) -> int:
        """Ranks that share the work of one data rank."""
        return self.tp * self.pp * self.cp

    @property
    def unit(self) -> int:
        """The degrees fit world sizes that are multiples of it; with a fixed dp_shard, only this world size."""
        return self.model_degree * self.dp_replicate * (1 if self.dp_shard == "auto" else self.dp_shard)


class ElasticitySpec(Frozen):
    """How far the job may shrink and grow."""

    min_workers: int = Field(1, ge=1, le=100_000)
    """With fewer workers the job does not train; it waits for capacity."""
    max_workers: int = Field(1, ge=1, le=100_000)
    """The job never uses more workers than this."""
    standby: int = Field(0, ge=0, le=1_000)
    """Warm spare workers that are ready to replace a dead rank."""
    wait_s: float = Field(1800.0, gt=0, le=30 * 86400, allow_inf_nan=False)
    """Seconds that a running job may wait for `min_workers`; then it fails with the reason capacity_timeout."""

    @model_validator(mode="after")
    def _ordered(self) -> ElasticitySpec:
        if self.min_workers > self.max_workers:
            raise ValueError(
                f"elasticity.min_workers {self.min_workers} is larger than elasticity.max_workers {self.max_workers}. "
                f"Set max_workers to at least {self.min_workers}."
            )
        return self


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


class GradientLogMode(StrEnum):
    AUTO = "auto"
    OFF = "off"


class SnapshotSpec(Frozen):
    """Snapshots in memory. With them, an unexpected death of a worker costs at most one step on CPU with an elementwise
    optimizer, else the steps between two copies of the state."""

    enabled: bool = True
    """Keep snapshots in shared memory, and a copy of each on another node if there is one."""
    budget: float = Field(0.01, gt=0, le=1, allow_inf_nan=False)
    """Fraction of the step time that snapshots may cost. They are taken, and copied to another node, as often as this
    allows, at most once per step."""
    gradient_log: GradientLogMode = GradientLogMode.AUTO
    """Send each step's gradients to another node, which repeats the update if this node is lost: a lost node then costs
    at most one step. auto: if the job can have it (on CPU, at least two nodes, built-in AdamW or another elementwise
    optimizer); its cost is not part of `budget`. off: a lost node costs the steps since the last
    copy."""


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
    """For `elasticity.min_workers` workers to start and to prepare (import, download, tokenise)."""
    form_s: float = Field(120.0, gt=0, le=86400, allow_inf_nan=False)
    """Time for a group to meet and to build its model."""
    restore_s: float = Field(300.0, gt=0, le=86400, allow_inf_nan=False)
    """Time for a group to read its state from memory or from a checkpoint."""
    save_s: float = Field(120.0, gt=0, le=86400, allow_inf_nan=False)
    """For the storage to accept more of a checkpoint. Then the checkpoint counts as not saved, and training goes on."""
    commit_s: float = Field(120.0, gt=0, le=86400, allow_inf_nan=False)
    """For a commit marker. The wait for the storage to list its checkpoints is `checkpoint.wait_s`."""


class RetrySpec(Frozen):
    """Failures of the user's code or of the whole job. A lost worker is not a failure: the group re-forms."""

    max_failures: int = Field(2, ge=0, le=10_000)
    """Number of restarts from the newest checkpoint, each only if steps were completed since the last failure."""
    max_recoveries: int = Field(1000, ge=0, le=10**9)
    """Number of re-formations after lost workers; then the job fails with the reason recovery_budget."""


class JobSpec(Frozen):
    """One training job."""

    name: str = Field("job", max_length=63, json_schema_extra={"pattern": JOB_NAME})
    """Letters, digits, and inner dashes, dots and underscores."""
    task: str = Field(LM_TASK, json_schema_extra={"pattern": whole(_TASK.pattern)})
    """`module:Name` of a task class; see docs/tasks.md."""
    code: CodeSpec = CodeSpec()
    secrets: Secrets = Field(default_factory=dict, max_length=64, json_schema_extra=VARIABLE_NAMES)
    """Environment variables of the workers whose values are not in the spec: `{HUB_TOKEN: {file: "/run/secrets/hub"}}`.
    Each is read on the worker's node when the worker starts, and is neither stored nor shown."""
    model: dict[str, Any] = Field(default_factory=dict)
    """Passed to the task. The built-in language model has the keys of `LanguageModelConfig`, a Hugging Face model those
    of `HuggingFaceConfig`."""
    data: dict[str, Any] = Field(default_factory=dict)
    """Passed to the task. The built-in tasks have the keys of `TextDataConfig`."""
    batch: BatchSpec = BatchSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    schedule: ScheduleSpec = ScheduleSpec()
    precision: Precision = Precision.FP32
    """Type of the forward and backward pass. With bf16 and fp16, parameters and reductions stay in fp32; fp16 adds
    dynamic loss scaling."""
    reduce_precision: Precision = Precision.FP32
    """Type in which gradients are summed, over a rank's micro-batches and between data-parallel ranks. bf16 and fp16
    halve the bytes sent and round every addition; fp16 adds dynamic loss scaling."""
    compile: bool = False
    """Compile each of the model's blocks with torch.compile. The first step of a worker then takes seconds to minutes
    longer."""
    stop: StopSpec = Field(examples=[{"steps": 1000}])
    """When training ends."""
    continue_from: ContinueFrom | None = None
    """Go on from a checkpoint of another job; null: begin at step 0. The steps count on from there, so `stop` names the
    last step of both. `shoal submit --from JOB@STEP` sets it."""
    init_from: str | None = Field(None, min_length=1, max_length=4096)
    """Begin with the weights of this safetensors file, or directory of them (an absolute path or fsspec URL that every
    node can reach), instead of those that the seed draws; step 0 and a fresh optimizer. Not with `continue_from`."""
    parallelism: Literal["auto"] | ParallelismSpec = "auto"
    """"auto": the planner chooses the layout for every world size. Or fixed degrees."""
    plan: ParallelPlan | None = None
    """How the task's model may be split; see docs/parallelism.md. The built-in language model has its own plan."""
    elasticity: ElasticitySpec = ElasticitySpec()
    worker: WorkerSpec = WorkerSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    validation: ValidationSpec = ValidationSpec()
    snapshot: SnapshotSpec = SnapshotSpec()
    health: HealthSpec = HealthSpec()
    retry: RetrySpec = RetrySpec()
    timeouts: TimeoutsSpec = TimeoutsSpec()
    priority: int = Field(0, ge=-1000, le=1000)
    """Jobs of higher priority get workers first, also those of jobs of lower priority; see docs/scheduling.md."""
    project: str = Field("default", max_length=63, json_schema_extra={"pattern": LABEL})
    """Whose share of the cluster the job uses; lower-case letters, digits and dashes."""
    user: str = Field("default", max_length=63, json_schema_extra={"pattern": USER})
    """Whose job it is, for the limits of jobs per user; letters, digits, dashes, dots, underscores and at signs. The
    client sets the login name. It is not verified."""
    labels: JobLabels = Field(default_factory=dict, max_length=32)
    """Labels that the user chooses, to find and to compare jobs: `{"sweep": "lr", "lr": "3e-4"}`. Names have at most 63
    letters, digits, dashes, dots and underscores; values at most 255 characters."""
    annotations: Annotations = Field(default_factory=dict, max_length=32)
    """Free text of the user, which is shown with the job and not searched: `{"why": "Is 3e-4 too much?"}`. Names as
    those of labels; values at most 4,096 characters."""
    sweep: SweepSpec | None = None
    """The sweep that the job belongs to; see docs/submitting.md. It also sets the label `sweep`."""
    finish_by: Moment | None = None
    """When the job should be done: seconds since 1970, or a time with its zone such as "2030-01-31T18:00:00Z". The job
    gets workers to make it, if that is possible; null: no deadline."""
    capacity: CapacityKind = CapacityKind.ANY
    """Only nodes that may be taken away at any time (spot), only others (on_demand), or any."""
    placement: Placement = Placement.PACK
    """Few nodes with many of the job's workers each (pack), or many nodes (spread)."""
    webhooks: tuple[WebhookSpec, ...] = Field((), max_length=MAX_WEBHOOKS)
    """Receivers of the job's events, at most 8; see docs/webhooks.md. The secrets that sign are the service's."""
    metrics: MetricsSpec = MetricsSpec()
    seed: int = Field(0, ge=0, lt=2**32)
    """Initial weights, sample order and dropout depend only on it."""
    deterministic: bool = False
    """Losses have the same bits at every world size and after every recovery; docs/determinism.md states the cost."""

    @model_validator(mode="after")
    def _has_the_label_of_its_sweep(self) -> JobSpec:
        if self.sweep is not None:
            add_label(self.sweep.name, self.labels)  # still unseen, so it may be changed
            self.model_fields_set.add("labels")
        return self

    @field_validator("name", "project", "user")
    @classmethod
    def _is_well_formed(cls, text: str, info: ValidationInfo) -> str:
        is_valid, characters = _CHARACTERS[str(info.field_name)]
        if not is_valid(text):
            raise ValueError(f"{info.field_name} {text!r} is not valid: use at most 63 {characters}.")
        return text

    @field_validator("precision", "reduce_precision", mode="before")
    @classmethod
    def _is_built(cls, precision: object, info: ValidationInfo) -> object:
        if isinstance(precision, str) and precision.startswith("fp8"):
            raise ValueError(
                f"{info.field_name} {precision} is not supported. It would need GPUs with fp8 matrix units (compute "
                "capability 8.9 or more), linear layers over scaled matrix products with a scale for every tensor or "
                "row, and collectives for fp8, which gloo does not have. Use bf16."
            )
        return precision

    @model_validator(mode="after")
    def _one_source(self) -> JobSpec:
        if both := sorted({*self.code.env} & {*self.secrets}):
            raise ValueError(f"{', '.join(both)}: in code.env and in secrets. Name each variable in one of them.")
        return self

    @field_validator("task")
    @classmethod
    def _task_is_a_path(cls, task: str) -> str:
        if not _TASK.fullmatch(task):
            raise ValueError(f'task {task!r} must have the form "module:Name", for example "{LM_TASK}".')
        return task
