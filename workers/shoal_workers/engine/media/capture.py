"""What the training thread does with logged media: it checks the names, thins large values out, and copies them.

The call may last 1 ms, so the bytes that it copies are bounded whatever is logged: an image is thinned out to its share
of MAX_COPIED_BYTES, and of a tensor that becomes a histogram MAX_SAMPLE values in evenly spaced blocks are copied,
since single values from all over a large tensor cost a cache miss each. A value on a GPU is copied on the GPU; the
thread that writes waits for it. Called by the recorder.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal_workers.checkpoint.save_plan import local_tensor
from shoal_workers.contract.media import (
    MAX_CELL_CHARS,
    MAX_CELLS,
    MAX_COLUMNS,
    MAX_COPIED_BYTES,
    MAX_IMAGES,
    MAX_ITEMS,
    MAX_SAMPLE,
    MAX_TEXT_CHARS,
)
from shoal_workers.contract.worker_reports import is_metric_name, suggested_name

_BLOCK = 256
"""Neighbouring values of a large tensor that are copied together."""
_CHANNELS = (1, 3, 4)
_PLAIN = frozenset((bool, int, type(None)))

Pixels = Tensor | np.ndarray[Any, Any]
Cell = str | bool | int | float | None


@dataclass(frozen=True, slots=True)
class CapturedImage:
    name: str
    content: Pixels | Path | Any
    """A copy of its values (a tensor, an array, or an image of PIL), or the path of its file."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class CapturedTensor:
    name: str
    sample: Tensor
    num_values: int


@dataclass(frozen=True, slots=True)
class CapturedTable:
    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    num_rows: int


@dataclass(slots=True)
class Captured:
    """Copies of all that one call has logged."""

    images: list[CapturedImage] = field(default_factory=list)
    tensors: list[CapturedTensor] = field(default_factory=list)
    tables: list[CapturedTable] = field(default_factory=list)
    texts: list[tuple[str, str, int]] = field(default_factory=list)
    """Name, text, and its length before it was cut."""
    notes: list[str] = field(default_factory=list)
    num_bytes: int = 0


def capture(
    images: Mapping[str, Any] | None = None,
    histogram: Mapping[str, Any] | None = None,
    table: Mapping[str, Any] | None = None,
    text: Mapping[str, str] | None = None,
) -> Captured:
    """Copies of these values, each by name.

    Args:
        images: an array or tensor (height x width, with 1, 3 or 4 channels first or last; floats from 0 to 1, or
            bytes), an image of PIL, the path of a PNG, JPEG, GIF or WebP file, or a list of such.
        histogram: tensors, arrays or lists of numbers.
        table: lists of rows, which are mappings or lists.

    Raises:
        ValueError, TypeError: a name or a value cannot be logged; the message says which.
    """
    found = Captured()
    _add_images(found, images or {})
    for name, value in _first(found, "histogram", histogram or {}):
        found.tensors.append(one := _sampled(name, value))
        found.num_bytes += one.sample.nbytes
    for name, rows in _first(found, "table", table or {}):
        found.tables.append(one_table := _table(name, rows))
        found.num_bytes += sum(len(cell) if isinstance(cell, str) else 8 for row in one_table.rows for cell in row)
    for name, words in _first(found, "text", text or {}):
        if not isinstance(words, str):
            raise TypeError(f"text {name!r} is a {type(words).__name__}, and must be a str.")
        found.texts.append((name, words[:MAX_TEXT_CHARS], len(words)))
        found.num_bytes += min(len(words), MAX_TEXT_CHARS)
    return found


