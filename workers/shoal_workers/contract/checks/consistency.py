"""Whether the settings of a valid spec fit each other. Conflicts refuse it; remarks say what is probably not meant.

Settings that exclude each other, or that the model does not support, are conflicts (`spec_errors.parse_spec`). Remarks
are shown by `shoal validate`, and in the note of a job that was submitted. `legality` checks the degrees of the
parallel axes. Pure, except that it looks for the tokenizer in a Hugging Face model's directory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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
from shoal_workers.contract.language_model import LM_TASK, LanguageModelConfig
from shoal_workers.contract.layout import AXES, ParallelismSpec, ShardLevel
from shoal_workers.contract.placing import WorkerSpec
from shoal_workers.contract.spec import BatchSync, JobSpec, Precision, plan_of
from shoal_workers.contract.text_data import (
    BYTE_TOKENIZER,
    BYTE_VOCABULARY,
    IMAGE_CLASS_TASK,
    TextDataConfig,
    pretrained_of,
)
from shoal_workers.contract.user_code import Launcher


def conflicts(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Yield each setting that another one, or the model, rules out.

    As two texts: the dotted path of its key, and the problem with the way out of it."""
    if spec.program is not None:
        yield from _with_script(spec)
        yield from _with_loop(spec)
        return
    if spec.deterministic:
        yield from _with_deterministic(spec)
    yield from _with_plain(spec)
    if spec.fp8 is not None:
        yield from _with_fp8(spec)
    if spec.batch.sync is BatchSync.GLOBAL:
        yield from _with_global_norms(spec)
    if spec.init_from is not None and spec.continue_from is not None:
        yield (
            "init_from",
            "init_from begins a job with weights alone, and continue_from goes on from a whole checkpoint. Set one of "
            "them.",
        )
    if spec.islands is not None:
        yield from _with_islands(spec)
    url = spec.checkpoint.url
    if spec.checkpoint.tensorboard and url is not None and "://" in url.removeprefix("file://"):
        yield (
            "checkpoint.tensorboard",
            f"checkpoint.tensorboard is true, but checkpoint.url {url!r} is not a directory, and event files are "
            "appended to. Set checkpoint.url to a directory, or checkpoint.tensorboard to false; `shoal series` saves "
            "the same values.",
        )
    if (pretrained := pretrained_of(spec.task, spec.model)) is not None and (
        message := quantized(config_of(pretrained))
    ):
        yield "model", message
    if (hugging_face := hugging_face_of(spec.task, spec.model)) is not None:
        yield from _with_hugging_face(spec, hugging_face)
    if spec.task == LM_TASK:
        yield from _with_bytes(LanguageModelConfig(**spec.model), TextDataConfig(**spec.data))
    plan = plan_of(spec)
    if spec.compile and (plan is None or not plan.blocks):
        yield (
            "compile",
            f"compile is true, which compiles blocks, but those of task {spec.task!r}'s model are not known. "
            "Name its nn.ModuleList of equal blocks in plan.blocks (docs/parallelism.md), or set compile to false.",
        )


def _with_hugging_face(spec: JobSpec, model: HuggingFaceConfig) -> Iterator[tuple[str, str]]:
    if model.lora is not None and spec.init_from is not None:
        yield (
            "init_from",
            "init_from replaces the weights that a model begins with, and with model.lora those of model.path are read "
            "whenever a group forms. Name the directory of the weights in model.path.",
        )
    elif isinstance(model, PreferenceModelConfig) and spec.init_from is not None:
        yield (
            "init_from",
            "init_from replaces the weights that a model begins with, and the reference of preferences is the model in "
            "model.path. Name the directory of the weights in model.path.",
        )
    yield from _with_token_budget(spec, model)
    architecture = architecture_of(model)
    known = sorted(filter(isolates_packed, FAMILIES))
    if spec.data.get("packing") and architecture and not isolates_packed(architecture):
        yield (
            "data.packing",
            f"data.packing is true, and of the architecture {architecture!r} it is not known that examples in one "
            f"sample do not see each other. Set it to false; it is known of {', '.join(known)}.",
        )


