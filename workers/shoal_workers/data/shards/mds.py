"""MDS shards, as MosaicML Streaming (version 2) writes them.

    uint32 number of samples | uint32 offsets [number + 1] | the columns, as JSON | samples
    a sample: uint32 sizes of the columns without a fixed size | the columns, sorted by name

A shard says by itself what its columns are; the index is needed only for the names of the shards. Values are those of
the library, but images stay bytes (`jpeg`, `png`, and `pil`: width, height, length of the mode as uint32, mode, raw
pixels), and pickled columns are refused because unpickling runs code. Called through `shard_formats`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shoal_workers.data.shards.shard import Sample, Shard, checked, encoded_images, mapped

_LARGEST_HEADER_BYTES = 1 << 24
_VALUE_DTYPES = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}
_SCALARS = frozenset(_VALUE_DTYPES.values())
_SHAPE_DTYPES = ("uint8", "uint16", "uint32", "uint64")


class Content(Protocol):
    """The bytes of a shard: a mapped file, or a file in a store, of which each slice is a request."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: slice, /) -> bytes: ...


class MdsShard(Shard):
    format = "an MDS shard"

    def __init__(self, path: Path, place: object = None, content: Content | None = None) -> None:
        """`content`: that of the file; None if it is on local disk."""
        self._stored = content
        super().__init__(path, place)

    def _open(self) -> int:
        self._content: Content = self._stored if self._stored is not None else mapped(self.path)
        num_samples = int.from_bytes(self._content[:4], "little")
        if 4 * (num_samples + 2) > len(self._content):
            raise ValueError(
                f"its header names {num_samples:,} samples, more than {len(self._content):,} bytes can hold"
            )
        start = 4 * (num_samples + 2)
        self._offsets = checked(np.frombuffer(self._content[4:start], "<u4"), len(self._content))
        end = int(self._offsets[0])
        if not 0 < end - start < _LARGEST_HEADER_BYTES:
            raise ValueError("it does not say what its columns are")
        columns = json.loads(self._content[start:end])
        if columns.get("version") != 2 or columns.get("format") != "mds":
            raise ValueError(
                f"it is format {columns.get('format')!r} of version {columns.get('version')}, and version 2 of mds is "
                "read"
            )
        self._columns: list[tuple[str, int | None, Callable[[bytes], Any]]] = [
            (name, size, _decoder(name, encoding))
            for name, encoding, size in zip(
                columns["column_names"], columns["column_encodings"], columns["column_sizes"], strict=True
            )
        ]
        self._num_sizes = sum(1 for _, size, _ in self._columns if not size)
        return num_samples

    def _read(self, number: int) -> Sample:
        raw = self._content[int(self._offsets[number]) : int(self._offsets[number + 1])]
        sizes = iter(np.frombuffer(raw, "<u4", self._num_sizes).tolist())
        at = 4 * self._num_sizes
        sample: Sample = {}
        for name, size, decode in self._columns:
            end = at + (size or next(sizes))
            if end > len(raw):
                raise ValueError(f"column {name!r} would end at byte {end:,} of {len(raw):,}")
            sample[name] = decode(raw[at:end])
            at = end
        return sample


def _decoder(name: str, encoding: str) -> Callable[[bytes], Any]:
    kind, _, details = encoding.partition(":")
    if kind == "pkl":
        raise ValueError(
            f"column {name!r} is pickled Python objects, and unpickling runs code that the file contains. Write it as "
            "json, ndarray or bytes"
        )
    if kind == "ndarray":
        return _array_decoder(details)
    if kind in _SCALARS:
        return lambda raw: np.frombuffer(raw, kind, 1)[0]
    if kind not in _DECODERS:
        raise ValueError(f"column {name!r} has encoding {encoding!r}, and those that are read are {_KNOWN}")
    return _DECODERS[kind]


def _array_decoder(details: str) -> Callable[[bytes], Any]:
    """The dtype and the shape may be those of the column, or are in front of each array."""
    dtype_name, _, shape_text = details.partition(":")
    if dtype_name and dtype_name not in _VALUE_DTYPES.values():
        raise ValueError(f"its arrays have dtype {dtype_name!r}, which MDS does not have")
    fixed = tuple(int(dim) for dim in shape_text.split(",")) if shape_text else None

    def decode(raw: bytes) -> Any:
        at, dtype, shape = 0, dtype_name, fixed
        if not dtype:
            dtype, at = _VALUE_DTYPES[raw[0]], 1
        if shape is None:
            num_dims, shape_dtype = raw[at] >> 2, np.dtype(_SHAPE_DTYPES[raw[at] & 3])
            shape = tuple(np.frombuffer(raw, shape_dtype, num_dims, at + 1).tolist())
            at += 1 + num_dims * shape_dtype.itemsize
        return np.frombuffer(raw, dtype, math.prod(shape), at).reshape(shape).copy()

    return decode


_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "str": lambda raw: raw.decode(),
    "int": lambda raw: int(np.frombuffer(raw, "<i8", 1)[0]),
    "str_int": lambda raw: int(raw.decode()),
    "str_float": lambda raw: float(raw.decode()),
    "str_decimal": lambda raw: Decimal(raw.decode()),
    "json": lambda raw: json.loads(raw.decode()),
    "pil": bytes,
    "jpeg": bytes,
    "png": bytes,
    "jpeg_array": encoded_images,
    "jpegarray": encoded_images,
    **dict.fromkeys(("list[pil]", "list[jpeg]", "list[png]"), partial(encoded_images, at=4)),
}
"""A list of images begins with a number that is not used."""
_KNOWN = ", ".join(sorted([*_DECODERS, *_SCALARS, "ndarray"]))
