"""JobSpec: what a user requests. Validated once at the edge of the system, then passed as a value.

One class per section, all in this file: it is long because a spec is one document, which its reader sees whole and in
this order in docs/reference/spec.md. `placing` has what a worker reserves and where it runs, `layout` the degrees of
the parallel axes, `optimizers` and `schedules` the optimizer and its rate (also under their old path here, which
pickles of earlier releases name). Use `checks.spec_errors.parse_spec` to make a spec: it also checks `model` and `data`
of the built-in tasks. Messages of rules over several fields contain the arithmetic. No secret is in a spec, only where
it is: `engine/process/secrets.py` reads those of a job on the worker's node, the control plane those of webhooks.

`TrainingSettings` are the part that a running job may change at a step boundary, without losing a step:

PATCH -> spec of the job -> Directive -> attempt machine: the group yields -> Assignment -> engine
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.config import JsonDict

from shoal_workers.contract.base import Frozen, PositiveInt, exactly_one_of, if_set, whole
from shoal_workers.contract.layout import ParallelismSpec
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.media import MediaSpec
from shoal_workers.contract.mixture_weights import WeightChange
from shoal_workers.contract.model import (
    HF_TASKS,
    LM_TASK,
    TEXT_TASKS,
    LanguageModelConfig,
    ParallelPlan,
    hugging_face_of,
    plan_of_hugging_face,
    plan_of_language_model,
)
from shoal_workers.contract.optimizers import OptimizerSpec
from shoal_workers.contract.placing import (
    JOB_NAME,
    LABEL,
    USER,
    Annotations,
    CapacityKind,
    JobLabels,
    Moment,
    Placement,
    WorkerSpec,
    is_job_name,
    is_label,
    is_user,
)
from shoal_workers.contract.schedules import ScheduleSpec

MAX_VARIABLES = 128
MAX_ENV_CHARS = 32_768
_OF_THE_SERVICE = ("SHOAL_", "RAY_")


def _is_variable(name: str) -> str:
    if not (name.isascii() and name.replace("_", "a").isalnum() and not name[0].isdigit()) or len(name) > 255:
        raise ValueError(f"{name[:80]!r} is not the name of a variable: use letters, digits and underscores.")
    if name.startswith(_OF_THE_SERVICE):
        raise ValueError(f"{name}: the service sets variables that begin with SHOAL_ or RAY_. Choose another name.")
    return name


def _is_requirement(text: str) -> str:
    if not _REQUIREMENT.fullmatch(text.strip()):
        raise ValueError(
            f'code.pip {text[:80]!r}: use a name, with versions or not, for example "einops==0.8.1". Options, URLs '
            "and paths are not accepted: name an index in pip's own configuration on the nodes, files in code.wheels."
        )
    return text.strip()


_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9._, -]+\])?[ A-Za-z0-9.,<>=!~*+()-]*(;[^/\\]*)?")
Requirement = Annotated[
    str,
    Field(min_length=1, max_length=500, json_schema_extra={"pattern": whole(rf"\s*{_REQUIREMENT.pattern}\s*")}),
    AfterValidator(_is_requirement),
]
_VARIABLE = whole(rf"(?!{'|'.join(_OF_THE_SERVICE)})[A-Za-z_][A-Za-z0-9_]{{0,254}}")
VARIABLE_NAMES: JsonDict = {"propertyNames": {"pattern": _VARIABLE}}
"""Rule for the JSON Schema of an object whose keys are names of environment variables."""
VariableName = Annotated[str, AfterValidator(_is_variable), WithJsonSchema({"type": "string", "pattern": _VARIABLE})]


class CodeSpec(Frozen):
    """Where the user's own modules come from, and the variables of the processes that run them."""

    model_config = ConfigDict(
        json_schema_extra=if_set("wheels", {"required": ["pip"], "properties": {"pip": {"minItems": 1}}})
    )

    working_dir: str | None = Field(None, max_length=4096)
    """A directory on the submitting machine. It is packed at submission; later edits do not change a running job."""
    archive: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    """The sha256 of an uploaded archive (`PUT /v1/code/{sha256}`). The client sets it."""
    env: dict[VariableName, str] = Field(
        default_factory=dict, max_length=MAX_VARIABLES, json_schema_extra=VARIABLE_NAMES
    )
    """Environment variables of the workers, at most 32,768 characters in all. They are stored and shown with the spec:
    what must stay secret belongs into `secrets`."""

    pip: tuple[Requirement, ...] = Field((), max_length=100)
    """Packages of the workers, as pip's requirements: ["einops==0.8.1"]. Installed once per node, into a directory that
    only processes of jobs with the same list see. Only if the server allows it (SHOAL_ALLOW_PIP)."""
    wheels: str | None = Field(None, max_length=4096, json_schema_extra={"pattern": "^/"})
    """A directory of wheels that every node can read: `pip` takes packages from there alone, and needs no network."""

    @model_validator(mode="after")
    def _has_packages_for_wheels(self) -> CodeSpec:
        if self.wheels is not None and not self.wheels.startswith("/"):
            raise ValueError(f"code.wheels {self.wheels!r} must be an absolute directory that every node can read.")
        if self.wheels is not None and not self.pip:
            raise ValueError("code.wheels is set, and code.pip names no package. Name those that the task needs.")
        return self

    @model_validator(mode="after")
    def _is_small(self) -> CodeSpec:
        size = sum(len(name) + len(value) + 2 for name, value in self.env.items())
        if size > MAX_ENV_CHARS:
            raise ValueError(
                f"code.env has {size} characters; {MAX_ENV_CHARS} are allowed. Put large values into a file of "
                "code.working_dir."
            )
        return self


