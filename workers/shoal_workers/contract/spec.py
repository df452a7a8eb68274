"""JobSpec: what a user requests. Validated once at the edge of the system, then passed as a value.

A spec is one document, which its reader sees whole in docs/reference/spec.md. Here are JobSpec, its sections about the
training of a task, and the rules over several sections, whose messages contain the arithmetic. The other sections are
in modules of their own: `user_code`, `optimizers`, `schedules`, `layout`, `placing`, `fault_tolerance`, `webhooks`,
`media`. `model` and `data` are a task's own: use `checks.spec_errors.parse_spec` to make a spec, which also checks
those of the built-in tasks. `plan_of` says how the model of a spec may be split.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import (
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from shoal_workers.contract.base import Frozen, PositiveInt, exactly_one_of, if_set, whole
from shoal_workers.contract.fault_tolerance import (
    CheckpointSpec,
    ElasticitySpec,
    HealthSpec,
    RetrySpec,
    SnapshotSpec,
    TimeoutsSpec,
)
from shoal_workers.contract.hugging_face import HF_TASKS, hugging_face_of
from shoal_workers.contract.hugging_face_plan import plan_of_hugging_face
from shoal_workers.contract.islands import IslandsSpec
from shoal_workers.contract.language_model import LM_TASK, LanguageModelConfig, plan_of_language_model
from shoal_workers.contract.layout import ParallelismSpec
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.media import MediaSpec
from shoal_workers.contract.model import ParallelPlan
from shoal_workers.contract.optimizers import OptimizerSpec
from shoal_workers.contract.outputs import OutputsSpec
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
from shoal_workers.contract.rules import Rule, Section, require_one
from shoal_workers.contract.schedules import ScheduleSpec
from shoal_workers.contract.user_code import CodeSpec, LoopSpec, ProgramFile, ScriptSpec, Secrets
from shoal_workers.contract.webhooks import MAX_WEBHOOKS, Alerts, WebhookSpec


class StopSpec(Section):
    """When training ends. Set exactly one of the three."""

    steps: PositiveInt | None = None
    """Optimizer steps."""
    tokens: PositiveInt | None = None
    """Tokens trained on (samples, if the task has no tokens); rounded up to whole steps."""
    epochs: float | None = Field(None, gt=0, le=1e9, allow_inf_nan=False)
    """Passes over the training split; rounded up to whole steps."""

    rules = (
        require_one(
            ("steps", "tokens", "epochs"), "stop must contain exactly one of steps, tokens and epochs; it has {given}."
        ),
    )


class ValidationSpec(Section):
    """Loss on the validation split, if the task has one."""

    every_steps: PositiveInt | None = None
    """Steps between two validations. There is always one after the last step."""
    samples: int = Field(256, ge=0, le=2**53)
    """Maximum number of samples, drawn once from the whole split and the same in every validation; 0: never
    validate."""
    metric: str = Field("loss", min_length=1, max_length=63)
    """What makes a validation better: the loss, or a metric of the task's own by its name. For `patience` and
    `checkpoint.keep_best`."""
    mode: Literal["auto", "min", "max"] = "auto"
    """Whether smaller values of `metric` are better, or larger ones. "auto": by its name (`loss` and `wer` min,
    `accuracy` and `f1` max); a metric whose name does not say it needs min or max."""
    patience: PositiveInt | None = None
    """Stop early after this many validations in a row without an improvement; null: never."""
    min_delta: float = Field(0.0, ge=0, allow_inf_nan=False)
    """An improvement by this much or less does not count for `patience`."""

    rules = (
        Rule(
            lambda validation: validation.mode == "auto" and mode_of_metric(validation.metric) is None,
            lambda validation: (
                f"validation.metric {validation.metric!r} does not say by its name whether larger "
                "values are better. Set validation.mode to min or max."
            ),
        ),
    )

    @property
    def better(self) -> str:
        """ "min" or "max"."""
        return (mode_of_metric(self.metric) or "min") if self.mode == "auto" else self.mode


def mode_of_metric(name: str) -> str | None:
    """Return "min" or "max" as the parts of the name say, the last one first (`val/top5_accuracy`); None if none
    does."""
    for part in reversed(re.findall("[a-z0-9]+", name.lower())):
        for mode, parts in _PARTS_BY_MODE.items():
            if {part, part.rstrip("0123456789")} & {*parts.split()}:
                return mode
    return None


_PARTS_BY_MODE = {
    "min": "loss losses nll perplexity ppl error errors err mae mse rmse mape wer cer ter eer fid kl bits bpb bpc "
    "brier distance divergence regret",
    "max": "accuracy accuracies acc precision recall f1 auc auroc auprc ap map iou miou dice jaccard bleu sacrebleu "
    "chrf rouge rougel meteor bertscore comet r2 mcc kappa pearson spearman psnr ssim mrr ndcg hits em match reward "
    "rewards margins return win pass sensitivity specificity similarity",
}
"""Parts of the names of metrics."""


class ContinueFrom(Section):
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

    rules = (
        Rule(
            lambda source: source.checkpoint is not None and source.name is None,
            lambda source: (
                f"continue_from.checkpoint {source.checkpoint!r} is not the name of a checkpoint. Leave it "
                "out: the service sets it."
            ),
        ),
    )

    @property
    def name(self) -> CheckpointName | None:
        """The parsed `checkpoint`; None if no service has set it, because there is none (torchrun)."""
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
    """Give a job the label of its sweep. Raises ValueError if the label has another value."""
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


class Fp8Scales(StrEnum):
    """What has a scale of its own when matrices are cast to fp8."""

    TENSORWISE = "tensorwise"
    """Each matrix. Weights and activations have 3 bits of mantissa, gradients 2. The fastest."""
    ROWWISE = "rowwise"
    """Each row, and each column where it is summed over columns: outliers cost less precision. All have 3 bits."""


class BatchSync(StrEnum):
    """Over which samples a BatchNorm normalises."""

    MICRO_BATCH = "micro_batch"
    GLOBAL = "global"


class BatchSpec(Section):
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

    rules = (
        Rule(lambda batch: batch.global_size % batch.micro_size, lambda batch: batch.describe_remainder()),
        Rule(
            lambda batch: batch.num_workers and batch.sync is BatchSync.GLOBAL,
            lambda batch: (
                f"batch.num_workers is {batch.num_workers} and batch.sync is global: a rank reads the samples of its "
                "whole share of a step at once, on the training thread. Set num_workers to 0, or sync to micro_batch."
            ),
        ),
    )

    def describe_remainder(self) -> str:
        """Say how many samples are left over, and the nearest sizes with which none is."""
        whole_batches, rest = divmod(self.global_size, self.micro_size)
        below = self.global_size - rest
        hint = " or ".join(str(n) for n in (below, below + self.micro_size) if n)
        return (
            f"batch.global_size {self.global_size} is not a multiple of batch.micro_size {self.micro_size}: "
            f"{self.global_size} = {whole_batches} x {self.micro_size} + {rest}. Set global_size to {hint}, or choose "
            "another micro_size."
        )

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per optimizer step, over all ranks."""
        return self.global_size // self.micro_size


