"""Chunks of LitData: trees of values, token streams, Arrow rows, and three kinds of zstd (as release 0.2.76 has them).

    plain          uint32 number of items | uint32 offsets [number + 1] | items
                   an item: uint32 sizes of its leaves | leaves; an item of tokens: the tokens alone
    zstd, chunk    the whole file; zstd, sample: each item; zstd, batch: frames of items behind a table (`LDFZ01`)
    Arrow rows     the plain header without items | an Arrow file or stream | its length | `LDARW01`

A chunk does not say what its leaves are: `index.json` beside it does. A sample that is no dictionary is the field
`sample`; an item of tokens is the field `tokens`. Images, audio and files are their bytes; tensors are tensors, arrays
are arrays. Pickled leaves are refused because unpickling runs code, and encrypted chunks because their key is the
library's. Called through `shard_formats`.
"""

from __future__ import annotations

import json
import math
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shoal_workers.data.shards.rows import ArrowRows
from shoal_workers.data.shards.shard import OTHER, Sample, Shard, checked, encoded_images, mapped

INDEX = "index.json"
TOKENS = "tokens"
_FRAMED = b"LDFZ01\0\0"
_FRAMED_PREFIX = struct.Struct("<8sHHIII")
_FRAME = np.dtype([("first", "<u4"), ("num", "<u4"), ("start", "<u8"), ("stored", "<u4"), ("plain", "<u4")])
_ARROW_ROWS = b"LDARW01\0"
_TORCH_DTYPES = (
    *("float32", "float32", "float64", "float64", "complex64", "complex64", "complex128", "complex128"),
    *("float16", "float16", "bfloat16", "uint8", "int8", "int16", "int16", "int32", "int32", "int64", "int64"),
    *("bool", "uint16"),
)
_NUMPY_DTYPES = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bool"),
)
_BYTES = frozenset(
    {"bytes", "file", "image", "jpeg", "pil", "video", "audio", "nifti", "mesh", "pdf", "tifffile"},
)
_Tree = Callable[[Iterator[Any]], Any]


