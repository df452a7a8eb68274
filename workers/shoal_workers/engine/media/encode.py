"""Encodes captured values: PNG files, bins of histograms, cells of tables. On the recorder's thread only.

`fetch` first copies values from a GPU to the host, on a separate stream: it waits for the copies of `capture`, not for
what the training has launched after them.

PNG is written with the standard library, so that a worker needs no package for it. An image that is given by its path
is taken as it is, if its first bytes are those of a format that browsers show without running anything.
"""

from __future__ import annotations

import math
import os
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal_workers.contract.media import (
    MAX_CELL_CHARS,
    MAX_FILE_BYTES,
    NUM_BINS,
    MediaHistogram,
    MediaTable,
)
from shoal_workers.engine.media.capture import (
    Captured,
    CapturedImage,
    CapturedTable,
    CapturedTensor,
    is_channels_first,
)

_MAGIC = ((b"\x89PNG\r\n\x1a\n", "png"), (b"\xff\xd8\xff", "jpg"), (b"GIF87a", "gif"), (b"GIF89a", "gif"))


def fetch(captured: Captured) -> Captured:
    """Return the same values in the memory of the host."""
    if captured.is_copied is not None:
        captured.is_copied.synchronize()
        with torch.Stream("cuda"):
            return _on_host(captured)
    return _on_host(captured)


def _on_host(captured: Captured) -> Captured:
    on_host: dict[int, Tensor] = {}
    """Fetched tensors by the identity of the copy: several images may be parts of one."""

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in on_host:
            on_host[id(value)] = value.cpu()
        return on_host[id(value)]

    return replace(
        captured,
        images=[_select_image(image, move(image.content)) for image in captured.images],
        tensors=[replace(tensor, sample=move(tensor.sample)) for tensor in captured.tensors],
        tables=[
            replace(media_table, rows=tuple(tuple(map(move, row)) for row in media_table.rows))
            for media_table in captured.tables
        ],
    )


def _select_image(image: CapturedImage, content: Any) -> CapturedImage:
    return replace(image, content=content if image.index is None else content[image.index], index=None)


def encode_image(image: CapturedImage) -> tuple[bytes, str, int | None, int | None]:
    """Return the content of a file, its suffix, width and height (None means not known).

    Raises:
        ValueError: it is not an image that can be shown. OSError: the file cannot be read.
    """
    if isinstance(image.content, Path):
        data = _read(image.content)
        return data, _format_of(data, image.content), None, None
    pixels = _pixels(image.content)
    return encode_png(pixels), "png", pixels.shape[1], pixels.shape[0]


def encode_png(pixels: np.ndarray[Any, Any]) -> bytes:
    """Encode `pixels`: height x width x channels (1, 3 or 4), bytes."""
    height, width, channels = pixels.shape
    rows = np.zeros((height, 1 + width * channels), dtype=np.uint8)  # the first byte of a row: no filter
    rows[:, 1:] = pixels.reshape(height, -1)
    colour = {1: 0, 3: 2, 4: 6}[channels]
    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(rows.data, 6)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def make_histogram(captured: CapturedTensor) -> MediaHistogram:
    sample = captured.sample
    values = sample.double().flatten().numpy() if isinstance(sample, Tensor) else np.asarray(sample, float).ravel()
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 0.0)
    counts: tuple[int, ...] = ()
    if len(finite):
        if high - low > 0 and np.isfinite(high - low) and (high - low) / NUM_BINS > 0:
            scaled = ((finite - low) / (high - low) * NUM_BINS).astype(np.int64).clip(0, NUM_BINS - 1)
            counts = tuple(np.bincount(scaled, minlength=NUM_BINS).tolist())
        else:
            counts = (len(finite),)
    mean, std = (float(finite.mean()), float(finite.std())) if len(finite) else (None, None)
    return MediaHistogram(
        name=captured.name,
        low=low,
        high=high,
        counts=counts,
        num_values=captured.num_values,
        num_sampled=len(values),
        num_not_finite=len(values) - len(finite),
        mean=mean if mean is not None and np.isfinite(mean) else None,
        std=std if std is not None and np.isfinite(std) else None,
    )


def make_table(captured: CapturedTable) -> MediaTable:
    rows = tuple(tuple(map(_cell, row)) for row in captured.rows)
    return MediaTable(name=captured.name, columns=captured.columns, rows=rows, num_rows=captured.num_rows)


def _cell(value: Any) -> str | bool | int | float | None:
    if isinstance(value, (Tensor, np.generic)):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, (bool, int)):
        return value
    return str(value)[:MAX_CELL_CHARS]


def _pixels(content: Any) -> np.ndarray[Any, Any]:
    """Return bytes, height x width x channels."""
    is_tensor = isinstance(content, Tensor)
    if is_tensor:
        values = (content.float() if content.is_floating_point() else content).numpy()
    elif isinstance(content, np.ndarray):
        values = content
    else:  # an image of PIL
        values = np.asarray(content.convert("RGBA" if "A" in content.getbands() else "RGB"))
    if values.ndim == 2:
        values = values[:, :, None]
    elif is_channels_first(values.shape, is_tensor=is_tensor):
        values = values.transpose(1, 2, 0)
    if values.dtype == np.bool_:
        return np.ascontiguousarray(values).astype(np.uint8) * np.uint8(255)
    if values.dtype.kind == "f":
        values = np.nan_to_num(values.astype(np.float32), nan=0.0, posinf=1.0, neginf=0.0).clip(0, 1) * 255 + 0.5
    return np.ascontiguousarray(values.clip(0, 255).astype(np.uint8))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _read(path: Path) -> bytes:
    # without waiting for the writer of a pipe; a file that grows is not read to its end
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"{path} is larger than {MAX_FILE_BYTES} bytes; log an array, which is thinned out")
    return data


def _format_of(data: bytes, path: Path) -> str:
    for magic, suffix in _MAGIC:
        if data.startswith(magic):
            return suffix
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    raise ValueError(f"{path} is no PNG, JPEG, GIF or WebP file")
