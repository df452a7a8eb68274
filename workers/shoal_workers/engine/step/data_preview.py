"""Describes what training will read: `shoal data show` before anything trains, and a job before its first step.

Samples are in the order of the training, and of the validation. The rows of each kind of task are in `tasks.shown`; of
other tasks no sample is read, since that may change what they read next. Called by `data_show` and by `TaskProgram`.
"""

from __future__ import annotations

import base64
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shoal_workers.contract.data_preview import MAX_LABELS, DataPreview, SamplePreview, SplitPreview
from shoal_workers.contract.hugging_face import HF_TASKS
from shoal_workers.contract.spec import JobSpec
from shoal_workers.engine.length_buckets import LengthBuckets
from shoal_workers.engine.media.encode import encode_png
from shoal_workers.engine.randomness import generator_states, seed_everything, set_generator_states
from shoal_workers.engine.sample_order import training_order, validation_order
from shoal_workers.engine.step.first_look import remarks_on_labels
from shoal_workers.engine.task.task import LoadedTask
from shoal_workers.tasks.shown import SHOWN

_IMAGE_PIXELS = 96
"""Longer side of an image's copy, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much is read and described of each split."""

    rows: int
    counted: int
    """Samples whose lengths are counted, at most."""
    chars: int
    """Characters of each text, at most."""
    seconds: float
    """No further sample is read after this time."""


OF_JOB = Extent(rows=5, counted=200, chars=4_000, seconds=0.5)
"""Costs a job at most about a second before its first step."""


def describe(task: LoadedTask, spec: JobSpec, extent: Extent) -> DataPreview:
    """Describe the data of a task that has opened it. The random generators stay as they are. Raises whatever the task
    raises."""
    splits: dict[str, SplitPreview | None] = {}
    remarks, states = list(task.remarks), generator_states()
    seed_everything(spec.seed)
    try:
        for name, data in (("train", task.train_data), ("validation", task.validation_data)):
            split = splits[name] = None if data is None else _split(spec, task.instance, name, data, extent)
            remarks += [] if data is None else remarks_on_labels(data, name)
            if split is not None and split.num_few:
                remarks.append(f"{split.num_few:,} {name} samples have one token in the loss.")
    finally:
        set_generator_states(states)
    return DataPreview(task=spec.task, remarks=tuple(remarks), splits=splits)


def _split(spec: JobSpec, task: Any, name: str, data: Any, extent: Extent) -> SplitPreview:
    data = data.samples if isinstance(data, LengthBuckets) else data
    if name == "train":
        order = training_order(data, range(min(len(data), extent.counted)), seed=spec.seed)
    else:
        order = validation_order(data, spec.validation.samples, seed=spec.seed)
    counts = data.label_counts() if hasattr(data, "label_counts") else {}
    names = task.classes()[0] if counts and hasattr(task, "classes") else ()
    frequent = sorted(counts.items(), key=lambda pair: -pair[1])[:MAX_LABELS]
    split = SplitPreview(
        samples=len(data),
        validated=len(order) if name == "validation" else None,
        left_out=dict(getattr(data, "left_out", {})),
        num_cut=getattr(data, "num_cut", 0),
        num_labels=len(counts),
        labels={names[label] if names else str(label): count / len(data) for label, count in frequent},
    )
    if (rows_of := SHOWN.get(spec.task)) is None:
        return split
    rows = list(_until(extent.seconds, rows_of(task, data, order[: extent.counted])))
    return split.model_copy(
        update={
            "num_counted": len(rows),
            "tokens": _range([row["tokens"] for row in rows]),
            "in_loss": _range([row["in_loss"] for row in rows]),
            "num_few": sum(text["in_loss"] == 1 for row in rows for text in row["texts"] if spec.task in HF_TASKS),
            "rows": tuple(_sample(row, extent.chars) for row in rows[: extent.rows]),
        }
    )


def _until(seconds: float, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    end_mono = time.monotonic() + seconds
    for row in rows:
        yield row
        if time.monotonic() > end_mono:
            return


def _range(values: Sequence[int]) -> tuple[int, int, int]:
    """Least, median and most."""
    return min(values), statistics.median_low(values), max(values)


def _sample(row: dict[str, Any], most_chars: int) -> SamplePreview:
    pixels = row.pop("pixels", None)
    texts = [{**text, **_cut(text["spans"], most_chars)} for text in row["texts"]]
    return SamplePreview.model_validate({**row, "texts": texts, "png": _small_png(pixels)})


def _cut(spans: Iterable[tuple[str, bool]], most_chars: int) -> dict[str, Any]:
    """The first characters of a text."""
    kept: list[tuple[str, bool]] = []
    left_out = 0
    for text, in_loss in spans:
        part = text[:most_chars]
        most_chars -= len(part)
        left_out += len(text) - len(part)
        kept += [(part, in_loss)] if part or not text else []
    return {"spans": kept, "left_out_chars": left_out}


def _small_png(pixels: torch.Tensor | None) -> str:
    """`pixels`: height x width x channels, bytes."""
    if pixels is None or pixels.shape[-1] not in (1, 3, 4):
        return ""
    every = -(-max(pixels.shape[:2]) // _IMAGE_PIXELS)
    return base64.b64encode(encode_png(pixels[::every, ::every].numpy())).decode()
