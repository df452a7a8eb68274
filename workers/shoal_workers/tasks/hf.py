"""The task that trains a causal language model of Hugging Face's `transformers`, on the same text as the built-in one.

    model: {path: /models/tiny-llama}                      config.json and weights from a local directory
    model: {config: {model_type: llama, hidden_size: ...}}  random weights
    model: {path: /models/tiny-llama, lora: {r: 16}}        adapters beside frozen weights, see lora.py

Nothing is downloaded, and no code from a model's directory is run. Weights are drawn, and those of a directory read,
after the model is split, so that no worker holds all of them. Parameters are fp32, whatever the dtype in the files. The
extra `hf` installs the requirements. Loaded by the engine by its name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal_workers.checkpoint.errors import InitialWeightsUnusable
from shoal_workers.checkpoint.safetensors_reader import SafetensorsReader
from shoal_workers.contract.model import (
    BYTE_TOKENIZER,
    CONFIG_NAME,
    PREFIX,
    TOKENIZER_NAME,
    HuggingFaceConfig,
    TextDataConfig,
    config_of,
    plan_of_hugging_face,
    quantized,
)
from shoal_workers.data.tokenizer import load_tokenizer
from shoal_workers.tasks.lora import BASE_RENAMES, add_adapters, export_of_adapters
from shoal_workers.tasks.text import TextTask

_TOKENIZER_FILES = (
    *(TOKENIZER_NAME, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.json", "merges.txt", "tokenizer.model"),
)
"""What transformers keeps of a tokenizer in a model's directory."""


class HuggingFaceModel:
    """The model half of a task: any architecture of AutoModelForCausalLM."""

    deferred_init = True
    reloads_frozen = False
    """Set once a model is built: the base of adapters is in the directory's files, and need not be saved."""

    def __init__(self, settings: HuggingFaceConfig) -> None:
        self.settings = settings
        self.router_loss_weight = 0.0
        self.initial_weights: str | None = None
        """Once a model is built: the directory, if its files hold the model's tensors under their own names. Otherwise
        transformers has read and converted all of them."""

    @property
    def tokenizer(self) -> str:
        """The tokenizer that the text is read with: "bytes", or the path of its tokenizer.json."""
        raise NotImplementedError

    def build_model(self) -> nn.Module:
        """The model. Its weights are random, also if `initial_weights` says afterwards that others belong to it.

        Raises:
            ImportError: the extra `hf` is not installed.
            FileNotFoundError: model.path has no config.json.
            ValueError: the model has fewer tokens than the tokenizer, or differs from its config.json.
        """
        network = self.network()
        if self.settings.lora is not None:
            add_adapters(network, self.settings.lora)
            self.reloads_frozen = self.initial_weights is not None
        self.router_loss_weight = _router_loss_weight(network.config)
        needed = load_tokenizer(self.tokenizer).vocab_size
        if network.config.vocab_size < needed:
            raise ValueError(
                f"the model's vocab_size {network.config.vocab_size} is smaller than the {needed} tokens of "
                f"data.tokenizer {self.tokenizer!r}. Name the model's own tokenizer, or train a larger model."
            )
        model = self.wrapped(network)
        plan = plan_of_hugging_face(self.settings)
        if plan is not None and bool(plan.tied) != _is_tied(network):
            raise ValueError(
                f"tie_word_embeddings is {bool(plan.tied)} in config.json and {_is_tied(network)} in the model that "
                "transformers builds. Set tie_word_embeddings in the config."
            )
        return model

    def wrapped(self, network: Any) -> CausalLM:
        """The model that is trained, of one of transformers that has its adapters already."""
        return CausalLM(network)

    def export_config(self, model: nn.Module) -> dict[str, Any]:
        """config.json as transformers writes it, and how its names follow from this model's."""
        assert isinstance(model, CausalLM)
        config = json.loads(model.network.config.to_json_string())
        config |= {"architectures": [type(model.network).__name__]}
        renames = [[f"^{PREFIX}", ""]]
        described = {"config": config, "renames": renames, "files": self._tokenizer_files()}
        if self.settings.lora is None:
            return described
        adapter = export_of_adapters(model.network, self.settings.lora, self.settings.path)
        return {**described, "renames": [*renames, *BASE_RENAMES], "adapter": adapter}

    def _tokenizer_files(self) -> dict[str, str]:
        """The tokenizer that the text is read with: name in an export -> path. Bytes have none."""
        if self.tokenizer == BYTE_TOKENIZER:
            return {}
        own = Path(self.tokenizer).expanduser().resolve()
        if self.settings.path is None or own.parent != Path(self.settings.path).expanduser().resolve():
            return {TOKENIZER_NAME: str(own)}
        return {name: str(own.parent / name) for name in _TOKENIZER_FILES if (own.parent / name).is_file()}

    def network(self) -> Any:
        """A model of transformers. Raises as `build_model`."""
        network = self._network()
        _split_scale(network)
        return network

    def _network(self) -> Any:
        try:
            from transformers import AutoConfig, AutoModelForCausalLM
        except ImportError as error:
            raise ImportError(f"task HuggingFaceLM needs transformers ({error}): pip install 'shoal[hf]'.") from error
        self.initial_weights = None
        if problem := quantized(config_of(self.settings)):  # the server may not see model.path
            raise ValueError(problem)
        if self.settings.path is None:
            config = AutoConfig.for_model(**(self.settings.config or {}))
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        directory = Path(self.settings.path).expanduser()
        if not (directory / CONFIG_NAME).is_file():
            raise FileNotFoundError(
                f"model.path {self.settings.path!r} has no {CONFIG_NAME} on this node. Name a directory that every "
                "node can read."
            )
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        network = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
        if _are_stored(network, directory):
            self.initial_weights = str(directory)
            return network
        return AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, local_files_only=True, use_safetensors=True, trust_remote_code=False
        )


