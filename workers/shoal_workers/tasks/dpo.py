"""The task that trains a model of transformers on preferences: of two answers to a prompt, one is chosen (Rafailov et
al. 2023).

    model: {path: /models/tiny-llama, seq_len: 1024, dpo: {beta: 0.1}, lora: {r: 16}}     as HuggingFaceLM
    data: {paths: [/data/preferences.jsonl]}                                            see conversations.py

    margin      how much more the model prefers the chosen answer than the reference does: the difference of their log
                probabilities, less that of the reference's
    reference   with adapters the model without them, so there is no second one; else a frozen copy of what is in
                model.path, which is read again whenever a model is built, and never saved

A micro-batch of n pairs is one forward pass of 2n sequences, after one of the reference without gradients. A pipeline
goes through the model once, so there both are one pass of 4n sequences, in which the adapters leave out the second
half; this costs the backward pass of that half, whose gradients are zero. Loaded by the engine by its name.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal_workers.contract.hugging_face import REFERENCE, DpoConfig, PreferenceLoss, PreferenceModelConfig
from shoal_workers.contract.text_data import PreferencesConfig
from shoal_workers.data.labelled import LabelledExamples
from shoal_workers.data.tokenizer import Split
from shoal_workers.tasks.answers import NO_ANSWER, ExampleDataset, ExamplesTask, pad_batch, read_example
from shoal_workers.tasks.conversations import encode_preference
from shoal_workers.tasks.hf import CausalLM, parts_of, without_noise
from shoal_workers.tasks.lora import outputs_of_adapters
from shoal_workers.tasks.rows import NO_LABEL


class DirectPreferenceOptimization(ExamplesTask):
    """Preferences between two answers."""

    def __init__(self, model: dict[str, Any], data: dict[str, Any], seed: int) -> None:
        self.preferences = PreferenceModelConfig.model_validate(model)
        self.pairs = PreferencesConfig.model_validate(data)
        super().__init__(self.preferences, self.pairs, encode_preference, "preferences")

    @property
    def tokens_per_sample(self) -> int:
        return self.pairs.max_tokens or 2 * self.settings.seq_len

    def build_dataset(self, split: str) -> PairDataset:
        """Pairs; "train" or "validation".

        Raises:
            DataError: the files cannot be read, or have no pair for training.
        """
        examples, padding = self.prepared()
        return PairDataset(examples, Split(split), self.settings.seq_len, padding, max_tokens=self.pairs.max_tokens)

    def wrapped(self, network: Any) -> CausalLM:
        without_noise(network)
        if not self.preferences.has_reference:
            return PreferenceLM(network, None)
        reference = self.causal_network()
        without_noise(reference)
        self.reloads_frozen = self.initial_weights is not None
        return PreferenceLM(network, reference.requires_grad_(False))

    def export_config(self, model: nn.Module) -> dict[str, Any]:
        """As of every model of transformers; the reference has the same names in the files, and is not exported."""
        described = super().export_config(model)
        reference = f"^{REFERENCE}".replace(".", r"\.")
        return {**described, "renames": [*described["renames"], [reference, ""]], "without": reference}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int, dict[str, Tensor]]:
        """Return the sum of the losses of a micro-batch's pairs, and their number.

        Metrics, as TRL names them: `rewards/chosen` and `rewards/rejected`, beta times how much more likely the answer
        is than for the reference; `rewards/margins`, their difference; `rewards/accuracies`, the share of pairs whose
        margin is positive.
        """
        tokens, labels = (batch[name].flatten(0, 1) for name in ("tokens", "labels"))
        settings = self.preferences.dpo
        if isinstance(model, PreferenceLM):
            with torch.no_grad():
                logits, _ = parts_of(model(tokens, Side.REFERENCE))
                reference = answer_log_probs(logits, labels, settings)
            logits, router_loss = parts_of(model(tokens, Side.TRAINED))
            trained = answer_log_probs(logits, labels, settings)
        else:  # a placeholder of a pipeline
            logits, router_loss = parts_of(model(tokens.repeat(2, 1), Side.BOTH))
            trained, reference = answer_log_probs(logits, labels.repeat(2, 1), settings).chunk(2)
        ratios = (trained - reference.detach()).view(-1, 2)
        total = preference_losses(ratios[:, 0] - ratios[:, 1], settings).sum()
        if router_loss is not None:
            total = total + len(ratios) * self.router_loss_weight * router_loss
        rewards = settings.beta * ratios.detach()
        chosen, rejected = rewards.unbind(1)
        metrics = {
            "rewards/chosen": chosen.mean(),
            "rewards/rejected": rejected.mean(),
            "rewards/margins": (chosen - rejected).mean(),
            "rewards/accuracies": (chosen > rejected).float().mean(),
        }
        return total, len(ratios), metrics


def answer_log_probs(logits: Tensor, labels: Tensor, settings: DpoConfig) -> Tensor:
    """Log probability of the answer in each sequence, (B,), in fp32; of "ipo" the mean over its tokens. Logits (B, T,
    V), labels (B, T)."""
    losses = F.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=NO_LABEL, reduction="none"
    ).view(labels.shape)
    total = -losses.sum(1)
    return total / (labels != NO_LABEL).sum(1) if settings.loss is PreferenceLoss.IPO else total


def preference_losses(margins: Tensor, settings: DpoConfig) -> Tensor:
    """Return the loss of each pair. Margins (n,), not yet multiplied by beta."""
    match settings.loss:
        case PreferenceLoss.SIGMOID:
            smoothing, scaled = settings.label_smoothing, settings.beta * margins
            return -F.logsigmoid(scaled) * (1 - smoothing) - F.logsigmoid(-scaled) * smoothing
        case PreferenceLoss.IPO:
            return (margins - 1 / (2 * settings.beta)) ** 2
        case PreferenceLoss.HINGE:
            return torch.relu(1 - settings.beta * margins)


class Side(StrEnum):
    """Which model a forward pass is of."""

    TRAINED = "trained"
    REFERENCE = "reference"
    BOTH = "both"
    """Both, on one half of the sequences each. Only with adapters."""


class PreferenceLM(CausalLM):
    """Tokens (B, T) int64 -> logits (B, T, V), of the trained model or of the reference."""

    def __init__(self, network: Any, reference: Any | None) -> None:
        """`reference`: None if `network` has adapters, and is the reference without them."""
        super().__init__(network)
        self.reference = reference
        self.adapters = None if reference is not None else _Adapters(network)

    def train(self, mode: bool = True) -> PreferenceLM:
        """The reference never is in training, where some routers draw their choice."""
        super().train(mode)
        if self.reference is not None:
            self.reference.eval()
        return self

    def forward(self, tokens: Tensor, side: Side = Side.TRAINED) -> Tensor | tuple[Tensor, Tensor]:  # type: ignore[override]
        if self.adapters is not None:
            # Stays so until the backward pass has ended, which may compute blocks again: the reference comes first.
            self.adapters.side = side
        elif side is Side.REFERENCE:
            return self.run(self.reference, tokens)
        return self.run(self.network, tokens)


class _Adapters:
    """A hook of the last layer of each adapter, which leaves out what it adds to a sequence of the reference."""

    def __init__(self, network: Any) -> None:
        self.side = Side.TRAINED
        for layer in outputs_of_adapters(network):
            layer.register_forward_hook(self)

    def __call__(self, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        match self.side:
            case Side.TRAINED:
                return None
            case Side.REFERENCE:
                return torch.zeros_like(output)
            case Side.BOTH:
                own, _ = output.chunk(2)
                return torch.cat((own, torch.zeros_like(own)))


class PairDataset(ExampleDataset):
    """Pairs of a split: tokens and labels, each (2, seq_len) int64, the chosen answer first; with `max_tokens` of an
    own length."""

    def __init__(
        self, examples: LabelledExamples, split: Split, seq_len: int, padding: int, *, max_tokens: int | None = None
    ) -> None:
        """`examples`: by two, a chosen and a rejected one. A pair is left out, and counted in `left_out`, if one of its
        answers is cut off, or if both are equal."""
        super().__init__(examples, split, seq_len, padding, max_tokens)
        samples: list[tuple[int, ...]] = []
        lengths: list[int] = []
        for number in np.flatnonzero(examples.is_validation[::2] == (split is Split.VALIDATION)).tolist():
            chosen, is_chosen = read_example(examples, 2 * number)
            rejected, is_rejected = read_example(examples, 2 * number + 1)
            answers = (is_chosen, is_rejected)
            if not all(is_answer[1:].any() for is_answer in answers):
                self.left_out[NO_ANSWER] += 1
            elif not all(is_answer[1 : seq_len + 1].any() for is_answer in answers):
                self.left_out[f"lines without both answers within model.seq_len {seq_len}"] += 1
            elif np.array_equal(chosen[: seq_len + 1], rejected[: seq_len + 1]):
                self.left_out[f"lines with equal answers within model.seq_len {seq_len}"] += 1
            else:
                longest = max(map(len, answers)) - 1
                samples.append((2 * number, 2 * number + 1))
                lengths.append(2 * min(longest, seq_len))
                self.num_cut += longest > seq_len
        self._set_samples(samples, lengths, len(examples) // 2, f"{split} {seq_len}")

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        pair = [self._read(number) for number in self._samples[index]]
        return pad_batch(pair, self._padding, self._seq_len if self.lengths is None else None)
