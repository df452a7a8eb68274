"""A model of transformers as a task's model: built from a directory or a config, and described for an export.

Nothing is downloaded, and no code from a model's directory is run. Weights are drawn, and those of a directory read,
after the model is split, so that no worker holds all of them. Parameters are fp32, whatever the dtype in the files.
Hidden here: which files transformers must read and convert itself, and what of a directory belongs to an export. The
extra `hf` installs the requirements. Called by the tasks.
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
"""What transformers keeps of a tokenizer in a model's directory."""


class PretrainedModel:
    """The model half of a task."""

    deferred_init = True
    auto_class = ""
    """The class of transformers that knows the architectures."""

    def __init__(self, settings: PretrainedConfig) -> None:
        self._pretrained = settings
        self.initial_weights: str | None = None
        """Once a model is built: the directory, if its files hold the model's tensors under their own names. Otherwise
        transformers has read and converted all of them."""

    def build_network(self, changes: Mapping[str, Any] | None = None) -> Any:
        """The model of transformers. Its weights are random, also if `initial_weights` says afterwards that others
        belong to it. `changes`: keys of its config.

        Raises:
            ImportError: the extra `hf` is not installed.
            FileNotFoundError: model.path has no config.json.
            ValueError: it is quantized, or `auto_class` does not know the architecture.
        """
        settings, given = self._pretrained, dict(changes or {})
        try:
            import transformers
        except ImportError as error:
            raise ImportError(
                f"task {type(self).__name__} needs transformers ({error}): pip install 'shoal[hf]'."
            ) from error
        auto: Any = getattr(transformers, self.auto_class)
        self.initial_weights = None
        if problem := quantized(config_of(settings)):  # the server may not see model.path
            raise ValueError(problem)
        if settings.path is None:
            config = transformers.AutoConfig.for_model(**{**(settings.config or {}), **given})
            return auto.from_config(config, dtype=torch.float32)
        directory = Path(settings.path).expanduser()
        if not (directory / CONFIG_NAME).is_file():
            raise FileNotFoundError(
                f"model.path {settings.path!r} has no {CONFIG_NAME} on this node. Name a directory that every "
                "node can read."
            )
        reading: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        config = transformers.AutoConfig.from_pretrained(directory, **reading, **given)
        network = auto.from_config(config, dtype=torch.float32, trust_remote_code=False)
        if _are_stored(network, directory):
            self.initial_weights = str(directory)
            return network
        reading["ignore_mismatched_sizes"] = any("label" in key for key in given)
        return auto.from_pretrained(directory, config=config, dtype=torch.float32, use_safetensors=True, **reading)

    def described(self, network: Any, files: Mapping[str, str]) -> dict[str, Any]:
        """For `export_config`: config.json as transformers writes it, and how its names follow from this model's.
        `files`: further ones of the export, name -> path."""
        config = json.loads(network.config.to_json_string())
        config |= {"architectures": [type(network).__name__]}
        return {"config": config, "renames": [[f"^{PREFIX}", ""]], "files": dict(files)}

    @property
    def padding(self) -> int:
        """The token that fills a sample; nothing is computed of it."""
        value = config_of(self._pretrained).get("pad_token_id")
        return value if isinstance(value, int) else 0

    def own_tokenizer(self) -> str:
        """The tokenizer in model.path, else "bytes"."""
        tokenizer_file = Path(self._pretrained.path or "").expanduser() / TOKENIZER_NAME
        return str(tokenizer_file) if self._pretrained.path is not None and tokenizer_file.is_file() else BYTE_TOKENIZER

    def tokenizer_files(self, tokenizer: str) -> dict[str, str]:
        """The tokenizer that the text is read with: name in an export -> path. Bytes have none."""
        if tokenizer == BYTE_TOKENIZER:
            return {}
        own = Path(tokenizer).expanduser().resolve()
        if self._pretrained.path is None or own.parent != Path(self._pretrained.path).expanduser().resolve():
            return {TOKENIZER_NAME: str(own)}
        return self.files_beside(_TOKENIZER_FILES)

    def files_beside(self, names: tuple[str, ...]) -> dict[str, str]:
        """Those of the files that model.path has: name -> path."""
        if self._pretrained.path is None:
            return {}
        directory = Path(self._pretrained.path).expanduser().resolve()
        return {name: str(directory / name) for name in names if (directory / name).is_file()}


class Network(nn.Module):
    """A model of transformers: its keyword arguments -> its logits, as a plain tensor."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, **inputs: Any) -> Tensor:
        logits: Tensor = self.network(**inputs).logits
        return logits


def refuse_small_vocabulary(vocab_size: int, tokenizer: str, more: int = 0) -> None:
    """ValueError: the model has fewer tokens than the tokenizer and `more`."""
    needed = load_tokenizer(tokenizer).vocab_size + more
    if vocab_size < needed:
        raise ValueError(
            f"the model's vocab_size {vocab_size} is smaller than the {needed} tokens of "
            f"data.tokenizer {tokenizer!r}. Name the model's own tokenizer, or train a larger model."
        )


def _are_stored(network: nn.Module, directory: Path) -> bool:
    """Return whether the directory's files hold all tensors of the model under its own names, each once or with equal
    values."""
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