class HuggingFaceLM(HuggingFaceModel, TextTask):
    """Next tokens of a text. It is read with the directory's own tokenizer, unless `data.tokenizer` names another."""

    def __init__(self, model: dict[str, Any], data: dict[str, Any], seed: int) -> None:
        settings = HuggingFaceConfig.model_validate(model)
        own = Path(settings.path).expanduser() / TOKENIZER_NAME if settings.path else None
        given = {"tokenizer": str(own), **data} if own is not None and own.is_file() else data
        HuggingFaceModel.__init__(self, settings)
        TextTask.__init__(self, TextDataConfig.model_validate(given), settings.seq_len)

    @property
    def tokenizer(self) -> str:
        return self.text.tokenizer

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
        """`positions` (B, T): where they begin anew, what follows does not see what was before; None: one sequence."""
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


def without_dropout(network: Any) -> None:
    """Switches off the dropouts of a model of transformers in place, but not those of adapters."""
    for name, module in network.named_modules():
        if isinstance(module, nn.Dropout) and ".lora_" not in name:
            module.p = 0.0
        for key, value in vars(module).items():
            if "dropout" in key and isinstance(value, float):
                setattr(module, key, 0.0)


def _router_loss_weight(config: Any) -> float:
    return float(getattr(config, "router_aux_loss_coef", 0.0) or 0.0)


def _split_scale(network: Any) -> None:
    """Gemma's embedding scales what it looks up. The scale becomes a hook of it, and the embedding torch's own, which
    the tensor axis can split. The names of its tensors stay."""
    embedding = network.get_input_embeddings()
    if "embed_scale" not in dict(embedding.named_buffers(recurse=False)) or not isinstance(embedding, nn.Embedding):
        return
    embedding.__class__ = nn.Embedding
    embedding.register_forward_hook(lambda module, _, rows: rows * module.embed_scale.to(rows.dtype))


def _are_stored(network: nn.Module, directory: Path) -> bool:
    """Whether the directory's files hold all tensors of the model under its own names."""
    try:
        stored = SafetensorsReader(str(directory)).tensors
    except InitialWeightsUnusable:
        return False
    state = network.state_dict(keep_vars=True)
    held = {id(value) for name, value in state.items() if name in stored and stored[name].shape == tuple(value.shape)}
    return all(id(value) in held for value in state.values())


def _is_tied(network: Any) -> bool:
    head = network.get_output_embeddings()
    return head is not None and head.weight is network.get_input_embeddings().weight
