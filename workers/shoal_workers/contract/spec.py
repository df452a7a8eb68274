"""JobSpec: what a user asks for. Validated once at the edge, then passed, never looked up.

`spec_errors.parse_spec` is the way in: it also checks `model` and `data` of the built-in task.
Cross-field rules carry their arithmetic in the message.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from shoal_workers.contract.base import Frozen
from shoal_workers.contract.layout import ContextMethod, Recompute, Schedule, ShardLevel
from shoal_workers.contract.model.lm import LM_TASK
from shoal_workers.contract.model.plan import ParallelPlan

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_TASK = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
PositiveInt = Annotated[int, Field(ge=1, le=2**53)]


class Precision(StrEnum):
    """Floating-point types that a model computes in, or that gradients travel in."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class CodeSpec(Frozen):
    """Where the user's own modules come from."""

    working_dir: str | None = Field(None, max_length=4096)
    """A directory on the machine that submits; packed at submit, so later edits do not change a running job."""
    archive: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    """The sha256 of an archive that was uploaded before (`PUT /v1/code/{sha256}`). The client fills it in."""


class BatchSpec(Frozen):
    """The global batch never changes, whatever the world size."""

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
                f"+ {self.global_size % self.micro_size}. Use a global_size of {hint}, or another micro_size."
            )
        return self

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per optimizer step, over all ranks."""
        return self.global_size // self.micro_size


class OptimizerSpec(Frozen):
    """AdamW (Loshchilov & Hutter 2019). A task that defines `build_optimizer` overrides it."""

    name: Literal["adamw"] = "adamw"
    """The only one built in."""
    lr: float = Field(3e-4, gt=0, le=1e3, allow_inf_nan=False)
    """Peak learning rate."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the mean of the gradients."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of the mean of their squares."""
    eps: float = Field(1e-8, gt=0, le=1)
    """Added to the root of the mean square."""
    weight_decay: float = Field(0.1, ge=0, le=1e3)
    """Applied to parameters of two or more dimensions only."""
    clip_norm: float | None = Field(1.0, gt=0, allow_inf_nan=False)
    """Gradients are scaled down to this global L2 norm; null: never."""
    fused: bool | Literal["auto"] = "auto"
    """One kernel for the whole update; "auto": where the parameters lie on a GPU. It rounds in other places than the
    plain one, so `deterministic` refuses it, and "auto" means false there."""


class ScheduleSpec(Frozen):
    """Learning rate over the steps: linear warm-up, then the named decay until the last step."""

    name: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the decay after the warm-up; constant: none."""
    warmup_steps: int = Field(10, ge=0, le=2**53)
    """Optimizer steps over which the learning rate rises to its peak."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """The decay ends at this fraction of the peak learning rate."""


class StopSpec(Frozen):
    """Exactly one of the three."""

    steps: PositiveInt | None = None
    """Optimizer steps."""
    tokens: PositiveInt | None = None
    """Tokens (samples, for a task without tokens) seen; rounded up to whole steps."""
    epochs: float | None = Field(None, gt=0, le=1e9, allow_inf_nan=False)
    """Passes over the training split; rounded up to whole steps."""

    @model_validator(mode="after")
    def _exactly_one(self) -> StopSpec:
        given = [k for k in ("steps", "tokens", "epochs") if getattr(self, k) is not None]
        if len(given) != 1:
            raise ValueError(
                f"stop needs exactly one of steps, tokens, epochs: it has {' and '.join(given) or 'none'}."
            )
        return self


class ParallelismSpec(Frozen):
    """Fixed degrees. A world of another size than they multiply to is planned as `otherwise` says."""

    dp_replicate: PositiveInt = 1
    """Replicas of the sharded model (HSDP)."""
    dp_shard: PositiveInt | Literal["auto"] = "auto"
    """Ways to shard; "auto" takes what the other degrees leave of the world size."""
    tp: PositiveInt = 1
    """Tensor parallel, with sequence parallel activations."""
    pp: PositiveInt = 1
    """Pipeline ranks."""
    cp: PositiveInt = 1
    """Context parallel: ways to split each sequence."""
    ep: PositiveInt = 1
    """Expert parallel; must divide dp_shard."""
    shard: ShardLevel | Literal["auto"] = "auto"
    """What dp_shard cuts: the optimizer's state (ZeRO-1), also gradients (ZeRO-2), also parameters: full (ZeRO-3)."""
    schedule: Schedule | Literal["auto"] = "auto"
    """Of the pipeline."""
    recompute: Recompute | Literal["auto"] = "auto"
    """Activation checkpointing."""
    context: ContextMethod | Literal["auto"] = "auto"
    """How attention sees other ranks' tokens."""
    offload: bool = False
    """Keep parameters and optimizer state in CPU memory between their uses."""
    otherwise: Literal["replan", "idle"] = "replan"
    """A world that the degrees do not fit (a shard was lost): choose other degrees, or let the ranks idle that are too
    many for the same ones."""

    @property
    def model_degree(self) -> int:
        """Ranks that one data rank's work is spread over."""
        return self.tp * self.pp * self.cp

    @property
    def unit(self) -> int:
        """World sizes that the degrees fit are multiples of it; with a fixed dp_shard, it is the only one."""
        return self.model_degree * self.dp_replicate * (1 if self.dp_shard == "auto" else self.dp_shard)


