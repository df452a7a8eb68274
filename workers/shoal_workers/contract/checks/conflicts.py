"""Settings that exclude each other, or that the model does not support. Pure; called by `spec_errors.parse_spec`.

The degrees of the parallel axes are checked by `feasibility` and `legality`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shoal_workers.contract.model.lm import (
    BYTE_TOKENIZER,
    BYTE_VOCABULARY,
    LM_TASK,
    LanguageModelConfig,
    TextDataConfig,
)
from shoal_workers.contract.model.plan_of import plan_of
from shoal_workers.contract.spec import JobSpec, Precision


@dataclass(frozen=True, slots=True)
class Conflict:
    """A setting that cannot be satisfied."""

    path: str
    message: str


def conflicts(spec: JobSpec) -> Iterator[Conflict]:
    """Every setting of `spec` that another setting, or the model, rules out."""
    if spec.deterministic:
        yield from _with_deterministic(spec)
    if spec.init_from is not None and spec.continue_from is not None:
        yield Conflict(
            "init_from",
            "init_from begins a job with weights alone, and continue_from goes on from a whole checkpoint. Set one of "
            "them.",
        )
    url = spec.checkpoint.url
    if spec.checkpoint.tensorboard and url is not None and "://" in url.removeprefix("file://"):
        yield Conflict(
            "checkpoint.tensorboard",
            f"checkpoint.tensorboard is true, but checkpoint.url {url!r} is not a directory, and event files are "
            "appended to. Set checkpoint.url to a directory, or checkpoint.tensorboard to false; `shoal series` saves "
            "the same values.",
        )
    if spec.task == LM_TASK:
        yield from _with_bytes(LanguageModelConfig(**spec.model), TextDataConfig(**spec.data))
    plan = plan_of(spec)
    if spec.compile and (plan is None or not plan.blocks):
        yield Conflict(
            "compile",
            f"compile is true, which compiles blocks, but those of task {spec.task!r}'s model are not known. "
            "Name its nn.ModuleList of equal blocks in plan.blocks (docs/parallelism.md), or set compile to false.",
        )


def _with_bytes(model: LanguageModelConfig, text: TextDataConfig) -> Iterator[Conflict]:
    """The size of another tokenizer's vocabulary is known only where its file is."""
    if text.tokenizer == BYTE_TOKENIZER and model.vocab_size is not None and model.vocab_size < BYTE_VOCABULARY:
        yield Conflict(
            "model.vocab_size",
            f"model.vocab_size {model.vocab_size} is smaller than the {BYTE_VOCABULARY} tokens of data.tokenizer "
            f'"{BYTE_TOKENIZER}". Leave model.vocab_size out, or set it to at least {BYTE_VOCABULARY}.',
        )


def _with_deterministic(spec: JobSpec) -> Iterator[Conflict]:
    if spec.optimizer.fused is True:
        yield Conflict(
            "optimizer.fused",
            "optimizer.fused is true, but deterministic: true needs the same bits everywhere, and the fused "
            'update rounds differently from the plain one. Set optimizer.fused to false or "auto", or deterministic '
            "to false.",
        )
    if spec.reduce_precision is not Precision.FP32:
        yield Conflict(
            "reduce_precision",
            f"reduce_precision is {spec.reduce_precision}, but deterministic: true sums gradients as 64-bit integers. "
            "Set reduce_precision to fp32, or deterministic to false.",
        )
    if spec.compile:
        yield Conflict(
            "compile",
            "compile is true, but deterministic: true refuses it: the code that torch.compile generates depends on the "
            "shapes that a worker has seen before, so a worker that joins later may round differently. Set compile to "
            "false, or deterministic to false.",
        )
