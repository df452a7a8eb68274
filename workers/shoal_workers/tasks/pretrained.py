"""Builds a model of transformers from a directory or a config, as a task's model, and describes it for an export.

Nothing is downloaded, and no code from a model's directory is run. Random weights are drawn after the model is split,
and so are the weights of a directory read, so that no worker holds all of them. Parameters are fp32, whatever the dtype
in the files. Hidden here: which files transformers must read and convert itself, and which files of a directory belong
to an export. The extra `hf` installs the requirements.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal_workers.checkpoint.errors import InitialWeightsUnusable
from shoal_workers.checkpoint.safetensors_reader import SafetensorsReader
from shoal_workers.contract.hugging_face import (
    CONFIG_NAME,
    PREFIX,
    TOKENIZER_NAME,
    PretrainedConfig,
    config_of,
    quantized,
)
from shoal_workers.contract.text_data import BYTE_TOKENIZER
from shoal_workers.data.tokenizer import load_tokenizer

_TOKENIZER_FILES = (
    *(TOKENIZER_NAME, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.json", "merges.txt", "tokenizer.model"),
)
"""Files of a tokenizer that transformers writes into a model's directory."""


class PretrainedModel:
    """Base of tasks whose model is one of transformers."""

    deferred_init = True
    auto_class = ""
    """Name of the auto class of transformers that builds the model."""
    tokenizer = ""
    """What texts are read with: "bytes", or the path of a tokenizers JSON file; empty: there are none."""
    exported_files: tuple[str, ...] = ()
    """Files of model.path that belong to an export, besides the config and those of the tokenizer."""

    def __init__(self, settings: PretrainedConfig) -> None:
        self._pretrained = settings
        self.initial_weights: str | None = None
        """Set by `build_network`: the directory from which the tensors are read by their names; None if there is none,
        or transformers has read and converted the weights already."""

    def build_network(self, changes: Mapping[str, Any] | None = None) -> Any:
        """Build the model. Its weights are random if the task has no directory, or `initial_weights` names it.

        Args:
            changes: keys of the model's config that differ.

        Raises:
            ImportError: the extra `hf` is not installed.
            FileNotFoundError: model.path has no config.json.
            ValueError: the model is quantized, or `auto_class` does not know the architecture.
        """
        settings, overrides = self._pretrained, dict(changes or {})
        try:
            import transformers
        except ImportError as error:
            raise ImportError(
                f"task {type(self).__name__} needs transformers ({error}): pip install 'shoal[hf]'."
            ) from error
        auto: Any = getattr(transformers, self.auto_class)
        self.initial_weights = None
        if problem := quantized(config_of(settings)):  # the server could not check if it does not see model.path
            raise ValueError(problem)
        if settings.path is None:
            config = transformers.AutoConfig.for_model(**{**(settings.config or {}), **overrides})
            return auto.from_config(config, dtype=torch.float32)
        directory = Path(settings.path).expanduser()
        if not (directory / CONFIG_NAME).is_file():
            raise FileNotFoundError(
                f"model.path {settings.path!r} has no {CONFIG_NAME} on this node. Name a directory that every "
                "node can read."
            )
        options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        config = transformers.AutoConfig.from_pretrained(directory, **options, **overrides)
        network = auto.from_config(config, dtype=torch.float32, trust_remote_code=False)
        if _has_all_tensors(directory, network):
            self.initial_weights = str(directory)
            return network
        options["ignore_mismatched_sizes"] = any("label" in key for key in overrides)
        return auto.from_pretrained(directory, config=config, dtype=torch.float32, use_safetensors=True, **options)

    def export_config(self, model: nn.Module) -> dict[str, Any]:
        """config.json as transformers writes it, how its names follow from this model's, and files, name -> path."""
        network: Any = model.network
        config = json.loads(network.config.to_json_string())
        config |= {"architectures": [type(network).__name__]}
        files = self.tokenizer_files(self.tokenizer) | self.files_beside(self.exported_files)
        return {"config": config, "renames": [[f"^{PREFIX}", ""]], "files": files}

    @property
    def padding(self) -> int:
        """The token that fills a sample; nothing is computed of it."""
        value = config_of(self._pretrained).get("pad_token_id")
        return value if isinstance(value, int) else 0

    def own_tokenizer(self) -> str:
        """Return the tokenizer in model.path, else "bytes"."""
        tokenizer_file = Path(self._pretrained.path or "").expanduser() / TOKENIZER_NAME
        return str(tokenizer_file) if self._pretrained.path is not None and tokenizer_file.is_file() else BYTE_TOKENIZER

    def tokenizer_files(self, tokenizer: str) -> dict[str, str]:
        """Return the files of the tokenizer of the text: name in an export -> path. Bytes have none."""
        if tokenizer in ("", BYTE_TOKENIZER):
            return {}
        path = Path(tokenizer).expanduser().resolve()
        if self._pretrained.path is None or path.parent != Path(self._pretrained.path).expanduser().resolve():
            return {TOKENIZER_NAME: str(path)}
        return self.files_beside(_TOKENIZER_FILES)

    def files_beside(self, names: tuple[str, ...]) -> dict[str, str]:
        """Return the files with these names that model.path has: name -> path."""
        if self._pretrained.path is None:
            return {}
        directory = Path(self._pretrained.path).expanduser().resolve()
        return {name: str(directory / name) for name in names if (directory / name).is_file()}


class Network(nn.Module):
    """Wraps a model of transformers, so that it returns its logits as a plain tensor."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, **inputs: Any) -> Tensor:
        logits: Tensor = self.network(**inputs).logits
        return logits


def refuse_small_vocabulary(vocab_size: int, tokenizer: str, more: int = 0) -> None:
    """Raise ValueError if the model has fewer tokens than the tokenizer and `more`."""
    needed = load_tokenizer(tokenizer).vocab_size + more
    if vocab_size < needed:
        raise ValueError(
            f"the model's vocab_size {vocab_size} is smaller than the {needed} tokens of "
            f"data.tokenizer {tokenizer!r}. Name the model's own tokenizer, or train a larger model."
        )


def _has_all_tensors(directory: Path, network: nn.Module) -> bool:
    """Return True if the files have all tensors of the model under its own names, tied ones with equal values."""
    try:
        reader = SafetensorsReader(str(directory))
    except InitialWeightsUnusable:
        return False
    state = network.state_dict(keep_vars=True)
    names: dict[int, list[str]] = {}
    for name, value in state.items():
        if name in reader.tensors and reader.tensors[name].shape == tuple(value.shape):
            names.setdefault(id(value), []).append(name)
    return all(id(value) in names for value in state.values()) and all(
        torch.equal(reader.read(first), reader.read(name)) for first, *further in names.values() for name in further
    )
