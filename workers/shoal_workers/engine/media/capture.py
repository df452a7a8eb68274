"""What the training thread does with logged media: it checks the names, thins large values out, and copies them.

The call may last 1 ms, so what it reads and writes is bounded whatever is logged. An image is thinned out to its share
of MAX_COPIED_BYTES and of MAX_TOUCHED_LINES, on a GPU of MAX_DEVICE_BYTES. Of tensors that become histograms MAX_SAMPLE
values in evenly spaced blocks are copied, since single values from all over a large tensor cost a cache miss each. What
cannot change (numbers and texts in a table or a list) is referred to, and looked at later. Nothing is left for later
that the next step could change.

    select  views of the values, without a copy: their shapes, strides and sizes are known
    copy    all on the host into one buffer of `staging`; each on a GPU into new memory there, without waiting: an event
            says when the copies are complete, and the thread that writes fetches them

Called by the recorder.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from shoal_workers.contract.media import (
    MAX_CELL_CHARS,
    MAX_CELLS,
    MAX_COLUMNS,
    MAX_COPIED_BYTES,
    MAX_DEVICE_BYTES,
    MAX_IMAGES,
    MAX_ITEMS,
    MAX_LISTED,
    MAX_SAMPLE,
    MAX_TEXT_CHARS,
    MAX_TOUCHED_LINES,
)
from shoal_workers.contract.worker_reports import is_metric_name, suggested_name
from shoal_workers.engine.media.staging import ALIGNMENT_BYTES, Staging

_BLOCK = 256
"""Neighbouring values of a large tensor that are copied together."""
_LINE_BYTES = 64
_CHANNELS = (1, 3, 4)
_NUMBERS = "biuf"
"""Kinds of numpy's dtypes that can be shown."""
_CONSTANT = frozenset((bool, int, float, str, type(None)))
_MAX_OTHER_S = 0.0002
"""So long cells of a table are copied that are neither numbers nor texts."""
_FILE_FORMATS = ("PNG", "JPEG", "GIF", "WEBP")

Array = np.ndarray[Any, Any]
Pixels = Tensor | Array


@dataclass(frozen=True, slots=True)
class CapturedImage:
    name: str
    content: Pixels | Path | Any
    """A copy of its values (a tensor, an array, or an image of PIL), or the path of its file."""
    note: str = ""
    index: int | None = None
    """Which of the images of `content` it is; None if that is one image."""


@dataclass(frozen=True, slots=True)
class CapturedTensor:
    name: str
    sample: Pixels | tuple[Any, ...]
    """Copies of its values; of a list the objects themselves."""
    num_values: int


@dataclass(frozen=True, slots=True)
class CapturedTable:
    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    """What is in the cells cannot change; it is not yet what is stored."""
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
    buffer: Tensor | None = None
    """Memory of the copies, which goes back to `staging` when they have been stored."""
    is_copied: Any = None
    """An event of the GPU, after which the copies in its memory are complete; None if there are none."""


def capture(
    images: Mapping[str, Any] | None = None,
    histogram: Mapping[str, Any] | None = None,
    table: Mapping[str, Any] | None = None,
    text: Mapping[str, str] | None = None,
    *,
    staging: Staging | None = None,
) -> Captured:
    """Copy these values, each by name.

    Args:
        images: an array or tensor (height x width, with 1, 3 or 4 channels first or last; floats from 0 to 1, or
            bytes), an image of PIL, the path of a PNG, JPEG, GIF or WebP file, or a list of such.
        histogram: tensors, arrays or lists of numbers.
        table: lists of rows, which are mappings or lists.

    Raises:
        ValueError, TypeError: a name or a value cannot be logged; the message says which.
    """
    captured = Captured()
    _select_images(captured, images or {})
    _select_histograms(captured, histogram or {})
    for name, rows in _first(captured, "table", table or {}):
        captured.tables.append(_table(captured, name, rows))
    for name, message in _first(captured, "text", text or {}):
        if not isinstance(message, str):
            raise TypeError(f"text {name!r} is a {type(message).__name__}, and must be a str.")
        captured.texts.append((name, message[:MAX_TEXT_CHARS], len(message)))
        captured.num_bytes += min(len(message), MAX_TEXT_CHARS)
    _copy_selected(captured, staging or Staging())
    return captured