class SecretSource(Frozen):
    """Where the value of a secret is on the nodes: exactly one of the keys."""

    model_config = ConfigDict(json_schema_extra=exactly_one_of("file", "env"))

    file: str | None = Field(None, max_length=4096, json_schema_extra={"pattern": "^/"})
    """Absolute path of a file on the worker's node, of 64 KiB at most. A line end at its end is left out."""
    env: VariableName | None = None
    """A variable in the environment of the Ray node."""

    @model_validator(mode="after")
    def _is_one(self) -> SecretSource:
        if (self.file is None) == (self.env is None):
            raise ValueError('a secret has exactly one of file and env, for example {file: "/run/secrets/hub"}.')
        if self.file is not None and not self.file.startswith("/"):
            raise ValueError(f"the file of a secret, {self.file!r}, must be an absolute path on the worker's node.")
        return self


Secrets = dict[VariableName, SecretSource]


class StopSpec(Frozen):
    """When training ends. Set exactly one of the three."""

    model_config = ConfigDict(json_schema_extra=exactly_one_of("steps", "tokens", "epochs"))

    steps: PositiveInt | None = None
    """Optimizer steps."""
    tokens: PositiveInt | None = None
    """Tokens trained on (samples, if the task has no tokens); rounded up to whole steps."""
    epochs: float | None = Field(None, gt=0, le=1e9, allow_inf_nan=False)
    """Passes over the training split; rounded up to whole steps."""

    @model_validator(mode="after")
    def _exactly_one(self) -> StopSpec:
        given = [k for k in ("steps", "tokens", "epochs") if getattr(self, k) is not None]
        if len(given) != 1:
            raise ValueError(
                f"stop must contain exactly one of steps, tokens and epochs; it has {' and '.join(given) or 'none'}."
            )
        return self


class ValidationSpec(Frozen):
    """Loss on the validation split, if the task has one."""

    every_steps: PositiveInt | None = None
    """Steps between two validations. There is always one after the last step."""
    samples: int = Field(256, ge=0, le=2**53)
    """Maximum number of samples, from the start of the split; 0: never validate."""
    metric: str = Field("loss", min_length=1, max_length=63)
    """What makes a validation better: the loss, or a metric of the task's own by its name. For `patience` and
    `checkpoint.keep_best`."""
    mode: Literal["min", "max"] = "min"
    """Whether smaller values of `metric` are better, or larger ones."""
    patience: PositiveInt | None = None
    """Stop early after this many validations in a row without an improvement; null: never."""
    min_delta: float = Field(0.0, ge=0, allow_inf_nan=False)
    """An improvement by this much or less does not count for `patience`."""


