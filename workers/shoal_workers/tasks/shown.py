"""What the samples of a built-in task are, for people: rows of a document that `shoal data show` prints.

    SHOWN[task](task, dataset, numbers)  ->  a row for each of these samples:

        {"texts": [{"title": "", "spans": [["The sky. Answer:", false], [" yes", true]], "in_loss": 1}, ...],
         "tokens": 9, "in_loss": 1, "label": "good"}

The keys are those of `SamplePreview`. Those of an image have `pixels` besides, height x width x channels in bytes, as
they were before they were normalised. Each kind of task has one function. Called by `engine.step.data_preview`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal_workers.contract.hugging_face import DPO_TASK, HF_TASK, SFT_TASK
from shoal_workers.contract.language_model import LM_TASK
from shoal_workers.contract.text_data import (
    BYTE_TOKENIZER,
    IMAGE_CLASS_TASK,
    MASKED_TASK,
    SEQ2SEQ_TASK,
    SPEECH_TASK,
    TEXT_CLASS_TASK,
)
from shoal_workers.data.tokenizer import load_tokenizer
from shoal_workers.tasks.rows import NO_LABEL

_SHADES = " .:-=+*#%@"
_COLUMNS = 32

Row = dict[str, Any]
Decode = Callable[[Sequence[int]], str]


def rows(show: Callable[[Any, Any, Decode], Row], task: Any, dataset: Any, numbers: Sequence[int]) -> Iterator[Row]:
    """What `show` makes of these samples, one after the other."""
    decode = load_tokenizer(task.tokenizer or BYTE_TOKENIZER).decode
    for number in numbers:
        yield show(task, dataset[number], decode)


def answers(task: Any, sample: Any, decode: Decode) -> Row:
    """A prompt with its answer."""
    return _row([("", *_next_tokens(sample["tokens"], sample["labels"]))], decode)


def pairs(task: Any, sample: Any, decode: Decode) -> Row:
    """Two answers of a prompt."""
    both = zip(("chosen", "rejected"), sample["tokens"], sample["labels"], strict=True)
    return _row([(title, *_next_tokens(tokens, labels)) for title, tokens, labels in both], decode)


def text(task: Any, sample: Any, decode: Decode) -> Row:
    """A piece of text, of which each next token counts."""
    return _row([("", sample.tolist(), [False] + [True] * (len(sample) - 1))], decode)


def masked(task: Any, sample: Any, decode: Decode) -> Row:
    """Text with hidden tokens, as the model sees it."""
    return _row([("", sample["tokens"].tolist(), (sample["labels"] != NO_LABEL).tolist())], decode)


def targets(task: Any, sample: Any, decode: Decode) -> Row:
    """A source with its target."""
    source = sample["tokens"][sample["is_token"] == 1].tolist()
    target = sample["labels"][sample["labels"] != NO_LABEL].tolist()
    return _row([("source", source, [False] * len(source)), ("target", target, [True] * len(target))], decode)


def labelled_texts(task: Any, sample: Any, decode: Decode) -> Row:
    """A text with its class."""
    tokens = sample["tokens"][sample["is_token"] == 1].tolist()
    return _row([("", tokens, [False] * len(tokens))], decode) | {"label": _class_name(task, sample)}


def _next_tokens(tokens: Tensor, labels: Tensor) -> tuple[list[int], list[bool]]:
    """Return the whole sequence of inputs and their next tokens, without padding, and which tokens are labels."""
    is_label = [False, *(labels != NO_LABEL).tolist()]
    following = torch.where(labels == NO_LABEL, torch.cat((tokens[1:], labels[-1:])), labels)
    last = max((number for number, counts in enumerate(is_label) if counts), default=len(tokens) - 1)
    return [int(tokens[0]), *following.tolist()][: last + 1], is_label[: last + 1]


def _row(texts: Sequence[tuple[str, list[int], list[bool]]], decode: Decode) -> Row:
    return {
        "texts": [
            {"title": title, "spans": _spans(tokens, in_loss, decode), "in_loss": sum(in_loss)}
            for title, tokens, in_loss in texts
        ],
        "tokens": sum(len(tokens) for _, tokens, _ in texts),
        "in_loss": sum(sum(in_loss) for _, _, in_loss in texts),
    }


def _spans(tokens: list[int], in_loss: list[bool], decode: Decode) -> list[tuple[str, bool]]:
    groups = groupby(zip(tokens, in_loss, strict=True), lambda pair: pair[1])
    return [(decode([token for token, _ in group]), counts) for counts, group in groups]


def images(task: Any, sample: Any, decode: Decode) -> Row:
    """An image with its class, of a task `ImageClassification`."""
    settings, pixels = task.pixel_settings(), sample["pixels"]
    stored = (pixels.movedim(0, -1) * torch.tensor(settings.std) + torch.tensor(settings.mean)) / settings.scale
    return {
        "texts": [_text("pixels", describe_values(pixels))],
        "tokens": 0,
        "in_loss": 0,
        "label": _class_name(task, sample),
        "drawn": draw(pixels),
        "pixels": stored.round().clamp(0, 255).byte(),
    }


def speech(task: Any, sample: Any, decode: Decode) -> Row:
    """Features with their transcript, of a task `SpeechToText`."""
    labels = sample["labels"][sample["labels"] != NO_LABEL].tolist()
    texts = [_text("features", describe_values(sample["features"])), _text("text", decode(labels), len(labels))]
    return {"texts": texts, "tokens": len(labels), "in_loss": len(labels)}


def _class_name(task: Any, sample: Any) -> str:
    names, _ = task.classes()
    label = int(sample["label"])
    return names[label] if names else str(label)


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


SHOWN: dict[str, Callable[[Any, Any, Sequence[int]], Iterator[Row]]] = {
    SFT_TASK: partial(rows, answers),
    DPO_TASK: partial(rows, pairs),
    LM_TASK: partial(rows, text),
    HF_TASK: partial(rows, text),
    MASKED_TASK: partial(rows, masked),
    SEQ2SEQ_TASK: partial(rows, targets),
    TEXT_CLASS_TASK: partial(rows, labelled_texts),
    IMAGE_CLASS_TASK: partial(rows, images),
    SPEECH_TASK: partial(rows, speech),
}