def _first(found: Captured, kind: str, values: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """As many of the values as are kept, with valid names."""
    if not isinstance(values, Mapping):
        raise TypeError(f"{kind} is a {type(values).__name__}, and must be a mapping from names to values.")
    for name in values:
        if not is_metric_name(name):
            raise ValueError(f"{kind}: {name!r} is not a name. Use {suggested_name(name)!r}.")
    if len(values) > MAX_ITEMS:
        found.notes.append(
            f"{kind}: {len(values) - MAX_ITEMS} of {len(values)} were left out; a call keeps {MAX_ITEMS}"
        )
    return islice(values.items(), MAX_ITEMS)


def _add_images(found: Captured, images: Mapping[str, Any]) -> None:
    wanted: list[tuple[str, Any]] = []
    for name, value in _first(found, "images", images):
        several = _several(value)
        wanted += [(name, one) for one in several] if several is not None else [(name, value)]
    if len(wanted) > MAX_IMAGES:
        found.notes.append(
            f"images: {len(wanted) - MAX_IMAGES} of {len(wanted)} were left out; a call keeps {MAX_IMAGES}"
        )
    kept = wanted[:MAX_IMAGES]
    for name, value in kept:
        image, num_bytes = _image(name, value, MAX_COPIED_BYTES // len(kept))
        found.images.append(image)
        found.num_bytes += num_bytes


def _several(value: Any) -> Sequence[Any] | None:
    """The images of a list, or of an array with four dims."""
    if isinstance(value, (list, tuple)):
        return value
    shape = getattr(value, "shape", None)
    if shape is not None and len(shape) == 4:
        return [value[index] for index in range(min(len(value), MAX_IMAGES + 1))]
    return None


def _image(name: str, value: Any, most_bytes: int) -> tuple[CapturedImage, int]:
    if isinstance(value, (str, Path)):
        return CapturedImage(name, Path(value)), 0
    if hasattr(value, "getbands") and hasattr(value, "resize"):  # PIL, without an import of it
        return _pil_image(name, value, most_bytes)
    if isinstance(value, Tensor):
        value = local_tensor(value.detach())
    elif hasattr(value, "__array__"):
        value = np.asarray(value)
    else:
        raise TypeError(
            f"image {name!r} is a {type(value).__name__}, and must be an array, a tensor, an image of PIL or a path."
        )
    shape = tuple(value.shape)
    if len(shape) not in (2, 3) or (len(shape) == 3 and shape[0] not in _CHANNELS and shape[2] not in _CHANNELS):
        raise ValueError(
            f"image {name!r} has the shape {shape}. It must be height x width, or have 1, 3 or 4 channels first "
            "or last."
        )
    if 0 in shape:
        raise ValueError(f"image {name!r} has the shape {shape}, so it has no pixel.")
    height, width, channels_first = shape[0], shape[1], False
    if len(shape) == 3 and is_channels_first(shape, is_tensor=isinstance(value, Tensor)):
        height, width, channels_first = shape[1], shape[2], True
    num_bytes = math.prod(shape) * (value.element_size() if isinstance(value, Tensor) else value.itemsize)
    factor = math.ceil(math.sqrt(num_bytes / most_bytes)) if num_bytes > most_bytes else 1
    thin = slice(None, None, factor)
    part = value[:, thin, thin] if channels_first else value[thin, thin]
    copied = part.clone() if isinstance(part, Tensor) else np.array(part)
    note = f"every {factor}th row and column of {height} x {width}" if factor > 1 else ""
    return CapturedImage(name, copied, note), copied.nbytes


def is_channels_first(shape: tuple[int, ...], *, is_tensor: bool) -> bool:
    """If both ends could be channels, a tensor has them first, and an array last."""
    first, last = shape[0] in _CHANNELS, shape[2] in _CHANNELS
    return first and (is_tensor or not last)


def _pil_image(name: str, image: Any, most_bytes: int) -> tuple[CapturedImage, int]:
    width, height = image.size
    num_bytes = width * height * 4
    if num_bytes <= most_bytes:
        return CapturedImage(name, image.copy()), num_bytes
    shrink = math.sqrt(most_bytes / num_bytes)
    size = max(1, int(width * shrink)), max(1, int(height * shrink))
    return CapturedImage(name, image.resize(size, 0), f"thinned out from {height} x {width}"), size[0] * size[1] * 4


def _sampled(name: str, value: Any) -> CapturedTensor:
    if isinstance(value, Tensor):
        tensor = local_tensor(value.detach())
    else:
        try:
            array = np.asarray(value)
            tensor = torch.as_tensor(array if array.flags.writeable else array.copy())
        except (TypeError, ValueError):
            raise TypeError(f"histogram {name!r} is a {type(value).__name__}, and must be numbers.") from None
    if tensor.is_complex() or tensor.layout != torch.strided:
        raise TypeError(f"histogram {name!r} is complex or sparse. Log its values as a dense tensor of numbers.")
    num_values = tensor.numel()
    return CapturedTensor(name, _thinned(tensor, num_values).clone(), num_values)


def _thinned(tensor: Tensor, num_values: int) -> Tensor:
    """At most MAX_SAMPLE of its values, as a view."""
    if num_values <= MAX_SAMPLE:
        return tensor
    if tensor.is_contiguous():
        num_blocks = MAX_SAMPLE // _BLOCK
        stride = (num_values - _BLOCK) // (num_blocks - 1)
        return tensor.as_strided((num_blocks, _BLOCK), (stride, 1), tensor.storage_offset())
    left = num_values
    for dim in sorted(range(tensor.dim()), key=lambda one: -tensor.shape[one]):
        factor = min(tensor.shape[dim], math.ceil(left / MAX_SAMPLE))
        if factor > 1:
            tensor = tensor[(*(slice(None),) * dim, slice(None, None, factor))]
            left = tensor.numel()
    return tensor


def _table(name: str, rows: Any) -> CapturedTable:
    if not isinstance(rows, Sequence) or isinstance(rows, str):
        raise TypeError(f"table {name!r} is a {type(rows).__name__}, and must be a list of rows.")
    if not rows:
        return CapturedTable(name, (), (), 0)
    first = rows[0]
    is_mapping = isinstance(first, Mapping)
    columns = tuple(islice(first, MAX_COLUMNS)) if is_mapping else tuple(range(min(len(first), MAX_COLUMNS)))
    kept = rows[: max(1, MAX_CELLS // max(1, len(columns)))]
    kinds = {type(row) for row in kept}  # a few; to ask each row would take longer than to copy it
    if not all(issubclass(kind, Mapping if is_mapping else Sequence) for kind in kinds):
        raise TypeError(f"table {name!r}: its rows must be all mappings or all lists.")
    if is_mapping:
        cells = tuple(tuple(_cell(row.get(column)) for column in columns) for row in kept)
    else:
        cells = tuple(tuple(_cell(one) for one in row[: len(columns)]) for row in kept)
    titles = (
        tuple(str(column)[:MAX_CELL_CHARS] for column in columns)
        if is_mapping
        else tuple(f"column {number + 1}" for number in columns)
    )
    return CapturedTable(name, titles, cells, len(rows))


def _cell(value: Any) -> Cell:
    if type(value) in _PLAIN:
        return value  # type: ignore[no-any-return]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return value[:MAX_CELL_CHARS]
    return str(value)[:MAX_CELL_CHARS]