def _with_token_budget(spec: JobSpec, model: HuggingFaceConfig) -> Iterator[tuple[str, str]]:
    """Micro-batches of samples of similar length."""
    budget = spec.data.get("max_tokens")
    if not isinstance(budget, int):
        return
    is_preference = isinstance(model, PreferenceModelConfig)
    longest, what = model.seq_len, "model.seq_len"
    if is_preference:
        longest, what = 2 * model.seq_len, "the two answers of a pair, 2 x model.seq_len"
    if budget < longest:
        yield (
            "data.max_tokens",
            f"data.max_tokens {budget} is less than {what} = {longest}, so the longest sample has no room in a "
            f"micro-batch. Set data.max_tokens to at least {longest}, or model.seq_len lower.",
        )
    if spec.batch.micro_size != 1:
        yield (
            "batch.micro_size",
            f"batch.micro_size is {spec.batch.micro_size}, and with data.max_tokens a micro-batch has as many samples "
            "as fit: set batch.micro_size to 1. batch.global_size is then the number of micro-batches in a step.",
        )
    if spec.data.get("packing"):
        yield (
            "data.max_tokens",
            f"data.max_tokens is {budget}, and data.packing is true: packed samples all have model.seq_len tokens, so "
            "batch.micro_size x model.seq_len is their budget. Remove one of the two.",
        )


def _with_script(spec: JobSpec) -> Iterator[tuple[str, str]]:
    if spec.script is not None and spec.script.launcher is Launcher.PYTHON and spec.elasticity.max_workers > 1:
        yield (
            "script.launcher",
            f"script.launcher python tells a process nothing of other processes, and elasticity.max_workers is "
            f"{spec.elasticity.max_workers}: each of them would train alone. Set script.launcher to torchrun, or "
            "elasticity.max_workers to 1.",
        )


