"""What classifiers of transformers share: the number and the names of their classes, the head, and the loss.

The number is `model.num_labels`, else that of the names in `data.classes`, else that of the model's config. Names go
into the exported config (`id2label`), so that a pipeline of transformers answers with them. Called by the tasks that
classify texts and images.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from shoal_workers.contract.hugging_face import config_of
from shoal_workers.contract.text_data import ClassifierConfig
from shoal_workers.tasks.pretrained import Network
from shoal_workers.tasks.rows import RowTask

_DEFAULT_NUM = 2
"""That of transformers."""


class Classifier(RowTask):
    """A model with a head for classes."""

    def __init__(self, settings: ClassifierConfig, names: Sequence[str]) -> None:
        """`names`: of the classes, in order; empty: those of the config."""
        super().__init__(settings)
        self._asked = settings.num_labels
        self._names = tuple(names)

    def classes(self) -> tuple[tuple[str, ...], int]:
        """Names of the classes, perhaps none, and their number. ValueError: they contradict each other."""
        in_config = config_of(self._pretrained)
        stored = _names_in(in_config)
        number = self._asked or len(self._names) or len(stored) or int(in_config.get("num_labels") or _DEFAULT_NUM)
        names = self._names or (stored if len(stored) == number else ())
        if names and len(names) != number:
            raise ValueError(
                f"data.classes has {len(names)} names, and model.num_labels is {number}. Give a name to each class, or "
                "leave one of the two out."
            )
        if len(set(names)) != len(names):
            raise ValueError(f"data.classes names a class twice: {', '.join(names)}. Each class has one number.")
        return names, number

    def build_model(self) -> nn.Module:
        """See PretrainedModel."""
        names, number = self.classes()
        ids = {"id2label": dict(enumerate(names)), "label2id": {name: at for at, name in enumerate(names)}}
        return Network(self.build_network(ids if names else {"num_labels": number}))

    def judged(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean cross entropy (nats) in fp32 of labels (B,), and the metric `accuracy`. Logits (B,
        classes)."""
        accuracy = (logits.detach().argmax(-1) == labels).float().mean()
        return F.cross_entropy(logits.float(), labels), {"accuracy": accuracy}


def directories_in(folder: str) -> tuple[str, ...]:
    """Names of the directories in a folder, in order; empty if it cannot be read here."""
    place = Path(folder).expanduser()
    names = sorted(entry.name for entry in place.iterdir() if entry.is_dir()) if place.is_dir() else []
    return tuple(name for name in names if not name.startswith("."))


def _names_in(config: dict[str, Any]) -> tuple[str, ...]:
    """`id2label` of a config.json, in order; empty: it has none."""
    given = config.get("id2label")
    if not isinstance(given, dict):
        return ()
    try:
        return tuple(str(given[key]) for key in sorted(given, key=int))
    except ValueError:
        return ()