class ContinueFrom(Frozen):
    """A job that goes on from another one's checkpoint: model, optimizer, step and position in the data. Its own
    checkpoints go to its own directory; those of the other job are only read."""

    job: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")
    """The id of the other job, in any state."""
    step: int | None = Field(None, ge=1, le=2**53)
    """Completed steps of the checkpoint; null: the newest one when the job is submitted."""
    checkpoint: str | None = Field(None, max_length=100)
    """The name of the checkpoint's directory. The service sets it."""
    url: str | None = Field(None, max_length=8192)
    """Where it is. The service sets it."""

    @model_validator(mode="after")
    def _is_a_name(self) -> ContinueFrom:
        if self.checkpoint is not None and CheckpointName.parse(self.checkpoint) is None:
            raise ValueError(
                f"continue_from.checkpoint {self.checkpoint!r} is not the name of a checkpoint. Leave it out: the "
                "service sets it."
            )
        return self

    @property
    def name(self) -> CheckpointName | None:
        """The parsed `checkpoint`; None: no service has set it, because there is none (torchrun)."""
        return None if self.checkpoint is None else CheckpointName.parse(self.checkpoint)


SWEEP_LABEL = "sweep"
"""Each job of a sweep has this label; its value is the name of the sweep."""


SWEEP_NAME = r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"


class SweepSpec(Frozen):
    """Jobs of one project with the same `sweep.name` are a sweep. `shoal sweep` sets it."""

    name: str = Field(pattern=SWEEP_NAME)
    """Letters, digits, and inner dashes, dots and underscores. Also the value of the job's label `sweep`."""
    limit: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """The job starts only while fewer jobs of the sweep than this have workers; null: no limit."""
    prune: Literal["median", "halving"] | None = None
    """median: the job is ended when its validation loss at a step is worse than the median of the other jobs of the
    sweep at this step; its training loss, if it does not validate under way. halving: the job is ended when it is not
    among the best 1 / `reduction` of those that have reached the same rung. null: never."""
    warmup_steps: int = Field(20, ge=1, le=2**53)
    """The job is not ended for what it has reached before this step. It is the first rung of halving."""
    reduction: int = Field(3, ge=2, le=100)
    """N of halving: one job in N passes a rung, and the next rung is at N times as many steps."""


def add_label(name: str, labels: dict[str, str]) -> None:
    """Gives a job the label of its sweep. Raises ValueError if the label has another value."""
    if labels.setdefault(SWEEP_LABEL, name) != name:
        raise ValueError(
            f"labels.{SWEEP_LABEL} is {labels[SWEEP_LABEL]!r}, and sweep.name is {name!r}. Leave the label out: it is "
            "set from sweep.name."
        )


_HOOK = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class MetricsSpec(Frozen):
    """Where the job's metrics go besides the service."""

    hook: str | None = Field(None, max_length=255)
    """`module:Name` of a class or function, in the job's code or installed on the nodes, that makes a hook:
    `shoal_workers.metrics_hook:mlflow`, `shoal_workers.metrics_hook:wandb`, or your own (docs/metrics-hook.md). It runs
    in a process of its own beside the workers. null: none."""

    @field_validator("hook")
    @classmethod
    def _is_a_path(cls, hook: str | None) -> str | None:
        if hook is not None and not _HOOK.fullmatch(hook):
            raise ValueError(
                f'metrics.hook {hook!r} must have the form "module:Name", for example '
                '"shoal_workers.metrics_hook:mlflow".'
            )
        return hook


MAX_WEBHOOKS = 8
"""Largest number of webhooks of one job."""
SECRET_VARIABLE = "SHOAL_WEBHOOK_SECRET_"
"""Prefix of the service's environment variables that may hold the secret of a webhook."""
_WEBHOOK_SECRET = re.compile(rf"env:{SECRET_VARIABLE}[A-Z0-9_]{{1,64}}|file:[A-Za-z0-9][A-Za-z0-9._-]{{0,63}}")
_EVENT_PATTERN = re.compile(r"\*|[a-z_]+(?:\.(?:\*|[a-z_]+))?")
_WEBHOOK_URL = whole(r"apprise:|[hH][tT][tT][pP][sS]?://[^\s@/?#\\]+([/?#][!-~]*)?")
APPRISE = "apprise:"
"""The `url` of a webhook for mail or chat. Its secret is then the URL of the account or chat, as apprise writes it."""
EventPattern = Annotated[str, Field(max_length=64, json_schema_extra={"pattern": whole(_EVENT_PATTERN.pattern)})]


def is_reference(secret: str) -> bool:
    """Whether the text has the form that names a secret of the service."""
    return _WEBHOOK_SECRET.fullmatch(secret) is not None