def _with_loop(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """A loop has the data axes only: how else its model is split, it decides itself."""
    fixed = spec.parallelism
    if spec.loop is None or not isinstance(fixed, ParallelismSpec):
        return
    for key in sorted(fixed.model_fields_set - {"dp_replicate", "dp_shard", "shard", "otherwise"}):
        value = getattr(fixed, key)
        if value != type(fixed).model_fields[key].default:
            yield (
                f"parallelism.{key}",
                f"parallelism.{key} is {value}, and a loop is sharded by dp_replicate and dp_shard only: Shoal does "
                f"not know what else its model does. Remove parallelism.{key}, or train as a task (docs/tasks.md).",
            )
    if fixed.shard is ShardLevel.NONE:
        yield (
            "parallelism.shard",
            "parallelism.shard is none, and every worker of a loop has the whole model unless parallelism says "
            "otherwise. Remove the section parallelism.",
        )
    if fixed.shard is ShardLevel.OPTIMIZER:
        yield (
            "parallelism.shard",
            "parallelism.shard is optimizer, and a loop sums sharded gradients in each backward pass. Set it to "
            "gradients, which keeps parameters whole during a step, or to full.",
        )


def _with_fp8(spec: JobSpec) -> Iterator[tuple[str, str]]:
    if spec.task not in (LM_TASK, *HF_TASKS):
        yield (
            "fp8",
            f"fp8 is {spec.fp8}, and the task {spec.task} is your own: fp8 is for the linear layers of the built-in "
            f"and Hugging Face models ({LM_TASK}, {', '.join(HF_TASKS)}). Leave fp8 out; in a task of your own, "
            "torchao.float8 can convert layers in build_model.",
        )
    if spec.precision is not Precision.BF16:
        yield (
            "fp8",
            f"fp8 is {spec.fp8} and precision {spec.precision}: what is not a matrix product is computed in bf16. Set "
            "precision to bf16.",
        )


def _with_plain(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """`parallelism.shard: none` leaves no degree to choose. The other settings that it needs are rules of a layout."""
    fixed = spec.parallelism
    if not isinstance(fixed, ParallelismSpec) or fixed.shard is not ShardLevel.NONE:
        return
    for axis in AXES:
        degree = getattr(fixed, axis)
        if degree not in (1, "auto"):
            yield (
                f"parallelism.{axis}",
                f"parallelism.shard is none: every worker has the whole model, however many there are. Remove "
                f"parallelism.{axis} ({degree}), or set shard to optimizer, gradients or full.",
            )


def _with_bytes(model: LanguageModelConfig, text: TextDataConfig) -> Iterator[tuple[str, str]]:
    """A vocabulary that is too small for the byte tokenizer. The size of another tokenizer's vocabulary is known only
    where its file is, so it is not checked here."""
    if text.tokenizer == BYTE_TOKENIZER and model.vocab_size is not None and model.vocab_size < BYTE_VOCABULARY:
        yield (
            "model.vocab_size",
            f"model.vocab_size {model.vocab_size} is smaller than the {BYTE_VOCABULARY} tokens of data.tokenizer "
            f'"{BYTE_TOKENIZER}". Leave model.vocab_size out, or set it to at least {BYTE_VOCABULARY}.',
        )


def _with_global_norms(spec: JobSpec) -> Iterator[tuple[str, str]]:
    if spec.deterministic:
        yield (
            "batch.sync",
            "batch.sync is global, but deterministic: true needs the same bits everywhere, and a rank that computes "
            "more samples at once rounds differently. Set batch.sync to micro_batch, or deterministic to false.",
        )
    if spec.compile:
        yield (
            "compile",
            "compile is true, and batch.sync is global: a BatchNorm that waits for other ranks cannot be compiled with "
            "its block. Set compile to false, or batch.sync to micro_batch.",
        )


def _with_islands(spec: JobSpec) -> Iterator[tuple[str, str]]:
    if spec.optimizer.ema_decay is not None:
        yield (
            "optimizer.ema_decay",
            "optimizer.ema_decay is set, and so is islands, whose outer weights are an average already. Leave one out.",
        )
    if spec.validation.patience is not None:
        yield (
            "validation.patience",
            f"validation.patience is {spec.validation.patience}, and islands is set: an island would stop alone, "
            "within a round, and its last weights would not be the shared ones. Leave it out, and set stop.",
        )
    if spec.continue_from is not None:
        yield (
            "continue_from",
            "continue_from goes on with the rounds of another job. Begin islands with its weights: set init_from to an "
            "export of the checkpoint.",
        )


def _with_deterministic(spec: JobSpec) -> Iterator[tuple[str, str]]:
    if spec.optimizer.fused is True:
        yield (
            "optimizer.fused",
            "optimizer.fused is true, but deterministic: true needs the same bits everywhere, and the fused "
            'update rounds differently from the plain one. Set optimizer.fused to false or "auto", or deterministic '
            "to false.",
        )
    if spec.reduce_precision is not Precision.FP32:
        yield (
            "reduce_precision",
            f"reduce_precision is {spec.reduce_precision}, but deterministic: true sums gradients as 64-bit integers. "
            "Set reduce_precision to fp32, or deterministic to false.",
        )
    if spec.compile:
        yield (
            "compile",
            "compile is true, but deterministic: true refuses it: the code that torch.compile generates depends on the "
            "shapes that a worker has seen before, so a worker that joins later may round differently. Set compile to "
            "false, or deterministic to false.",
        )


def remarks(spec: JobSpec) -> Iterator[str]:
    """One sentence per setting that is probably not meant, from the spec alone."""
    if spec.stop is None:
        return  # a program of the user's own decides
    warmup, steps = spec.schedule.warmup_steps, spec.stop.steps
    if steps is not None and warmup > steps:
        yield (
            f"schedule.warmup_steps {warmup} is more than stop.steps {steps}: the learning rate does not reach "
            "optimizer.lr, and does not decay."
        )
    if spec.checkpoint.every_steps is None and spec.checkpoint.every_s is None:
        yield (
            "checkpoint.every_steps and checkpoint.every_s are both null: the only durable checkpoints are those of a "
            "pause and of the end. If the whole cluster is lost, the job starts from step 0."
        )
    reads_text = spec.task not in (SFT_TASK, IMAGE_CLASS_TASK)
    model = pretrained_of(spec.task, spec.model) if reads_text else None
    if model is not None and "tokenizer" not in spec.data and lacks_tokenizer(model):
        slow = slow_tokenizer_of(model)
        also = f" ({' and '.join(slow)} there cannot be read, and are not exported)" if slow else ""
        convert = (
            f"from transformers import AutoTokenizer as A; p = {model.path!r}; A.from_pretrained(p).save_pretrained(p)"
        )
        yield (
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