class LitDataShard(Shard):
    format = "a chunk of LitData"

    def __init__(self, path: Path, index: bytes | None = None) -> None:
        """`index`: the content of `index.json`; None if it lies beside the chunk."""
        self._index = index
        super().__init__(path)

    def _open(self) -> int:
        config = self._config()
        if config.get("encryption"):
            raise ValueError("it is encrypted, and only the library has the key. Write it without encryption")
        formats = config.get("data_format") or []
        self._holds_tokens = config.get("item_loader") == "TokensLoader"
        self._leaves = [_leaf(name) for name in formats]
        self._tree = _builder(config.get("data_spec"), len(formats))
        level = config.get("compression_level") if config.get("compression") else None
        self._is_zstd_by_sample = level == "sample"
        is_zstd = any(suffix.startswith(".zstd") for suffix in self.path.suffixes)  # chunk-0-0.zstd:4.bin
        self._content = mapped(self.path, "zstd" if is_zstd else None)
        self._arrow = self._arrow_rows()
        self._frames: Any = None
        self._frame: tuple[int, bytes] = (-1, b"")
        if self._content[: len(_FRAMED)] == _FRAMED:
            return self._open_frames()
        num_items = struct.unpack_from("<I", self._content)[0]
        if 4 * (num_items + 2) > len(self._content):
            raise ValueError(f"its header names {num_items:,} items, more than {len(self._content):,} bytes can hold")
        self._offsets = checked(np.frombuffer(self._content, "<u4", num_items + 1, 4), len(self._content))
        if self._arrow is not None and len(self._arrow) != num_items:
            raise ValueError(f"its header names {num_items:,} items, and it has {len(self._arrow):,} rows")
        return int(num_items)

    def _open_frames(self) -> int:
        _, version, _, num_items, _, num_frames = _FRAMED_PREFIX.unpack_from(self._content)
        if version != 1:
            raise ValueError(f"its frames have version {version}, and version 1 is read")
        at = _FRAMED_PREFIX.size
        self._offsets = np.frombuffer(self._content, "<u4", num_items + 1, at)
        self._frames = np.frombuffer(self._content, _FRAME, num_frames, at + 4 * (num_items + 1))
        ends = self._frames["start"] + self._frames["stored"]
        if num_frames and int(ends.max()) > len(self._content):
            raise ValueError(f"its frames would end at byte {int(ends.max()):,} of {len(self._content):,}")
        self._firsts = self._frames["first"].tolist()
        return int(num_items)

    def _config(self) -> dict[str, Any]:
        if self._index is None:
            beside = self.path.with_name(INDEX)
            if not beside.exists():
                raise ValueError(f"there is no {INDEX} beside it, which says what its leaves are")
            self._index = beside.read_bytes()
        return dict(json.loads(self._index)["config"])

    def _arrow_rows(self) -> ArrowRows | None:
        tail = 4 + len(_ARROW_ROWS)
        if len(self._content) < tail or self._content[-len(_ARROW_ROWS) :] != _ARROW_ROWS:
            return None
        num_bytes = struct.unpack_from("<I", self._content, len(self._content) - tail)[0]
        end = len(self._content) - tail
        return ArrowRows(memoryview(self._content)[end - num_bytes : end])

    def _read(self, number: int) -> Sample:
        if self._arrow is not None:
            return self._arrow[number]
        raw = self._item(number)
        if self._holds_tokens:
            return {TOKENS: self._leaves[0](raw)}
        sizes = struct.unpack_from(f"<{len(self._leaves)}I", raw)
        at, values = 4 * len(sizes), []
        for size, leaf in zip(sizes, self._leaves, strict=True):
            if at + size > len(raw):
                raise ValueError(f"a leaf would end at byte {at + size:,} of {len(raw):,}")
            values.append(leaf(raw[at : at + size]))
            at += size
        value = self._tree(iter(values))
        return value if isinstance(value, dict) else {OTHER: value}

    def _item(self, number: int) -> bytes:
        start, end = int(self._offsets[number]), int(self._offsets[number + 1])
        if self._frames is None:
            raw = self._content[start:end]
            return _inflated(raw) if self._is_zstd_by_sample else raw
        at = bisect_right(self._firsts, number) - 1
        frame = self._frames[at]
        held, plain = self._frame
        if held != at:
            stored = self._content[int(frame["start"]) : int(frame["start"]) + int(frame["stored"])]
            plain = _inflated(stored)
            if len(plain) != int(frame["plain"]):
                raise ValueError(f"frame {at} has {len(plain):,} bytes, and its table says {int(frame['plain']):,}")
            self._frame = (at, plain)
        base = int(self._offsets[int(frame["first"])])
        return plain[start - base : end - base]


def _builder(dumped: str | None, num_leaves: int) -> _Tree:
    """How the leaves of an item make up a tree: torch's own serialisation of a TreeSpec, or LitData's for MDS."""
    if dumped is None:
        return next if num_leaves == 1 else list
    protocol, spec = json.loads(dumped)
    if protocol != 1:
        raise ValueError(f"its data_spec has protocol {protocol}, and protocol 1 is read")
    return _tree(spec)


def _tree(spec: dict[str, Any]) -> _Tree:
    kind, children = spec["type"], [_tree(child) for child in spec["children_spec"]]
    if kind is None:
        return next
    if kind in ("builtins.list", "collections.deque"):
        return lambda leaves: [child(leaves) for child in children]
    if kind in ("builtins.tuple", "collections.namedtuple"):
        return lambda leaves: tuple(child(leaves) for child in children)
    if kind in ("builtins.dict", "collections.OrderedDict", "collections.defaultdict"):
        names = _names(spec["context"], len(children))
        return lambda leaves: {name: child(leaves) for name, child in zip(names, children, strict=True)}
    raise ValueError(f"its samples contain a {kind}, and dictionaries, lists and tuples are read")


def _names(context: Any, num: int) -> list[Any]:
    names = json.loads(context) if isinstance(context, str) else context
    while isinstance(names, dict):
        names = names["dict_context"]
    if len(names) == 2 and num != 2:  # of a defaultdict: its factory, and the names
        names = names[1]
    return list(names)


def _leaf(name: str) -> Callable[[bytes], Any]:
    kind, _, detail = name.partition(":")
    if kind in ("pickle", "graph"):
        raise ValueError(
            f"its samples contain pickled objects ({name}), and unpickling runs code that the file contains. Write "
            "numbers, text, bytes, arrays or tensors"
        )
    if kind in _BYTES:
        return bytes
    if kind == "no_header_numpy":
        return lambda raw: np.frombuffer(raw, _NUMPY_DTYPES[int(detail)]).copy()
    if kind == "no_header_tensor":
        return lambda raw: _tensor(raw, int(detail), None)
    if kind not in _LEAVES:
        raise ValueError(f"its samples contain {name!r}, and what is read is {', '.join(sorted({*_LEAVES, *_BYTES}))}")
    return _LEAVES[kind]