Reduction = Precision | Literal["int8"]

KEYS_OF_TASKS = (
    *("task", "model", "data", "batch", "optimizer", "schedule", "precision", "module_precision", "reduce_precision"),
    *("fp8", "compile", "stop", "init_from", "parallelism", "plan", "validation", "snapshot", "deterministic"),
    "islands",
)
"""Keys of a spec that say what a task trains and how. A script reads none of them."""
KEYS_OF_TASKS_ONLY = tuple(key for key in KEYS_OF_TASKS if key not in ("snapshot", "parallelism"))
"""The same for a loop, whose tracked state Shoal keeps, and whose models it may shard."""


NO_END = (
    'this key is required, for example stop: {"steps": 1000}. A program that trains by itself has script instead, for '
    'example script: {"file": "train.py"}.'
)
"""What the user reads about a task without `stop`."""


class JobSpec(Section):
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
    secrets: Secrets = Field(default_factory=dict)
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
    reduce_precision: Reduction = Precision.FP32
    """Type in which gradients are summed, over a rank's micro-batches and between data-parallel ranks. bf16 and fp16
    halve the bytes sent and round every addition; fp16 adds dynamic loss scaling. int8 sends a quarter of the bytes,
    rounded at random without a mean error, and adds up in fp32; see docs/parallelism.md."""
    fp8: Fp8Scales | None = Field(None, exclude_if=lambda value: value is None)
    """Matrix products of the linear layers in the blocks of the built-in and Hugging Face models in fp8, with a scale
    for each tensor or row. Needs `precision: bf16`, GPUs of compute capability 8.9 or more, and torchao (the extra
    `fp8`). CPUs emulate it, to compare losses. Embedding, head, attention and experts stay in bf16."""
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
    islands: IslandsSpec | None = Field(None, exclude_if=lambda value: value is None)
    """The job is one of several that train one model together and merge their weights in rounds; see
    docs/islands.md."""
    finish_by: Moment | None = None
    """When the job should be done: seconds since 1970, or a time with its zone such as "2030-01-31T18:00:00Z". The job
    gets workers to make it, if that is possible; null: no deadline."""
    capacity: CapacityKind = CapacityKind.ANY
    """Only nodes that may be taken away at any time (spot), only others (on_demand), or any."""
    placement: Placement = Placement.PACK
    """Few nodes with many of the job's workers each (pack), or many nodes (spread)."""
    webhooks: tuple[WebhookSpec, ...] = Field((), max_length=MAX_WEBHOOKS)
    """Receivers of the job's events, at most 8; see docs/webhooks.md. The secrets that sign are the service's."""
    alerts: Alerts = Field((), exclude_if=lambda value: not value)
    """Conditions over metrics, at most 8: `["loss > 10", "max(grad_norm) > 100"]`. When one begins to hold, the job has
    an event, which webhooks, mail, chat and the page tell; see docs/webhooks.md."""
    metrics: MetricsSpec = MetricsSpec()
    media: MediaSpec = Field(MediaSpec(), exclude_if=lambda value: value == MediaSpec())
    outputs: OutputsSpec = Field(OutputsSpec(), exclude_if=lambda value: value == OutputsSpec())
    seed: int = Field(0, ge=0, lt=2**32)
    """Initial weights, sample order and dropout depend only on it."""
    deterministic: bool = False
    """Losses have the same bits at every world size and after every recovery; docs/determinism.md states the cost."""

    rules = (
        Rule(lambda spec: spec.program is None and spec.stop is None, f"stop: {NO_END}"),
        Rule(
            lambda spec: spec.code.env.keys() & spec.secrets.keys(),
            lambda spec: (
                f"{', '.join(sorted(spec.code.env.keys() & spec.secrets.keys()))}: in code.env and in "
                "secrets. Name each variable in one of them."
            ),
        ),
    )

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
        if eight := [value for value in values if isinstance(value, str) and value.startswith("fp8")]:
            raise ValueError(
                f"{info.field_name} {eight[0]} is not a type of whole modules. Matrix products of linear layers can be "
                "in fp8 on GPUs of compute capability 8.9 or more: set precision: bf16 and fp8: tensorwise or rowwise."
            )
        return precision

    @property
    def program(self) -> ProgramFile | None:
        """The user's own program; None if the job is a task."""
        return self.script if self.script is not None else self.loop

    @property
    def sum_precision(self) -> Precision:
        """Type in which gradients are added up, and sent if they are not rounded."""
        return Precision.FP32 if self.reduce_precision == "int8" else self.reduce_precision

    @property
    def rounds_sums(self) -> bool:
        """True if summands are sent as int8."""
        return self.reduce_precision == "int8"

    @property
    def samples_per_step(self) -> int:
        """How many samples of the data's order a step of the job stands for: those of all islands."""
        return self.batch.global_size * (1 if self.islands is None else self.islands.num)

    @field_validator("task")
    @classmethod
    def _task_is_a_path(cls, task: str) -> str:
        if not _TASK.fullmatch(task):
            raise ValueError(f'task {task!r} must have the form "module:Name", for example "{LM_TASK}".')
        return task


def plan_of(spec: JobSpec) -> ParallelPlan | None:
    """How the spec's model may be split; None if the model has no plan, and runs on the data axes only."""
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
    """Return whether the micro-batches of a built-in task have shapes of their own."""
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