class ElasticitySpec(Frozen):
    """How far the job may shrink and grow."""

    min_workers: int = Field(1, ge=1, le=100_000)
    """Below this many shards the job does not train; it waits for capacity."""
    max_workers: int = Field(1, ge=1, le=100_000)
    """The job never uses more shards than this."""
    standby: int = Field(0, ge=0, le=1_000)
    """Warm spare processes kept ready to take a dead rank's place."""
    wait_s: float = Field(1800.0, gt=0, le=30 * 86400, allow_inf_nan=False)
    """Seconds that a running job may wait for `min_workers` before it fails with reason capacity_timeout."""

    @model_validator(mode="after")
    def _ordered(self) -> ElasticitySpec:
        if self.min_workers > self.max_workers:
            raise ValueError(
                f"elasticity.min_workers {self.min_workers} is larger than elasticity.max_workers {self.max_workers}. "
                f"Set max_workers to at least {self.min_workers}."
            )
        return self


class WorkerSpec(Frozen):
    """What one shard reserves."""

    cpus: float = Field(1.0, ge=0, le=4096, allow_inf_nan=False)
    """CPU cores; a fraction shares one."""
    gpus: int = Field(0, ge=0, le=1)
    """0: gloo on CPU. 1: NCCL on one GPU."""
    memory_gib: float = Field(0.0, ge=0, le=65536, allow_inf_nan=False)
    """Memory reserved in the cluster's scheduler, GiB; 0: not reserved."""


class CheckpointSpec(Frozen):
    """Durable, sharded, asynchronous checkpoints."""

    url: str | None = Field(None, max_length=4096)
    """An fsspec URL or a directory that every node can reach. Default: under the service's own state directory."""
    every_steps: PositiveInt | None = 100
    """Save after every so many steps; null: by time only."""
    every_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Save when so many seconds have passed since the last save; null: by steps only."""
    keep: int = Field(3, ge=1, le=10_000)
    """Newest committed checkpoints that retention keeps; the newest good one is never deleted."""


class SnapshotSpec(Frozen):
    """The RAM tier: what makes an unexpected death cost at most one step."""

    enabled: bool = True
    """Keep snapshots in shared memory, and a copy on another node where there is one."""
    budget: float = Field(0.01, gt=0, le=1, allow_inf_nan=False)
    """Share of the step time that snapshots may cost; they are taken, and copied to another node, as often as it
    allows, at best after each step."""


class NonFinitePolicy(StrEnum):
    STOP = "stop"
    SKIP = "skip"
    ROLL_BACK = "roll_back"


class HealthSpec(Frozen):
    """When a worker counts as sick, and what is done about it."""

    hang_factor: float = Field(10.0, ge=2, le=1e6, allow_inf_nan=False)
    """A group whose progress stands still for so many median steps hangs ..."""
    hang_floor_s: float = Field(30.0, gt=0, le=86400, allow_inf_nan=False)
    """... but never before so many seconds."""
    non_finite: NonFinitePolicy = NonFinitePolicy.STOP
    """A loss or gradient that is not finite: stop the job; skip the step; or roll back to the newest durable
    checkpoint and skip it on the way."""
    max_non_finite: int = Field(3, ge=1, le=10_000)
    """So many steps in a row may be skipped, or rollbacks made, before the job stops all the same."""
    straggler_factor: float | None = Field(2.0, gt=1, le=1e6, allow_inf_nan=False)
    """A rank that computes longer than so many times the group's median is a straggler; null: never."""
    straggler_steps: int = Field(20, ge=1, le=1_000_000)
    """... for so many steps in a row; then it is replaced if a spare or another node can take its place."""
    replay_every_steps: PositiveInt | None = None
    """Silent corruption: after every so many steps each rank replays a micro-batch of another and compares the bits;
    null: never."""
    probation_s: float = Field(600.0, gt=0, le=30 * 86400, allow_inf_nan=False)
    """A suspected node is not used again until a test of it passes, which is tried first after so many seconds."""