def _array(raw: bytes) -> Any:
    dtype, num_dims = struct.unpack_from("<II", raw)
    shape = struct.unpack_from(f"<{num_dims}I", raw, 8)
    return np.frombuffer(raw, _NUMPY_DTYPES[dtype], math.prod(shape), 8 + 4 * num_dims).reshape(shape).copy()


def _tensor_with_header(raw: bytes) -> Any:
    dtype, num_dims = struct.unpack_from(">II", raw)
    shape = struct.unpack_from(f">{num_dims}I", raw, 8)
    return _tensor(raw[8 + 4 * num_dims :], dtype, shape)


def _tensor(raw: bytes, dtype_number: int, shape: tuple[int, ...] | None) -> Any:
    import torch

    dtype = getattr(torch, _TORCH_DTYPES[dtype_number])
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat if shape is None else flat.reshape(shape)


def _nested(raw: bytes) -> Any:
    """Decode lists and dictionaries that are one leaf: JSON, or, in newer releases, LitData's own tags."""
    if not raw or raw[0] > 0x20:
        return json.loads(raw)
    return _tagged(raw, 0)[0]


_NUMBERS = {
    **{tag: struct.Struct("<q") for tag in (0x08, 0x12)},
    **{tag: struct.Struct("<d") for tag in (0x09, 0x13)},
    **{tag: struct.Struct("?") for tag in (0x0A, 0x14)},
}
"""By their tags: the first in a value, the second in a field of a record."""
_NULL, _TEXT = (0x0B, 0x10), (0x07, 0x11)


def _tagged(raw: bytes, at: int) -> tuple[Any, int]:
    """A value, and where it ends."""
    tag, at = raw[at], at + 1
    if tag in _NUMBERS:
        return _NUMBERS[tag].unpack_from(raw, at)[0], at + _NUMBERS[tag].size
    if tag in _NULL:
        return None, at
    if tag in _TEXT:
        return _text(raw, at)
    num = struct.unpack_from("<I", raw, at)[0]
    at += 4
    if tag == 0:
        return json.loads(raw[at : at + num]), at + num
    if tag in (2, 3):
        return np.frombuffer(raw, "<i8" if tag == 2 else "<f8", num, at).tolist(), at + 8 * num
    if tag == 4:
        return [bool(item) for item in raw[at : at + num]], at + num
    if tag == 1:
        return _texts(raw, at, num)
    if tag == 5:
        mapping = {}
        for _ in range(num):
            name, at = _text(raw, at)
            mapping[name], at = _tagged(raw, at)
        return mapping, at
    if tag == 6:
        return _records(raw, at, num)
    raise ValueError(f"a nested value has tag {tag}, which is not known")


def _records(raw: bytes, at: int, num: int) -> tuple[list[dict[str, Any]], int]:
    names, at = _texts(raw, at + 4, struct.unpack_from("<I", raw, at)[0])
    records: list[dict[str, Any]] = [{} for _ in range(num)]
    for record in records:
        for name in names:
            record[name], at = _tagged(raw, at)
    return records, at


def _texts(raw: bytes, at: int, num: int) -> tuple[list[str], int]:
    texts = []
    for _ in range(num):
        text, at = _text(raw, at)
        texts.append(text)
    return texts, at


def _text(raw: bytes, at: int) -> tuple[str, int]:
    end = at + 4 + struct.unpack_from("<I", raw, at)[0]
    return raw[at + 4 : end].decode(), end


_LEAVES: dict[str, Callable[[bytes], Any]] = {
    "str": lambda raw: raw.decode(),
    "text": lambda raw: raw.decode(),
    "bool": lambda raw: raw[0] != 0,
    "int": lambda raw: struct.unpack("<q", raw)[0],
    "float": lambda raw: struct.unpack("<d", raw)[0],
    "numpy": _array,
    "tensor": _tensor_with_header,
    "jpeg_array": encoded_images,
    "json": _nested,
}


def _inflated(raw: bytes) -> bytes:
    import pyarrow

    with pyarrow.CompressedInputStream(pyarrow.BufferReader(raw), "zstd") as stream:
        return bytes(stream.read())
