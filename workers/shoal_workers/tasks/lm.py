"""The built-in task: a language model on text. It uses the task contract exactly as a user's own task does.

`prepare` writes the token shards (once per node), `build_dataset` memory-maps them, `build_model` draws the weights
from torch's global generator, and `loss` is the mean cross entropy of the next token in nats. Loaded by the engine by
its name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from shoal_workers.contract.language_model import LanguageModelConfig, feed_forward_dim
from shoal_workers.contract.text_data import TextDataConfig
from shoal_workers.data.tokenizer import load_tokenizer
from shoal_workers.tasks.text import TextTask
from shoal_workers.tasks.transformer import Transformer, head_dim


class LanguageModel(TextTask):
    """A decoder-only transformer, trained to predict the next token of a text corpus."""

    deferred_init = True

    def __init__(self, model: dict[str, Any], data: dict[str, Any], seed: int) -> None:
        self.config = LanguageModelConfig.model_validate(model)
        super().__init__(TextDataConfig.model_validate(data), self.config.seq_len)
        self.seed = seed

    def build_model(self) -> nn.Module:
        """Return the model, with weights from torch's global generator.

        Raises:
            ValueError: model.vocab_size is smaller than the tokenizer's vocabulary.
        """
        needed = load_tokenizer(self.text.tokenizer).vocab_size
        vocab_size = self.config.vocab_size or needed
        if vocab_size < needed:
            raise ValueError(
                f"model.vocab_size {vocab_size} is smaller than the {needed} tokens of data.tokenizer "
                f"{self.text.tokenizer!r}. Leave model.vocab_size out, or set it to at least {needed}."
            )
        return Transformer(self.config, vocab_size)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Mean next-token cross entropy (nats) of a batch of `collate`; computed in fp32.

        Under tp the logits are split over the vocabulary, and this computes on the parts (parallel/split_output.py).
        """
        logits: Tensor = model(batch["tokens"], batch["positions"])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())

    def export_config(self, model: nn.Module) -> dict[str, Any]:
        """A dense model is a LLaMA model with other names. transformers has no model with experts like these."""
        assert isinstance(model, Transformer)
        if self.config.num_experts:
            settings = self.config.model_dump() | {"vocab_size": model.embedding.num_embeddings}
            return {"config": {"model_type": "shoal-mixture-of-experts", **settings}, "renames": []}
        return {"config": _llama_config(self.config, model.embedding.num_embeddings), "renames": _LLAMA_NAMES}

    def shard_units(self, model: nn.Module) -> Iterable[nn.Module]:
        """Return the blocks, each gathered separately; embedding, last norm and head belong to the root."""
        assert isinstance(model, Transformer)
        return list(model.blocks)


_LLAMA_NAMES = [
    [r"^(embedding|norm|blocks)\.", r"model.\1."],
    [r"^head\.", "lm_head."],
    [r"^model\.embedding\.", "model.embed_tokens."],
    [r"^model\.blocks\.", "model.layers."],
    [r"\.attention_norm\.", ".input_layernorm."],
    [r"\.feed_forward_norm\.", ".post_attention_layernorm."],
    [r"\.attention\.query\.", ".self_attn.q_proj."],
    [r"\.attention\.key\.", ".self_attn.k_proj."],
    [r"\.attention\.value\.", ".self_attn.v_proj."],
    [r"\.attention\.out\.", ".self_attn.o_proj."],
    [r"\.feed_forward\.(gate|up|down)\.", r".mlp.\1_proj."],
]
"""Regular expressions and replacements, applied in this order: this model's names -> those of LlamaForCausalLM."""


def _llama_config(config: LanguageModelConfig, vocab_size: int) -> dict[str, Any]:
    """config.json of the LlamaForCausalLM of transformers that computes the same."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.dim,
        "intermediate_size": feed_forward_dim(config),
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads or config.num_heads,
        "head_dim": head_dim(config),
        "vocab_size": vocab_size,
        "max_position_embeddings": config.seq_len,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": config.tied_head,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
