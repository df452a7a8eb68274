"""The task that fine-tunes a model of transformers on answers: conversations, or prompts with completions.

    model: {path: /models/tiny-llama, seq_len: 1024, lora: {r: 16}}     as HuggingFaceLM
    data: {paths: [/data/train.jsonl], packing: true}                   see conversations.py and answers.py

The loss is over the tokens of answers alone. Loaded by the engine by its name.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from shoal_workers.contract.families import isolates_packed
from shoal_workers.contract.hugging_face import HuggingFaceConfig, architecture_of
from shoal_workers.contract.text_data import AnswersConfig
from shoal_workers.data.tokenizer import Split
from shoal_workers.tasks.answers import AnswerDataset, ExamplesTask
from shoal_workers.tasks.conversations import encode_answer
from shoal_workers.tasks.hf import parts_of
from shoal_workers.tasks.rows import summed_cross_entropy


class SupervisedFineTuning(ExamplesTask):
    """Answers to prompts."""

    def __init__(self, model: dict[str, Any], data: dict[str, Any], seed: int) -> None:
        self.answers = AnswersConfig.model_validate(data)
        super().__init__(HuggingFaceConfig.model_validate(model), self.answers, encode_answer, "answers")

    @property
    def tokens_per_sample(self) -> int:
        return self.answers.max_tokens or self.settings.seq_len

    def build_dataset(self, split: str) -> AnswerDataset:
        """Samples of answers.py; "train" or "validation".

        Raises:
            DataError: the files cannot be read, or have no sample for training.
        """
        examples, padding = self.prepared()
        settings, seq_len = self.answers, self.settings.seq_len
        return AnswerDataset(
            examples, Split(split), seq_len, padding, packing=settings.packing, max_tokens=settings.max_tokens
        )

    def build_model(self) -> nn.Module:
        """See HuggingFaceModel. ValueError: of its architecture it is not known that examples that are packed do not
        see each other."""
        model_type = architecture_of(self.settings)
        if self.answers.packing and not isolates_packed(model_type):
            raise ValueError(
                f"data.packing is true, and of the architecture {model_type!r} it is not known that examples in one "
                "sample do not see each other. Set it to false."
            )
        return super().build_model()

    def loss(
        self, model: nn.Module, batch: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the sum of the cross entropies (nats) of a micro-batch's answers, computed in fp32, and the number of
        their tokens: a step's loss is the mean over all tokens of answers in it.

        The routers' loss, if the model has one, counts as often as there are such tokens."""
        positions = (batch["positions"],) if self.answers.packing else ()
        logits, router_loss = parts_of(model(batch["tokens"], *positions))
        total, weight = summed_cross_entropy(logits, batch["labels"])
        if router_loss is None:
            return total, weight
        metrics = {"router_loss": router_loss.detach()}
        return total + weight * self.router_loss_weight * router_loss, weight, metrics
