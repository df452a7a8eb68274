"""The task that trains a causal language model of Hugging Face's `transformers`, on the same text as the built-in one.

    model: {path: /models/tiny-llama}                      config.json and weights from a local directory
    model: {config: {model_type: llama, hidden_size: ...}}  random weights
    model: {path: /models/tiny-llama, lora: {r: 16}}        adapters beside frozen weights, see lora.py

How a model is read and built is in pretrained.py. Loaded by the engine by its name.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from shoal_workers.contract.hugging_face import HuggingFaceConfig, has_ignored_tie
from shoal_workers.contract.hugging_face_plan import plan_of_hugging_face
from shoal_workers.contract.text_data import TextDataConfig
from shoal_workers.tasks.lora import BASE_RENAMES, add_adapters, export_of_adapters
from shoal_workers.tasks.pretrained import PretrainedModel, refuse_small_vocabulary
from shoal_workers.tasks.text import TextTask


class HuggingFaceModel(PretrainedModel):
    """The model half of a task: any architecture of AutoModelForCausalLM."""

    auto_class = "AutoModelForCausalLM"
    reloads_frozen = False
    """Set once a model is built: the base of adapters is in the directory's files, and need not be saved."""

    def __init__(self, settings: HuggingFaceConfig) -> None:
        super().__init__(settings)
        self.settings = settings
        self.router_loss_weight = 0.0

    @property
    def remarks(self) -> list[str]:
        """Sentences for the job's log."""
        remarks: list[str] = list(getattr(super(), "remarks", ()))
        if has_ignored_tie(self.settings):
            remarks.append(
                "config.json in model.path says that head and embedding are one, and its files have different values "
                "of the two: they are trained as two. Set tie_word_embeddings to false in it."
            )
        return remarks

    def build_model(self) -> nn.Module:
        """Return the model. Its weights are random, also if `initial_weights` says afterwards that others belong to it.

        Raises:
            ImportError: the extra `hf` is not installed.
            FileNotFoundError: model.path has no config.json.
            ValueError: the model has fewer tokens than the tokenizer, or differs from its config.json.
        """
        network = self.causal_network()
        if self.settings.lora is not None:
            add_adapters(network, self.settings.lora)
            self.reloads_frozen = self.initial_weights is not None
        self.router_loss_weight = float(getattr(network.config, "router_aux_loss_coef", 0.0) or 0.0)
        refuse_small_vocabulary(network.config.vocab_size, self.tokenizer)
        model = self.wrapped(network)
        plan = plan_of_hugging_face(self.settings)
        if plan is not None and bool(plan.tied) != _is_tied(network):
            raise ValueError(
                f"tie_word_embeddings is {bool(plan.tied)} in config.json and {_is_tied(network)} in the model that "
                "transformers builds. Set tie_word_embeddings in the config."
            )
        return model

    def wrapped(self, network: Any) -> CausalLM:
        """Return the model that is trained, of one of transformers that has its adapters already."""
        return CausalLM(network)

    def export_config(self, model: nn.Module) -> dict[str, Any]:
        """See PretrainedModel. Of a model with adapters, they alone are written."""
        described = super().export_config(model)
        if self.settings.lora is None:
            return described
        adapter = export_of_adapters(model.network, self.settings.lora, self.settings.path)
        return {**described, "renames": [*described["renames"], *BASE_RENAMES], "adapter": adapter}

    def causal_network(self) -> Any:
        """A model of transformers. Raises as `build_model`."""
        network = self.build_network({"tie_word_embeddings": False} if has_ignored_tie(self.settings) else None)
        _split_scale(network)
        return network


class HuggingFaceLM(HuggingFaceModel, TextTask):
    """Next tokens of a text. It is read with the directory's own tokenizer, unless `data.tokenizer` names another."""

    def __init__(self, model: dict[str, Any], data: dict[str, Any], seed: int) -> None:
        settings = HuggingFaceConfig.model_validate(model)
        HuggingFaceModel.__init__(self, settings)
        text = TextDataConfig.model_validate({"tokenizer": self.own_tokenizer(), **data})
        TextTask.__init__(self, text, settings.seq_len)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Mean next-token cross entropy (nats) of a batch of `collate`; computed in fp32.

        With `output_router_logits` in the model's config also the routers' loss, over the micro-batch as transformers
        computes it, times `router_aux_loss_coef`; the metric `router_loss` is that loss alone.

        Under tp the logits are split over the vocabulary, and this computes on the parts (parallel/split_output.py).
        """
        logits, router_loss = parts_of(model(batch["tokens"]))
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())
        if router_loss is None:
            return loss
        return loss + self.router_loss_weight * router_loss, {"router_loss": router_loss.detach()}


def parts_of(returned: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Logits and the routers' loss, of what a CausalLM returns."""
    return returned if isinstance(returned, tuple) else (returned, None)


class CausalLM(nn.Module):
    """Tokens (B, T) int64 -> logits (B, T, V), as a plain tensor; with `output_router_logits` in the config also the
    routers' loss, a scalar."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network
        self._has_router_loss = bool(getattr(network.config, "output_router_logits", False))

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """`positions` (B, T): where they begin anew, what follows does not see what was before; None means one
        sequence."""
        return self.run(self.network, tokens, positions)

    def run(self, network: Any, tokens: Tensor, positions: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """What `network`, a part of this model, makes of the tokens."""
        output = network(input_ids=tokens, position_ids=positions, use_cache=False)
        logits: Tensor = output.logits
        if not self._has_router_loss:
            return logits
        router_loss = getattr(output, "aux_loss", None)
        if not isinstance(router_loss, Tensor):
            raise ValueError(
                f"output_router_logits is true in the model's config, and {type(network).__name__} of the "
                "installed transformers computes no loss of its routers. Set it to false."
            )
        return logits, router_loss


def without_noise(network: Any) -> None:
    """Switch off the dropouts and the noise of routers of a model of transformers in place, but no adapter's."""
    for name, module in network.named_modules():
        if isinstance(module, nn.Dropout) and ".lora_" not in name:
            module.p = 0.0
        for key, value in vars(module).items():
            if ("dropout" in key or "jitter" in key) and isinstance(value, float):
                setattr(module, key, 0.0)


def _split_scale(network: Any) -> None:
    """Gemma's embedding scales what it looks up. The scale becomes a hook of it, and the embedding torch's own, which
    the tensor axis can split. The names of its tensors stay."""
    embedding = network.get_input_embeddings()
    if "embed_scale" not in dict(embedding.named_buffers(recurse=False)) or not isinstance(embedding, nn.Embedding):
        return
    embedding.__class__ = nn.Embedding
    embedding.register_forward_hook(lambda module, _, rows: rows * module.embed_scale.to(rows.dtype))


def _is_tied(network: Any) -> bool:
    head = network.get_output_embeddings()
    return head is not None and head.weight is network.get_input_embeddings().weight
