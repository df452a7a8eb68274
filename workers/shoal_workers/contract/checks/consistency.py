"""Whether the settings of a valid spec fit each other. Conflicts refuse it; remarks say what is probably not meant.

Settings that exclude each other, or that the model does not support, are conflicts (`spec_errors.parse_spec`): a table
of rules by the key to change. Remarks are shown by `shoal validate`, and in the note of a job that was submitted.
`legality` checks the degrees of the parallel axes. Pure, except that it looks for the tokenizer in a Hugging Face
model's directory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from shoal_workers.contract.families import FAMILIES, isolates_packed
from shoal_workers.contract.hugging_face import (
    HF_TASKS,
    SFT_TASK,
    TOKENIZER_NAME,
    HuggingFaceConfig,
    PreferenceModelConfig,
    architecture_of,
    config_of,
    hugging_face_of,
    lacks_tokenizer,
    quantized,
    slow_tokenizer_of,
)
from shoal_workers.contract.language_model import LM_TASK
from shoal_workers.contract.layout import AXES, ParallelismSpec, ShardLevel
from shoal_workers.contract.placing import WorkerSpec
from shoal_workers.contract.rules import Rule, S, SpecProblem
from shoal_workers.contract.spec import BatchSync, JobSpec, Precision, language_model_of, plan_of
from shoal_workers.contract.text_data import BYTE_TOKENIZER, BYTE_VOCABULARY, IMAGE_CLASS_TASK, pretrained_of
from shoal_workers.contract.user_code import Launcher

Rules = Mapping[str, tuple[Rule[S], ...]]
"""Rules by the dotted path of the key to change."""


def find_conflicts(spec: JobSpec) -> Iterator[SpecProblem]:
    """Yield the settings that another one, or the model, rules out."""
    if spec.program is not None:
        yield from _find_broken(_OF_PROGRAMS, spec)
        return
    yield from _find_broken(_OF_TASKS, spec)
    if (model := hugging_face_of(spec.task, spec.model)) is not None:
        yield from _find_broken(_OF_HUGGING_FACE, HuggingFaceTask(spec, model))


def _find_broken(rules: Rules[S], value: S) -> Iterator[SpecProblem]:
    for path, of_key in rules.items():
        for rule in of_key:
            if rule.is_broken(value):
                yield SpecProblem(path=path, message=rule.describe(value))


def _fixed(spec: JobSpec, key: str) -> object:
    """Return what `parallelism` has under this key; None if the planner chooses."""
    return getattr(spec.parallelism, key) if isinstance(spec.parallelism, ParallelismSpec) else None


def _refuse_degree(axis: str) -> Rule[JobSpec]:
    """Make the rule that `parallelism.shard: none` leaves no degree to choose. The other settings that it needs are
    rules of a layout."""
    return Rule(
        lambda spec: _fixed(spec, "shard") is ShardLevel.NONE and _fixed(spec, axis) not in (1, "auto"),
        lambda spec: (
            f"parallelism.shard is none: every worker has the whole model, however many there are. Remove "
            f"parallelism.{axis} ({_fixed(spec, axis)}), or set shard to optimizer, gradients or full."
        ),
    )


def _refuse_for_loop(key: str) -> Rule[JobSpec]:
    """Make the rule that a loop has the data axes only: how else its model is split, it decides itself."""
    return Rule(
        lambda spec: spec.loop and _fixed(spec, key) not in (None, ParallelismSpec.model_fields[key].default),
        lambda spec: (
            f"parallelism.{key} is {_fixed(spec, key)}, and a loop is sharded by dp_replicate and dp_shard only: Shoal "
            f"does not know what else its model does. Remove parallelism.{key}, or train as a task (docs/tasks.md)."
        ),
    )


_KEYS_OF_LOOPS = ("dp_replicate", "dp_shard", "shard", "otherwise")
_OF_PROGRAMS: Rules[JobSpec] = {
    "script.launcher": (
        Rule(
            lambda spec: spec.script and spec.script.launcher is Launcher.PYTHON and spec.elasticity.max_workers > 1,
            lambda spec: (
                f"script.launcher python tells a process nothing of other processes, and elasticity.max_workers is "
                f"{spec.elasticity.max_workers}: each of them would train alone. Set script.launcher to torchrun, or "
                "elasticity.max_workers to 1."
            ),
        ),
    ),
    **{
        f"parallelism.{key}": (_refuse_for_loop(key),)
        for key in sorted(ParallelismSpec.model_fields.keys() - _KEYS_OF_LOOPS)
    },
    "parallelism.shard": (
        Rule(
            lambda spec: spec.loop and _fixed(spec, "shard") is ShardLevel.NONE,
            "parallelism.shard is none, and every worker of a loop has the whole model unless parallelism says "
            "otherwise. Remove the section parallelism.",
        ),
        Rule(
            lambda spec: spec.loop and _fixed(spec, "shard") is ShardLevel.OPTIMIZER,
            "parallelism.shard is optimizer, and a loop sums sharded gradients in each backward pass. Set it to "
            "gradients, which keeps parameters whole during a step, or to full.",
        ),
    ),
}
_OF_TASKS: Rules[JobSpec] = {
    "optimizer.fused": (
        Rule(
            lambda spec: spec.deterministic and spec.optimizer.fused is True,
            "optimizer.fused is true, but deterministic: true needs the same bits everywhere, and the fused "
            'update rounds differently from the plain one. Set optimizer.fused to false or "auto", or deterministic '
            "to false.",
        ),
    ),
    "reduce_precision": (
        Rule(
            lambda spec: spec.deterministic and spec.reduce_precision is not Precision.FP32,
            lambda spec: (
                f"reduce_precision is {spec.reduce_precision}, but deterministic: true sums gradients as 64-bit "
                "integers. Set reduce_precision to fp32, or deterministic to false."
            ),
        ),
    ),
    **{f"parallelism.{axis}": (_refuse_degree(axis),) for axis in AXES},
    "fp8": (
        Rule(
            lambda spec: spec.fp8 is not None and spec.task not in (LM_TASK, *HF_TASKS),
            lambda spec: (
                f"fp8 is {spec.fp8}, and the task {spec.task} is your own: fp8 is for the linear layers of the "
                f"built-in and Hugging Face models ({LM_TASK}, {', '.join(HF_TASKS)}). Leave fp8 out; in a task of "
                "your own, torchao.float8 can convert layers in build_model."
            ),
        ),
        Rule(
            lambda spec: spec.fp8 is not None and spec.precision is not Precision.BF16,
            lambda spec: (
                f"fp8 is {spec.fp8} and precision {spec.precision}: what is not a matrix product is computed in bf16. "
                "Set precision to bf16."
            ),
        ),
    ),
    "batch.sync": (
        Rule(
            lambda spec: spec.batch.sync is BatchSync.GLOBAL and spec.deterministic,
            "batch.sync is global, but deterministic: true needs the same bits everywhere, and a rank that computes "
            "more samples at once rounds differently. Set batch.sync to micro_batch, or deterministic to false.",
        ),
    ),
    "compile": (
        Rule(
            lambda spec: spec.compile and spec.deterministic,
            "compile is true, but deterministic: true refuses it: the code that torch.compile generates depends on the "
            "shapes that a worker has seen before, so a worker that joins later may round differently. Set compile to "
            "false, or deterministic to false.",
        ),
        Rule(
            lambda spec: spec.compile and spec.batch.sync is BatchSync.GLOBAL,
            "compile is true, and batch.sync is global: a BatchNorm that waits for other ranks cannot be compiled with "
            "its block. Set compile to false, or batch.sync to micro_batch.",
        ),
        Rule(
            lambda spec: spec.compile and not getattr(plan_of(spec), "blocks", ""),
            lambda spec: (
                f"compile is true, which compiles blocks, but those of task {spec.task!r}'s model are not known. "
                "Name its nn.ModuleList of equal blocks in plan.blocks (docs/parallelism.md), or set compile to false."
            ),
        ),
    ),
    "init_from": (
        Rule(
            lambda spec: spec.init_from is not None and spec.continue_from is not None,
            "init_from begins a job with weights alone, and continue_from goes on from a whole checkpoint. Set one of "
            "them.",
        ),
    ),
    "optimizer.ema_decay": (
        Rule(
            lambda spec: spec.islands and spec.optimizer.ema_decay is not None,
            "optimizer.ema_decay is set, and so is islands, whose outer weights are an average already. Leave one out.",
        ),
    ),
    "validation.patience": (
        Rule(
            lambda spec: spec.islands and spec.validation.patience is not None,
            lambda spec: (
                f"validation.patience is {spec.validation.patience}, and islands is set: an island would stop alone, "
                "within a round, and its last weights would not be the shared ones. Leave it out, and set stop."
            ),
        ),
    ),
    "continue_from": (
        Rule(
            lambda spec: spec.islands and spec.continue_from is not None,
            "continue_from goes on with the rounds of another job. Begin islands with its weights: set init_from to an "
            "export of the checkpoint.",
        ),
    ),
    "checkpoint.tensorboard": (
        Rule(
            lambda spec: spec.checkpoint.tensorboard and "://" in (spec.checkpoint.url or "").removeprefix("file://"),
            lambda spec: (
                f"checkpoint.tensorboard is true, but checkpoint.url {spec.checkpoint.url!r} is not a directory, and "
                "event files are appended to. Set checkpoint.url to a directory, or checkpoint.tensorboard to false; "
                "`shoal series` saves the same values."
            ),
        ),
    ),
    "model": (Rule(lambda spec: _describe_quantized(spec), lambda spec: _describe_quantized(spec)),),
    "model.vocab_size": (
        # the size of another tokenizer's vocabulary is known only where its file is
        Rule(
            lambda spec: (
                spec.data.get("tokenizer", BYTE_TOKENIZER) == BYTE_TOKENIZER
                and _vocab_size(spec) is not None
                and _vocab_size(spec) < BYTE_VOCABULARY
            ),
            lambda spec: (
                f"model.vocab_size {_vocab_size(spec)} is smaller than the {BYTE_VOCABULARY} tokens of data.tokenizer "
                f'"{BYTE_TOKENIZER}". Leave model.vocab_size out, or set it to at least {BYTE_VOCABULARY}.'
            ),
        ),
    ),
}


def _describe_quantized(spec: JobSpec) -> str:
    """Say why the model cannot be trained if its weights are quantized; empty if they are not."""
    pretrained = pretrained_of(spec.task, spec.model)
    return "" if pretrained is None else quantized(config_of(pretrained))


def _vocab_size(spec: JobSpec) -> int:
    """Return the rows of the built-in model's embedding that the spec names, or as many as it needs."""
    model = language_model_of(spec)
    return BYTE_VOCABULARY if model is None or model.vocab_size is None else model.vocab_size


