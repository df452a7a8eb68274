"""What the first samples of a job show of mistakes that training does not: samples that differ when they are read
again, images of one colour, a single label.

Costs a second reading of one micro-batch, on rank 0 before the first step. Called by `Batches`, by `Samples` of a loop,
and by `Trainer`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal_workers.contract.worker_reports import ValidationReport
from shoal_workers.engine.task.code_owner import line_of_attribute
from shoal_workers.engine.task.reachable import marks, reachable
from shoal_workers.torch_internals import tree_leaves

_MIN_IMAGES = 2
_MAX_NAMES = 3
_ONE = 1.0


def look(batch: Any, again: Any, data: Any, place: str, *, say: Callable[[str], None]) -> None:
    """Remark on a micro-batch, and on what it was when it was read again.

    Args:
        data: the data set.
        place: the line where it is made, or what it is.
        say: called with sentences for the job's log.

    Raises:
        ValueError: the samples differ.
    """
    if not is_same(batch, again):
        raise ValueError(f"{describe_changed(place)}{_describe_changing(data)}")
    for text in remarks_on_batch(batch):
        say(text)


def describe_changed(place: str) -> str:
    """What is wrong with samples that differ when they are read again, and what to do."""
    return (
        f"{place}: a micro-batch had other samples when it was read again with the same seeds. They come from a "
        "generator of the data set, from a clock, or from a counter, so losses would depend on the number of workers, "
        "on batch.num_workers and on lost workers. Two ways out: draw from torch, numpy.random or random, which are "
        "seeded for each micro-batch; or make the generator of a sample from its index, as in "
        "numpy.random.default_rng([seed, index])."
    )


def _describe_changing(data: Any) -> str:
    """The attributes that reading a sample changes; empty: none that is known."""
    before = marks(reachable({"data": data}, ()))
    data[0]
    now = marks(reachable({"data": data}, ()))
    paths = [path for path in {**before, **now} if before.get(path) != now.get(path)]
    keys = dict.fromkeys(match[1] for path in paths if (match := re.match(r"data\.(\w+)", path)))
    lines = {key: line_of_attribute(data, key) for key in list(keys)[:_MAX_NAMES]}
    names = ", ".join(f"{key!r} of {type(data).__name__}" + (line and f" ({line})") for key, line in lines.items())
    return f" What reading a sample changes: {names}." if names else ""


def is_same(batch: Any, again: Any) -> bool:
    """True if both have the same values in all tensors and arrays, nan included, and the same other leaves."""
    pairs = list(zip(tree_leaves(batch), tree_leaves(again), strict=False))
    return len(tree_leaves(batch)) == len(tree_leaves(again)) and all(_is_same_leaf(*pair) for pair in pairs)


def _is_same_leaf(leaf: Any, other: Any) -> bool:
    if isinstance(leaf, Tensor) and isinstance(other, Tensor):
        return leaf.shape == other.shape and bool(torch.isclose(leaf, other, rtol=0, atol=0, equal_nan=True).all())
    if isinstance(leaf, np.ndarray) and isinstance(other, np.ndarray):
        return leaf.dtype == other.dtype and leaf.tobytes() == other.tobytes()
    return not isinstance(leaf, str | bytes | int | float | bool) or leaf == other


def remarks_on_batch(batch: Any) -> Iterator[str]:
    """Sentences about a micro-batch of training."""
    tensors = (
        batch.items()
        if isinstance(batch, Mapping)
        else enumerate(batch if isinstance(batch, tuple | list) else [batch])
    )
    for name, tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.ndim == 4 and len(tensor) >= _MIN_IMAGES and tensor.numel():
            pixels = tensor.flatten(2)
            if torch.equal(pixels.amin(-1), pixels.amax(-1)) and pixels.shape[-1] > 1:
                yield (
                    f"the first {len(tensor)} samples of {name!r} are of one colour (the first pixel is "
                    f"{tensor[0, :, 0, 0].tolist()}). Are images of 16 bits or of floats scaled as those of 8 bits?"
                )


def remarks_on_labels(data: Any, split: str) -> Iterator[str]:
    """Sentences about the labels of a data set that counts them (`label_counts`)."""
    counts = data.label_counts() if callable(getattr(data, "label_counts", None)) else {}
    if len(counts) == 1:
        [(label, count)] = counts.items()
        yield f"all {count:,} examples of the {split} split have the label {label}."


def remarks_on_validation(report: ValidationReport, metric: str) -> Iterator[str]:
    """Sentences about the first validation of a job. `metric`: `validation.metric`."""
    if metric not in ("loss", *report.metrics):
        has = ", ".join(("loss", *report.metrics))
        yield f"validation.metric {metric!r} is not in the first validation, which has {has}: it counts as no better."
    for name, value in report.metrics.items():
        if "acc" in name.lower() and value == _ONE:
            yield (
                f"{name} is 1 in the first validation, after step {report.step}, on {report.samples:,} samples. Does "
                "the validation have samples of the training, or of one class only?"
            )