class ValidationSpec(Frozen):
    """Loss on the validation split, where the task has one."""

    every_steps: PositiveInt | None = None
    """Validate after every so many steps; it is always done after the last one."""
    samples: int = Field(256, ge=0, le=2**53)
    """At most so many samples, the first ones of the split; 0: never validate."""


class RetrySpec(Frozen):
    """Failures of the user's code or of the job as a whole. A lost worker is not a failure: the group re-forms."""

    max_failures: int = Field(2, ge=0, le=10_000)
    """Starts again from the newest checkpoint this often, if steps were made since the last failure."""
    max_recoveries: int = Field(1000, ge=0, le=10**9)
    """Re-formations after lost workers before the job fails with reason recovery_budget."""


class JobSpec(Frozen):
    """One training job."""

    name: str = Field("job", max_length=63)
    """Lower-case letters, digits and dashes."""
    task: str = LM_TASK
    """`module:Name` of a task class; see docs/tasks.md."""
    code: CodeSpec = CodeSpec()
    model: dict[str, Any] = Field(default_factory=dict)
    """Passed to the task. For the built-in language model: see below."""
    data: dict[str, Any] = Field(default_factory=dict)
    """Passed to the task. For the built-in language model: see below."""
    batch: BatchSpec = BatchSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    schedule: ScheduleSpec = ScheduleSpec()
    precision: Precision = Precision.FP32
    """fp32; or bf16 or fp16: parameters and reductions in fp32, forward and backward in the shorter type, fp16 with
    dynamic loss scaling."""
    reduce_precision: Precision = Precision.FP32
    """Type in which gradients are summed, over a rank's micro-batches and between data-parallel ranks; bf16 and fp16
    halve what is sent and round every addition. fp16 brings dynamic loss scaling with it."""
    compile: bool = False
    """Compile each of the model's blocks with torch.compile; the first step of a process then takes seconds to
    minutes longer."""
    stop: StopSpec = Field(examples=[{"steps": 1000}])
    """When the job is done."""
    parallelism: Literal["auto"] | ParallelismSpec = "auto"
    """"auto": the planner chooses the layout for every world size. Or fixed degrees."""
    plan: ParallelPlan | None = None
    """How the task's model may be cut; see docs/parallelism.md. The built-in language model brings its own."""
    elasticity: ElasticitySpec = ElasticitySpec()
    worker: WorkerSpec = WorkerSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    validation: ValidationSpec = ValidationSpec()
    snapshot: SnapshotSpec = SnapshotSpec()
    health: HealthSpec = HealthSpec()
    retry: RetrySpec = RetrySpec()
    priority: int = Field(0, ge=-1000, le=1000)
    """Larger starts first; equal ones first come first served."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Initial weights, sample order and dropout are pure functions of it."""
    deterministic: bool = False
    """Losses are the same bits for every world size and whatever happens; docs/determinism.md says what it costs."""

    @field_validator("name")
    @classmethod
    def _name_is_a_label(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError(f"name {name!r} must be lower-case letters, digits and inner dashes, at most 63.")
        return name

    @field_validator("precision", "reduce_precision", mode="before")
    @classmethod
    def _is_built(cls, precision: object, info: ValidationInfo) -> object:
        if isinstance(precision, str) and precision.startswith("fp8"):
            raise ValueError(
                f"{info.field_name} {precision} is not built. It would need GPUs with fp8 matrix units (compute "
                "capability 8.9 or more), linear layers over scaled matrix products with a scale for every tensor or "
                "row, and collectives that know fp8, which gloo does not. Use bf16."
            )
        return precision

    @field_validator("task")
    @classmethod
    def _task_is_a_path(cls, task: str) -> str:
        if not _TASK.fullmatch(task):
            raise ValueError(f'task {task!r} must read "module:Name", for example "{LM_TASK}".')
        return task