@dataclass(frozen=True, slots=True)
class HuggingFaceTask:
    """A spec whose model is a causal language model of transformers."""

    spec: JobSpec
    model: HuggingFaceConfig

    @property
    def is_preference(self) -> bool:
        return isinstance(self.model, PreferenceModelConfig)

    @property
    def max_tokens(self) -> int | None:
        """Tokens of a micro-batch of samples of similar length; None if it has a number of samples instead."""
        tokens = self.spec.data.get("max_tokens")
        return tokens if isinstance(tokens, int) else None

    @property
    def longest(self) -> tuple[int, str]:
        """Tokens of the longest sample, and where they come from."""
        if self.is_preference:
            return 2 * self.model.seq_len, "the two answers of a pair, 2 x model.seq_len"
        return self.model.seq_len, "model.seq_len"


_OF_HUGGING_FACE: Rules[HuggingFaceTask] = {
    "init_from": (
        Rule(
            lambda task: task.spec.init_from is not None and task.model.lora is not None,
            "init_from replaces the weights that a model begins with, and with model.lora those of model.path are read "
            "whenever a group forms. Name the directory of the weights in model.path.",
        ),
        Rule(
            lambda task: task.spec.init_from is not None and task.model.lora is None and task.is_preference,
            "init_from replaces the weights that a model begins with, and the reference of preferences is the model in "
            "model.path. Name the directory of the weights in model.path.",
        ),
    ),
    "data.max_tokens": (
        Rule(
            lambda task: task.max_tokens is not None and task.max_tokens < task.longest[0],
            lambda task: (
                f"data.max_tokens {task.max_tokens} is less than {task.longest[1]} = {task.longest[0]}, so the longest "
                f"sample has no room in a micro-batch. Set data.max_tokens to at least {task.longest[0]}, or "
                "model.seq_len lower."
            ),
        ),
        Rule(
            lambda task: task.max_tokens is not None and task.spec.data.get("packing"),
            lambda task: (
                f"data.max_tokens is {task.max_tokens}, and data.packing is true: packed samples all have "
                "model.seq_len tokens, so batch.micro_size x model.seq_len is their budget. Remove one of the two."
            ),
        ),
    ),
    "batch.micro_size": (
        Rule(
            lambda task: task.max_tokens is not None and task.spec.batch.micro_size != 1,
            lambda task: (
                f"batch.micro_size is {task.spec.batch.micro_size}, and with data.max_tokens a micro-batch has as many "
                "samples as fit: set batch.micro_size to 1. batch.global_size is then the number of micro-batches in a "
                "step."
            ),
        ),
    ),
    "data.packing": (
        Rule(
            lambda task: (
                task.spec.data.get("packing")
                and architecture_of(task.model)
                and not isolates_packed(architecture_of(task.model))
            ),
            lambda task: (
                f"data.packing is true, and of the architecture {architecture_of(task.model)!r} it is not known that "
                f"examples in one sample do not see each other. Set it to false; it is known of "
                f"{', '.join(sorted(filter(isolates_packed, FAMILIES)))}."
            ),
        ),
    ),
}