class WebhookSpec(Frozen):
    """A receiver of events over HTTP."""

    url: str = Field(max_length=2048, json_schema_extra={"pattern": _WEBHOOK_URL})
    """Address of the receiver, http or https, without a user name and a password. Redirects are not followed. Or
    `apprise:`, for mail and chat: `secret` then names the apprise URL."""
    events: tuple[EventPattern, ...] = Field(("job.state", "incident.*"), min_length=1, max_length=64)
    """Types of events (docs/reference/events.md); `incident.*` is every type that begins so, `*` every type."""
    secret: str = Field(max_length=96, json_schema_extra={"pattern": whole(_WEBHOOK_SECRET.pattern)})
    """Where the service finds the secret that signs, or the apprise URL: `env:SHOAL_WEBHOOK_SECRET_NAME`, an
    environment variable of the service, or `file:NAME`, a file in its `webhook_secrets_dir`."""

    @property
    def receiver(self) -> str:
        """Scheme, host and port of the URL, without its path, which may contain a token. For apprise:
        `apprise:` and the name of the secret."""
        if self.is_apprise:
            return f"{APPRISE}{self.secret}"
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}"

    @property
    def is_apprise(self) -> bool:
        return self.url == APPRISE

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        if url == APPRISE:
            return url
        try:
            parts = urlsplit(url)
            is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_usable = False
        if not is_usable or not url.isascii() or not url.isprintable() or " " in url:
            raise ValueError(
                "is not a valid URL of a receiver: use http:// or https:// with a host, and no spaces; or apprise: for "
                "mail and chat, with the name of a secret that is the apprise URL."
            )
        if parts.username is not None or parts.password is not None:
            raise ValueError("has a user name or a password: receivers check the signature instead.")
        return url

    @field_validator("events")
    @classmethod
    def _are_patterns(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            if not _EVENT_PATTERN.fullmatch(pattern):
                raise ValueError(f'{pattern!r} must be a type of event, such as "job.state", or "incident.*", or "*".')
        return patterns

    @field_validator("secret")
    @classmethod
    def _is_a_reference(cls, secret: str) -> str:
        if not is_reference(secret):
            raise ValueError(
                f"must be env:{SECRET_VARIABLE}NAME or file:NAME; it names a secret of the service and never is one."
            )
        return secret


_INSIDE = r"(?!.*(?:^|/)\.\.(?:/|$))[^/\x00][^\x00]*"
_MODULE = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", re.ASCII)
_TASK = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*")
_CHARACTERS = {
    "name": (is_job_name, "letters, digits, and inner dashes, dots and underscores"),
    "project": (is_label, "lower-case letters, digits and inner dashes"),
    "user": (is_user, "letters, digits, and inner dashes, dots, underscores and at signs"),
}


class Precision(StrEnum):
    """Floating-point types that a model computes in, or that gradients travel in."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class BatchSync(StrEnum):
    """Over which samples a BatchNorm normalises."""

    MICRO_BATCH = "micro_batch"
    GLOBAL = "global"


class BatchSpec(Frozen):
    """The global batch is the same at every world size."""

    global_size: PositiveInt = 32
    """Samples per optimizer step, over all ranks."""
    micro_size: PositiveInt = 4
    """Samples per forward and backward pass on one rank. Must divide `global_size`."""
    num_workers: int = Field(0, ge=0, le=256, exclude_if=lambda value: value == 0)
    """Processes of each rank that read and collate samples ahead of the training thread, as those of a DataLoader. 0:
    the training thread reads, which suits data in memory. Samples, order and losses are the same."""
    prefetch_factor: int = Field(2, ge=1, le=256, exclude_if=lambda value: value == 2)
    """Micro-batches that each of these processes reads ahead."""
    sync: BatchSync = Field(BatchSync.MICRO_BATCH, exclude_if=lambda value: value is BatchSync.MICRO_BATCH)
    """Over which samples a BatchNorm normalises in training. micro_batch: each micro-batch on its own, as in a plain
    loop. global: the whole global batch, as SyncBatchNorm; a rank then computes all of its micro-batches in one pass,
    so it needs the memory of its whole share. On the data axes, without dropout and other random numbers in the
    forward pass; see docs/tasks.md."""

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

    @model_validator(mode="after")
    def _reads_in_one_pass(self) -> BatchSpec:
        if self.num_workers and self.sync is BatchSync.GLOBAL:
            raise ValueError(
                f"batch.num_workers is {self.num_workers} and batch.sync is global: a rank reads the samples of its "
                "whole share of a step at once, on the training thread. Set num_workers to 0, or sync to micro_batch."
            )
        return self

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per optimizer step, over all ranks."""
        return self.global_size // self.micro_size


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
    """Number of re-formations after lost workers; then the job fails with the reason recovery_budget."""


class Launcher(StrEnum):
    """Whose environment the script's processes get."""

    TORCHRUN = "torchrun"
    ACCELERATE = "accelerate"
    DEEPSPEED_ENV = "deepspeed_env"
    PYTHON = "python"
    RAY_TRAIN = "ray_train"


class ProgressSource(StrEnum):
    """Where the steps, the curves and the remaining time of a script come from."""

    AUTO = "auto"
    HOOK = "hook"
    TENSORBOARD = "tensorboard"
    NONE = "none"


class ProgramFile(Frozen):
    """What is run as `__main__`, with its arguments."""

    model_config = ConfigDict(json_schema_extra=exactly_one_of("file", "module"))

    file: str | None = Field(None, min_length=1, max_length=4096, json_schema_extra={"pattern": whole(_INSIDE)})
    """Path of the script below `code.working_dir`."""
    module: str | None = Field(None, max_length=255, json_schema_extra={"pattern": whole(_MODULE.pattern)})
    """Name of a module that is run as with `python -m`."""
    args: tuple[Annotated[str, Field(max_length=8192)], ...] = Field((), max_length=1000)
    """Arguments of the program."""

    @model_validator(mode="after")
    def _is_one(self) -> ProgramFile:
        if (self.file is None) == (self.module is None):
            raise ValueError("a program has exactly one of file and module, for example {file: train.py}.")
        if self.file is not None and not re.fullmatch(_INSIDE, self.file):
            raise ValueError(
                f"file {self.file!r} must be a path below code.working_dir, without .. and not absolute, for example "
                "train.py."
            )
        if self.module is not None and not _MODULE.fullmatch(self.module):
            raise ValueError(f"module {self.module!r} is not the name of a module, for example package.train.")
        return self

    @property
    def words(self) -> str:
        """The program as a user types it, without its arguments: `train.py`, or `-m package.train`."""
        return self.file if self.file is not None else f"-m {self.module}"


class LoopSpec(ProgramFile):
    """A program that keeps its own loop and gives it to Shoal with `shoal.run(train)`: the function is called again, in
    the same process, when the group changes, and what it tracks comes from memory; see docs/loops.md."""


class ScriptSpec(ProgramFile):
    """A program that trains by itself. Shoal starts one process of it per worker, as torchrun does. When one is lost,
    it starts the group again with as many workers as there are. The program goes on from its own checkpoint; see
    docs/porting.md."""

    launcher: Launcher = Launcher.TORCHRUN
    """Whose environment the processes get. torchrun: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and the
    other variables that torchrun documents; accelerate: also those of `accelerate launch`; deepspeed_env: also
    LOCAL_SIZE, CROSS_RANK and CROSS_SIZE, which DeepSpeed's launcher sets; python: none of them, for a script that is
    not distributed, with one worker. ray_train: those of torchrun, for a script with a `TorchTrainer` of Ray Train:
    rank 0 runs it, and `trainer.fit()` trains on every worker."""
    grace_s: float = Field(10.0, ge=0, le=3600, allow_inf_nan=False)
    """Seconds that a process has between SIGTERM and SIGKILL when its group ends: at a death, a resize, a pause. A
    script that saves on SIGTERM needs as long as a save takes; one without a handler ends at once."""
    progress: ProgressSource = ProgressSource.AUTO
    """Where steps, curves and the remaining time come from. auto: what `shoal.log` says, and as long as it says
    nothing, the TensorBoard event files that rank 0 writes below the working directory, the checkpoint directory, or
    the one that SHOAL_TENSORBOARD names; hook: `shoal.log` only; tensorboard: event files only; none: neither."""


KEYS_OF_TASKS = (
    *("task", "model", "data", "batch", "optimizer", "schedule", "precision", "module_precision", "reduce_precision"),
    *("compile", "stop", "init_from", "parallelism", "plan", "validation", "snapshot", "deterministic"),
)
"""Keys of a spec that say what a task trains and how. A script reads none of them."""
KEYS_OF_TASKS_ONLY = tuple(key for key in KEYS_OF_TASKS if key not in ("snapshot", "parallelism"))
"""The same for a loop, whose tracked state Shoal keeps, and whose models it may shard."""


class JobSpec(Frozen):
    """One training job: a task, which Shoal trains, a loop of the user's own, which Shoal runs in place, or a script,
    which trains by itself."""

    model_config = ConfigDict(
        json_schema_extra=exactly_one_of("stop", "script", "loop")
        | {
            "allOf": [
                if_set(program, {"properties": {key: {"type": "null"} for key in keys}})
                for program, keys in (("script", KEYS_OF_TASKS), ("loop", KEYS_OF_TASKS_ONLY))
            ]
        }
    )

    name: str = Field("job", max_length=63, json_schema_extra={"pattern": JOB_NAME})
    """Letters, digits, and inner dashes, dots and underscores."""
    task: str = Field(LM_TASK, json_schema_extra={"pattern": whole(_TASK.pattern)})
    """`module:Name` of a task class; see docs/tasks.md."""
    script: ScriptSpec | None = None
    """A script instead of a task. `stop`, `model`, `data` and all that says how a task is trained are then the
    script's own, and not set here."""
    loop: LoopSpec | None = None
    """A program with a loop of its own instead of a task. It decides what it trains, how, and when it ends."""
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
    module_precision: dict[Annotated[str, Field(min_length=1, max_length=255)], Precision] = Field(
        default_factory=dict, max_length=64
    )
    """Another type for some modules, by patterns of their names as `model.named_modules()` has them; `*` stands for any
    characters, also dots: {"*norm*": "fp32", "head": "fp32"}. It holds for all modules inside. What a module gets and
    returns is cast; the results of the last module of `plan.last` are not cast back."""
    reduce_precision: Precision = Precision.FP32
    """Type in which gradients are summed, over a rank's micro-batches and between data-parallel ranks. bf16 and fp16
    halve the bytes sent and round every addition; fp16 adds dynamic loss scaling."""
    compile: bool = False
    """Compile each of the model's blocks with torch.compile. The first step of a worker then takes seconds to minutes
    longer."""
    stop: StopSpec | None = Field(None, examples=[{"steps": 1000}])
    """When training ends. Required for a task; a loop or a script decides itself."""
    continue_from: ContinueFrom | None = None
    """Go on from a checkpoint of another job; null: begin at step 0. The steps count on from there, so `stop` names the
    last step of both. A script gets a copy of the files that another script has left in its SHOAL_CHECKPOINT_DIR.
    `shoal submit --from JOB@STEP` sets it."""
    init_from: str | None = Field(None, min_length=1, max_length=4096)
    """Begin with the weights of this safetensors file, or directory of them (an absolute path or fsspec URL that every
    node can reach), instead of those that the seed draws; step 0 and a fresh optimizer. Not with `continue_from`."""
    parallelism: Literal["auto"] | ParallelismSpec = "auto"
    """"auto": the planner chooses the layout for every world size. Or fixed degrees. Every rank of a loop has the whole
    model, unless dp_shard or dp_replicate is fixed; see docs/loops.md."""
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
    media: MediaSpec = Field(MediaSpec(), exclude_if=lambda value: value == MediaSpec())
    seed: int = Field(0, ge=0, lt=2**32)
    """Initial weights, sample order and dropout depend only on it."""
    deterministic: bool = False
    """Losses have the same bits at every world size and after every recovery; docs/determinism.md states the cost."""

    # no annotation of the result: it would take the place of the model's JSON Schema
    @model_serializer(mode="wrap")
    def _without_what_it_does_not_read(self, handler: SerializerFunctionWrapHandler):  # type: ignore[no-untyped-def]
        """The document of a script or a loop has no keys of tasks, so it can be submitted again."""
        document = handler(self)
        not_read = KEYS_OF_TASKS if self.script is not None else KEYS_OF_TASKS_ONLY if self.loop is not None else ()
        for key in not_read:
            document.pop(key, None)
        if not document.get("module_precision"):
            document.pop("module_precision", None)
        return document

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

    @field_validator("precision", "module_precision", "reduce_precision", mode="before")
    @classmethod
    def _is_built(cls, precision: object, info: ValidationInfo) -> object:
        values = precision.values() if isinstance(precision, dict) else (precision,)
        if eight := [one for one in values if isinstance(one, str) and one.startswith("fp8")]:
            raise ValueError(
                f"{info.field_name} {eight[0]} is not supported. It would need GPUs with fp8 matrix units (compute "
                "capability 8.9 or more), linear layers over scaled matrix products with a scale for every tensor or "
                "row, and collectives for fp8, which gloo does not have. Use bf16."
            )
        return precision

    @model_validator(mode="after")
    def _has_an_end(self) -> JobSpec:
        if self.program is None and self.stop is None:
            raise ValueError(
                'stop: this key is required, for example stop: {"steps": 1000}. A program that trains by itself has '
                'script instead, for example script: {"file": "train.py"}.'
            )
        return self

    @property
    def program(self) -> ProgramFile | None:
        """The user's own program; None: the job is a task."""
        return self.script if self.script is not None else self.loop

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


class TrainingSettings(Frozen):
    """The settings that a running job may change. A generation trains with one value of them."""

    stop: StopSpec | None
    """None: a loop or a script decides."""
    schedule: ScheduleSpec
    validation: ValidationSpec
    lr: float
    """`optimizer.lr`."""
    weight_changes: tuple[WeightChange, ...] = ()
    """`data.changes` of the built-in tasks."""


def settings_of(spec: JobSpec) -> TrainingSettings:
    return TrainingSettings(
        stop=spec.stop,
        schedule=spec.schedule,
        validation=spec.validation,
        lr=spec.optimizer.lr,
        weight_changes=weight_changes_of(spec),
    )


def weight_changes_of(spec: JobSpec) -> tuple[WeightChange, ...]:
    """`data.changes` of a built-in task that reads text; none for others, whose `data` has the form that they like."""
    found = spec.data.get("changes", ()) if spec.program is None and spec.task in TEXT_TASKS else ()
    return tuple(WeightChange.model_validate(one) for one in found)


def with_settings(spec: JobSpec, settings: TrainingSettings) -> JobSpec:
    """The spec with these settings instead of its own."""
    return spec.model_copy(
        update={
            "stop": settings.stop,
            "schedule": settings.schedule,
            "validation": settings.validation,
            "optimizer": spec.optimizer.model_copy(update={"lr": settings.lr}),
            "data": _with_weight_changes(spec, settings.weight_changes),
        }
    )


def _with_weight_changes(spec: JobSpec, changes: tuple[WeightChange, ...]) -> dict[str, Any]:
    if changes == weight_changes_of(spec):
        return spec.data
    return {**spec.data, "changes": [one.model_dump(mode="json") for one in changes]}


def changes(before: TrainingSettings, after: TrainingSettings) -> tuple[str, ...]:
    """One text for people per value that differs, for example `stop.steps 120 -> 200`."""
    old, new = _flat(before), _flat(after)
    return tuple(
        f"{key} {_shown(old.get(key))} -> {_shown(new.get(key))}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    )


def _flat(settings: TrainingSettings) -> dict[str, Any]:
    document = settings.model_dump(mode="json")
    values = {"optimizer.lr": document.pop("lr")}
    for change in document.pop("weight_changes"):
        weights = ", ".join(f"{name} {weight:g}" for name, weight in change["weights"].items())
        values[f"data.weights from step {change['at_step']} on"] = weights
    for section, keys in document.items():
        values |= {f"{section}.{key}": value for key, value in (keys or {}).items()}
    return values


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)


def plan_of(spec: JobSpec) -> ParallelPlan | None:
    """How the spec's model may be split; None: the model has no plan, and runs on the data axes only."""
    if spec.program is not None:
        return None
    if spec.plan is not None:
        return spec.plan
    if (hugging_face := hugging_face_of(spec.task, spec.model)) is not None:
        plan = plan_of_hugging_face(hugging_face)
        if plan is not None and varies_in_length(spec):
            return plan.model_copy(update={"hidden_size": 0})  # no pipeline: its stages hand over tensors of one shape
        return plan
    config = language_model_of(spec)
    return None if config is None else plan_of_language_model(config)


def varies_in_length(spec: JobSpec) -> bool:
    """Whether the micro-batches of a built-in task have shapes of their own."""
    return spec.task in HF_TASKS and spec.data.get("max_tokens") is not None


def language_model_of(spec: JobSpec) -> LanguageModelConfig | None:
    """Settings of the built-in model; None for another task or a program, and for invalid settings, which are refused
    elsewhere."""
    if spec.task != LM_TASK or spec.program is not None:
        return None
    try:
        return LanguageModelConfig.model_validate(spec.model)
    except ValidationError:
        return None
