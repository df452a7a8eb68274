"""What the samples of a built-in task are, for people: rows of a document that `shoal data show` prints.

    SHOWN[task](task, dataset, numbers)  ->  a row for each of these samples:

        {"texts": [{"title": "", "spans": [["The sky. Answer:", false], [" yes", true]], "in_loss": 1}, ...],
         "tokens": 9, "in_loss": 1, "label": "good"}

The keys are those of `SamplePreview`. Those of an image have `pixels` besides, height x width x channels in bytes, as
they were before they were normalised. Each kind of task has one function. Called by `engine.step.data_preview`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal_workers.contract.hugging_face import DPO_TASK, HF_TASK, SFT_TASK
from shoal_workers.contract.language_model import LM_TASK
from shoal_workers.contract.text_data import IMAGE_CLASS_TASK, MASKED_TASK, SEQ2SEQ_TASK, SPEECH_TASK, TEXT_CLASS_TASK
from shoal_workers.data.tokenizer import load_tokenizer
from shoal_workers.tasks.rows import NO_LABEL

_SHADES = " .:-=+*#%@"
_COLUMNS = 32

Row = dict[str, Any]
Decode = Callable[[Sequence[int]], str]


def answers(task: Any, dataset: Any, numbers: Sequence[int]) -> Iterator[Row]:
    """Prompts with answers."""
    decode = load_tokenizer(task.tokenizer).decode
    for number in numbers:
        sample = dataset[number]
        yield _row([("", *_next_tokens(sample["tokens"], sample["labels"]))], decode)


def pairs(task: Any, dataset: Any, numbers: Sequence[int]) -> Iterator[Row]:
    """Two answers of a prompt."""
    decode = load_tokenizer(task.tokenizer).decode
    for number in numbers:
        sample = dataset[number]
        both = zip(("chosen", "rejected"), sample["tokens"], sample["labels"], strict=True)
        yield _row([(title, *_next_tokens(tokens, labels)) for title, tokens, labels in both], decode)


def text(task: Any, dataset: Any, numbers: Sequence[int]) -> Iterator[Row]:
    """Pieces of text, of which each next token counts."""
    decode = load_tokenizer(task.text.tokenizer).decode
    for number in numbers:
        tokens = dataset[number].tolist()
        yield _row([("", tokens, [False] + [True] * (len(tokens) - 1))], decode)


def masked(task: Any, dataset: Any, numbers: Sequence[int]) -> Iterator[Row]:
    """Text with hidden tokens, as the model sees it."""
    decode = load_tokenizer(task.masked.tokenizer).decode
    for number in numbers:
        sample = dataset[number]
        yield _row([("", sample["tokens"].tolist(), (sample["labels"] != NO_LABEL).tolist())], decode)


def targets(task: Any, dataset: Any, numbers: Sequence[int]) -> Iterator[Row]:
    """Sources with targets."""
    decode = load_tokenizer(task.tokenizer).decode
    for number in numbers:
        sample = dataset[number]
        source = sample["tokens"][sample["is_token"] == 1].tolist()
        target = sample["labels"][sample["labels"] != NO_LABEL].tolist()
        yield _row([("source", source, [False] * len(source)), ("target", target, [True] * len(target))], decode)


def labelled_texts(task: Any, dataset: Any, numbers: Sequence[int]) -> Iterator[Row]:
    """Texts with classes."""
    decode = load_tokenizer(task.tokenizer).decode
    names, _ = task.classes()
    for number in numbers:
        sample = dataset[number]
        tokens, label = sample["tokens"][sample["is_token"] == 1].tolist(), int(sample["label"])
        yield _row([("", tokens, [False] * len(tokens))], decode) | {"label": names[label] if names else str(label)}


def _next_tokens(tokens: Tensor, labels: Tensor) -> tuple[list[int], list[bool]]:
    """The whole sequence of inputs and their next tokens, without padding, and which tokens are labels."""
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


def images(task: Any, dataset: Any, numbers: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Images with classes, of a task `ImageClassification`."""
    names, _ = task.classes()
    settings = task.pixel_settings()
    for number in numbers:
        sample = dataset[number]
        pixels, label = sample["pixels"], int(sample["label"])
        stored = (pixels.movedim(0, -1) * torch.tensor(settings.std) + torch.tensor(settings.mean)) / settings.scale
        yield {
            "texts": [_text("pixels", describe_values(pixels))],
            "tokens": 0,
            "in_loss": 0,
            "label": names[label] if names else str(label),
            "drawn": draw(pixels),
            "pixels": stored.round().clamp(0, 255).byte(),
        }


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


SHOWN: dict[str, Callable[[Any, Any, Sequence[int]], Iterator[Row]]] = {
    SFT_TASK: answers,
    DPO_TASK: pairs,
    LM_TASK: text,
    HF_TASK: text,
    MASKED_TASK: masked,
    SEQ2SEQ_TASK: targets,
    TEXT_CLASS_TASK: labelled_texts,
    IMAGE_CLASS_TASK: images,
    SPEECH_TASK: speech,
}