def remarks(spec: JobSpec) -> Iterator[str]:
    """One sentence per setting that is probably not meant, from the spec alone."""
    for rule in _REMARKS:
        if spec.program is None and rule.is_broken(spec):  # a program of the user's own decides about the rest
            yield rule.describe(spec)


_REMARKS: tuple[Rule[JobSpec], ...] = (
    Rule(
        lambda spec: spec.schedule.warmup_steps > _last_step(spec),
        lambda spec: (
            f"schedule.warmup_steps {spec.schedule.warmup_steps} is more than stop.steps {_last_step(spec)}: the "
            "learning rate does not reach optimizer.lr, and does not decay."
        ),
    ),
    Rule(
        lambda spec: spec.checkpoint.every_steps is None and spec.checkpoint.every_s is None,
        "checkpoint.every_steps and checkpoint.every_s are both null: the only durable checkpoints are those of a "
        "pause and of the end. If the whole cluster is lost, the job starts from step 0.",
    ),
    Rule(lambda spec: _describe_missing_tokenizer(spec), lambda spec: _describe_missing_tokenizer(spec)),
)


def _last_step(spec: JobSpec) -> float:
    """Return the step at which training ends; infinite if the spec does not name it."""
    return math.inf if spec.stop is None or spec.stop.steps is None else spec.stop.steps


