"""Samples of images and of speech for people, as they arrive at the model: rows in the form of `shoal data show`.

    {"texts": [{"title": "pixels", "spans": [["3 x 16 x 16, -1 to 1 ...", false]], "in_loss": 0}, ...], "tokens": 0,
     "in_loss": 0, "label": "cat"}

A picture is drawn with letters, so that orientation, cut and contrast are seen in a terminal. Called by `shown`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from shoal_workers.data.tokenizer import load_tokenizer
from shoal_workers.tasks.rows import NO_LABEL

_SHADES = " .:-=+*#%@"
_COLUMNS = 32


def images(task: Any, dataset: Any, numbers: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Images with classes, of a task `ImageClassification`."""
    names, _ = task.classes()
    for number in numbers:
        sample = dataset[number]
        label = int(sample["label"])
        texts = [_text("pixels", describe_values(sample["pixels"])), _text("", draw(sample["pixels"]))]
        yield {"texts": texts, "tokens": 0, "in_loss": 0, "label": names[label] if names else str(label)}


def speech(task: Any, dataset: Any, numbers: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Features with transcripts, of a task `SpeechToText`."""
    decode = load_tokenizer(task.tokenizer).decode
    for number in numbers:
        sample = dataset[number]
        labels = sample["labels"][sample["labels"] != NO_LABEL].tolist()
        texts = [_text("features", describe_values(sample["features"])), _text("text", decode(labels), len(labels))]
        yield {"texts": texts, "tokens": len(labels), "in_loss": len(labels)}


def describe_values(values: Tensor) -> str:
    """Shape, range and mean."""
    shape = " x ".join(map(str, values.shape))
    return f"{shape}, {float(values.min()):.3g} to {float(values.max()):.3g}, mean {float(values.mean()):.3g}"


def draw(pixels: Tensor) -> str:
    """An image (channels, height, width) in letters, from its darkest to its brightest value."""
    height, width = pixels.shape[-2:]
    columns = min(_COLUMNS, width)
    rows = max(1, columns * height // (2 * width))  # a letter is twice as high as wide
    grey = F.adaptive_avg_pool2d(pixels.mean(0, keepdim=True), (rows, columns))[0]
    low, span = float(pixels.min()), float(pixels.max() - pixels.min())
    scaled = ((grey - low) / (span or 1.0) * (len(_SHADES) - 1)).round().int().tolist()
    return "\n".join("".join(_SHADES[shade] for shade in row).rstrip() for row in scaled)


def _text(title: str, text: str, in_loss: int = 0) -> dict[str, Any]:
    return {"title": title, "spans": [[text, in_loss > 0]], "in_loss": in_loss}