def _first(captured: Captured, kind: str, values: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """As many of the values as are kept, with valid names."""
    if not isinstance(values, Mapping):
        raise TypeError(f"{kind} is a {type(values).__name__}, and must be a mapping from names to values.")
    for name in values:
        if not is_metric_name(name):
            raise ValueError(f"{kind}: {name!r} is not a name. Use {suggested_name(name)!r}.")
    if len(values) > MAX_ITEMS:
        captured.notes.append(
            f"{kind}: {len(values) - MAX_ITEMS} of {len(values)} were left out; a call keeps {MAX_ITEMS}"
        )
    return islice(values.items(), MAX_ITEMS)


def _copy_selected(captured: Captured, staging: Staging) -> None:
    """Replace the views that were selected by copies, each once: several images may be parts of one."""
    selected = [*(image.content for image in captured.images), *(tensor.sample for tensor in captured.tensors)]
    views = {id(view): view for view in selected if isinstance(view, (Tensor, np.ndarray))}
    copies = dict(zip(views, _copied(captured, [*views.values()], staging), strict=True))
    captured.images = [
        replace(image, content=copies.get(id(image.content), image.content)) for image in captured.images
    ]
    captured.tensors = [
        replace(tensor, sample=copies.get(id(tensor.sample), tensor.sample)) for tensor in captured.tensors
    ]


def _copied(captured: Captured, sources: Sequence[Pixels], staging: Staging) -> list[Pixels]:
    """Return copies in the order of the sources: those on the host in one buffer, those of a GPU in its memory."""
    starts, num_bytes = [], 0
    for source in sources:
        starts.append(num_bytes)
        if not isinstance(source, Tensor) or source.device.type == "cpu":
            num_bytes += -(-source.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    if not sources:
        return []
    buffer = captured.buffer = staging.take(num_bytes)
    copies: list[Pixels] = []
    views: dict[torch.dtype, Tensor] = {}
    """The buffer, as values of each dtype."""
    for source, start in zip(sources, starts, strict=True):
        captured.num_bytes += source.nbytes
        if not isinstance(source, Tensor):
            array: Array = np.ndarray(source.shape, source.dtype, buffer=buffer.numpy(), offset=start)
            np.copyto(array, source)
            copies.append(array)
        elif source.device.type == "cpu":
            if source.dtype not in views:
                views[source.dtype] = buffer.view(source.dtype)
            place = views[source.dtype].as_strided(source.shape, _dense_strides(source.shape), start // source.itemsize)
            copies.append(place.copy_(source))
        else:
            copies.append(torch.clone(source, memory_format=torch.contiguous_format))
            if captured.is_copied is None and source.device.type == "cuda":
                captured.is_copied = torch.Event("cuda")
    if captured.is_copied is not None:  # on the stream on which the training computes, behind the copies
        captured.is_copied.record()
    return copies


def _dense_strides(shape: Sequence[int]) -> list[int]:
    strides, step = [0] * len(shape), 1
    for dim in range(len(shape) - 1, -1, -1):
        strides[dim], step = step, step * shape[dim]
    return strides


def _select_images(captured: Captured, images: Mapping[str, Any]) -> None:
    wanted: list[tuple[str, Any, int | None]] = []
    """Name, value, and how many images it is; None if it is one."""
    num_wanted = 0
    for name, value in _first(captured, "images", images):
        if isinstance(value, (list, tuple)):
            wanted += [(name, image, None) for image in value[: MAX_IMAGES + 1]]
            num_wanted += len(value)
        elif len(getattr(value, "shape", ())) == 4:
            wanted.append((name, value, len(value)))
            num_wanted += len(value)
        else:
            wanted.append((name, value, None))
            num_wanted += 1
    if num_wanted > MAX_IMAGES:
        captured.notes.append(
            f"images: {num_wanted - MAX_IMAGES} of {num_wanted} were left out; a call keeps {MAX_IMAGES}"
        )
    num_kept = left = min(num_wanted, MAX_IMAGES)
    for name, value, several in wanted:
        num_taken = min(left, 1 if several is None else several)
        if num_taken:
            _select_image(captured, name, value, num_taken if several is not None else None, num_kept)
        left -= num_taken


def _select_image(captured: Captured, name: str, value: Any, several: int | None, num_kept: int) -> None:
    """`several`: so many of the images of an array with four dims; None if it is one image."""
    if isinstance(value, (str, Path)):
        captured.images.append(CapturedImage(name, Path(value)))
        return
    if hasattr(value, "getbands") and hasattr(value, "resize"):  # PIL, without an import of it
        content, num_bytes, note = _pil_image(value, MAX_COPIED_BYTES // num_kept)
        captured.images.append(CapturedImage(name, content, note))
        captured.num_bytes += num_bytes
        return
    values = _dense(f"image {name!r}", value, "an array, a tensor, an image of PIL or a path")
    if several is not None:
        values = values[:several]
    shape = tuple(values.shape) if several is None else tuple(values.shape[1:])
    if len(shape) not in (2, 3) or (len(shape) == 3 and shape[0] not in _CHANNELS and shape[2] not in _CHANNELS):
        raise ValueError(
            f"image {name!r} has the shape {shape}. It must be height x width, or have 1, 3 or 4 channels first "
            "or last."
        )
    if 0 in shape:
        raise ValueError(f"image {name!r} has the shape {shape}, so it has no pixel.")
    lead = int(several is not None)
    is_first = len(shape) == 3 and is_channels_first(shape, is_tensor=isinstance(values, Tensor))
    rows = lead + is_first
    factor = _factor_of(values, rows, (lead if is_first else lead + 2) if len(shape) == 3 else None, num_kept)
    thin = (*(slice(None),) * rows, slice(None, None, factor), slice(None, None, factor))
    note = f"every {factor}th row and column of {values.shape[rows]} x {values.shape[rows + 1]}" if factor > 1 else ""
    view, indices = values[thin], [None] if several is None else range(several)
    captured.images += [CapturedImage(name, view, note, index) for index in indices]


def is_channels_first(shape: tuple[int, ...], *, is_tensor: bool) -> bool:
    """If both ends could be channels, a tensor has them first, and an array last."""
    first, last = shape[0] in _CHANNELS, shape[2] in _CHANNELS
    return first and (is_tensor or not last)


def _factor_of(values: Pixels, rows: int, channel: int | None, num_kept: int) -> int:
    """Every how many rows and columns one is copied. `rows`, `channel`: dims; that of the columns follows the rows."""
    item = values.itemsize
    steps = values.stride() if isinstance(values, Tensor) else [stride // item for stride in values.strides]
    channels = 1 if channel is None else values.shape[channel]
    apart = channel is not None and abs(steps[channel]) * item >= _LINE_BYTES
    step_bytes = max(1, min(abs(steps[rows]), abs(steps[rows + 1]))) * item
    is_on_host = not isinstance(values, Tensor) or values.device.type == "cpu"
    most = (MAX_COPIED_BYTES, MAX_TOUCHED_LINES) if is_on_host else (MAX_DEVICE_BYTES, None)
    share = most[0] / num_kept, most[1] and most[1] / num_kept
    pixel_lines = step_bytes / _LINE_BYTES, channels if apart else 1
    return _factor((values.shape[rows], values.shape[rows + 1]), channels * item, pixel_lines, share)


@lru_cache(maxsize=256)
def _factor(
    size: tuple[int, int], pixel_bytes: int, pixel_lines: tuple[float, int], share: tuple[float, float | None]
) -> int:
    """The smallest factor with which an image has no more than its share of bytes and of cache lines.

    Args:
        size: rows and columns.
        pixel_lines: the part of a cache line from a pixel to its neighbour in memory, and the number of lines in which
            its channels are.
        share: bytes and lines; None if lines do not count.
    """
    factor, (step, num_apart), (most_bytes, most_lines) = 1, pixel_lines, share
    while True:
        pixels = -(-size[0] // factor) * -(-size[1] // factor)
        lines = pixels * min(1.0, factor * step) * num_apart
        if pixels * pixel_bytes <= most_bytes and (most_lines is None or lines <= most_lines):
            return factor
        factor += 1 + factor // 16


def _pil_image(image: Any, most_bytes: int) -> tuple[Any, int, str]:
    """What is kept of it, its bytes, and a note."""
    if getattr(image, "tile", None) and getattr(image, "filename", "") and image.format in _FILE_FORMATS:
        return Path(image.filename), 0, ""  # it was opened and not decoded yet
    width, height = image.size
    num_bytes = width * height * 4
    if num_bytes <= most_bytes:
        return image.copy(), num_bytes, ""
    shrink = math.sqrt(most_bytes / num_bytes)
    size = max(1, int(width * shrink)), max(1, int(height * shrink))
    return image.resize(size, 0), size[0] * size[1] * 4, f"thinned out from {height} x {width}"


def _dense(what: str, value: Any, expected: str) -> Pixels:
    """A tensor or array, as it is: nothing is copied."""
    if isinstance(value, Tensor):
        tensor = _local(value)
        if tensor.is_complex() or tensor.layout != torch.strided or tensor.is_quantized:
            raise TypeError(f"{what} is complex, sparse or quantized. Log its values as a dense tensor of numbers.")
        return tensor.detach()
    if not hasattr(value, "__array__"):
        raise TypeError(f"{what} is a {type(value).__name__}, and must be {expected}.")
    array = np.asarray(value)
    if array.dtype.kind not in _NUMBERS:
        raise TypeError(f"{what} has the dtype {array.dtype}, and must have real numbers.")
    return array


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of it."""
    distributed = sys.modules.get("torch.distributed.tensor")  # a program that has not imported it has no such tensor
    if distributed is None or not isinstance(tensor, distributed.DTensor):
        return tensor
    from shoal_workers.torch_internals import local_of

    return local_of(tensor)


def _select_histograms(captured: Captured, values: Mapping[str, Any]) -> None:
    sharers = max(1, min(len(values), MAX_ITEMS))
    most, most_listed = MAX_SAMPLE // sharers, MAX_LISTED // sharers
    for name, value in _first(captured, "histogram", values):
        if isinstance(value, Sequence):
            listed = _listed(name, value, most_listed)
            captured.tensors.append(CapturedTensor(name, listed, len(value)))
            captured.num_bytes += 8 * len(listed)
            continue
        numbers = _dense(f"histogram {name!r}", value, "a tensor, an array or a list of numbers")
        num_values = numbers.numel() if isinstance(numbers, Tensor) else numbers.size
        captured.tensors.append(CapturedTensor(name, _thinned(numbers, num_values, most), num_values))


def _listed(name: str, values: Sequence[Any], most: int) -> tuple[Any, ...]:
    """The numbers of a list, or some in evenly spaced blocks."""
    if len(values) <= most:
        kept = tuple(values)
    else:
        block = min(_BLOCK, most)
        starts = _starts(len(values), most // block, block)
        kept = tuple(chain.from_iterable(values[start : start + block] for start in starts))
    odd = {kind for kind in set(map(type, kept)) if not issubclass(kind, (int, float, np.number))}
    if isinstance(values, str) or odd:
        kind = "str" if isinstance(values, str) else odd.pop().__name__
        raise TypeError(f"histogram {name!r} has a {kind} in it, and must be numbers. Log an array or a tensor.")
    return kept


def _starts(num_values: int, num_blocks: int, block: int) -> range:
    """Where evenly spaced blocks begin."""
    stride = (num_values - block) // (num_blocks - 1) if num_blocks > 1 else 1
    return range(0, stride * num_blocks, stride)


def _thinned(values: Pixels, num_values: int, most: int) -> Pixels:
    """At most about so many of the values, as a view: evenly spaced blocks, if the values lie close together in memory
    in whatever order, else single values, and fewer of them, as each costs a cache miss."""
    if num_values <= most:
        return values
    ordered = values
    if not (isinstance(values, Tensor) and values.is_contiguous()):
        axes = sorted(range(len(values.shape)), key=lambda dim: -_strides(values)[dim])
        ordered = values.permute(axes) if isinstance(values, Tensor) else values.transpose(axes)
    num_blocks = most // _BLOCK
    if isinstance(ordered, Tensor) and ordered.is_contiguous():
        stride = _starts(num_values, num_blocks, _BLOCK).step
        return ordered.as_strided((num_blocks, _BLOCK), (stride, 1), ordered.storage_offset())
    if not isinstance(ordered, Tensor) and ordered.flags.c_contiguous:
        stride = _starts(num_values, num_blocks, _BLOCK).step * ordered.itemsize
        return as_strided(ordered.reshape(-1), (num_blocks, _BLOCK), (stride, ordered.itemsize), writeable=False)
    left, fewer = num_values, max(1, most // 4)
    for dim in sorted(range(len(values.shape)), key=lambda dim: -values.shape[dim]):
        factor = min(values.shape[dim], math.ceil(left / fewer))
        if factor > 1:
            values = values[(*(slice(None),) * dim, slice(None, None, factor))]
            left = math.prod(values.shape)
    return values


def _strides(values: Pixels) -> Sequence[int]:
    return values.stride() if isinstance(values, Tensor) else values.strides


def _table(captured: Captured, name: str, rows: Any) -> CapturedTable:
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
        cells = [tuple(map(row.get, columns)) for row in kept]
        titles = tuple(str(column)[:MAX_CELL_CHARS] for column in columns)
    else:
        cells = [tuple(row[: len(columns)]) for row in kept]
        titles = tuple(f"column {number + 1}" for number in columns)
    of_cells = set(map(type, chain.from_iterable(cells)))
    if not of_cells <= _CONSTANT:
        cells = _constant(captured, name, cells)
    elif str in of_cells:
        captured.num_bytes += sum([len(cell) for row in cells for cell in row if cell.__class__ is str])
    captured.num_bytes += 8 * len(cells) * len(columns)
    return CapturedTable(name, titles, tuple(cells), len(rows))


def _constant(captured: Captured, name: str, rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The same cells, where what could change is replaced by what it is now."""
    until, num_late, made = time.perf_counter() + _MAX_OTHER_S, 0, []
    for row in rows:
        cells = []
        for value in row:
            kind = type(value)
            if kind is str:
                cell = value
                captured.num_bytes += len(cell)
            elif kind in _CONSTANT or isinstance(value, np.generic):
                cell = value
            elif time.perf_counter() > until:
                cell, num_late = f"({kind.__name__})", num_late + 1
            else:
                cell = _as_it_is(captured, value)
            cells.append(cell)
        made.append(tuple(cells))
    if num_late:
        captured.notes.append(
            f"table {name}: {num_late} cells that are neither numbers nor texts were left out, because to copy them "
            "took too long"
        )
    return made


def _as_it_is(captured: Captured, value: Any) -> Any:
    """What the value says now. A tensor on a GPU is not waited for."""
    if not isinstance(value, Tensor):
        return str(value)[:MAX_CELL_CHARS]
    if value.numel() != 1:
        return f"tensor of {' x '.join(map(str, value.shape))}"
    if value.device.type == "cpu":
        return value.item()
    if captured.is_copied is None and value.device.type == "cuda":
        captured.is_copied = torch.Event("cuda")
    return value.detach().clone()