def _describe_missing_tokenizer(spec: JobSpec) -> str:
    """Say that the text is read as bytes, because the model's directory has no tokenizer; empty if that is not so."""
    model = pretrained_of(spec.task, spec.model)
    reads_text = spec.task not in (SFT_TASK, IMAGE_CLASS_TASK)
    if model is None or not reads_text or "tokenizer" in spec.data or not lacks_tokenizer(model):
        return ""
    slow = slow_tokenizer_of(model)
    also = f" ({' and '.join(slow)} there cannot be read, and are not exported)" if slow else ""
    convert = (
        f"from transformers import AutoTokenizer as A; p = {model.path!r}; A.from_pretrained(p).save_pretrained(p)"
    )
    return (
        f"model.path {model.path!r} has no {TOKENIZER_NAME}{also}, so the text is read as bytes, which the "
        "model was not trained on: name its tokenizer in data.tokenizer, or make one there: "
        f'python -c "{convert}".'
    )


def capacity_remark(spec: JobSpec, nodes: Iterable[tuple[float, float]]) -> str:
    """A sentence if the nodes have no room for `elasticity.max_workers`; empty: they have.

    Args:
        nodes: (CPUs, GPUs) of each node.
    """
    worker, most = spec.worker, spec.elasticity.max_workers
    if not worker.cpus and not worker.gpus:
        return ""  # such workers have room everywhere
    room = sum(_room(worker, cpus, gpus) for cpus, gpus in nodes)
    if room >= most:
        return ""
    needs = " and ".join(
        f"{number:g} {unit}{'' if number == 1 else 's'}"
        for number, unit in ((worker.cpus, "CPU"), (worker.gpus, "GPU"))
        if number
    )
    return (
        f"elasticity.max_workers is {most}, and the cluster has room for {room} worker{'' if room == 1 else 's'} "
        f"with {needs} each: the job "
        "gets more of them when nodes join."
    )


def _room(worker: WorkerSpec, cpus: float, gpus: float) -> int:
    return min(int(has // needs) for has, needs in ((cpus, worker.cpus), (gpus, worker.gpus)) if needs)
