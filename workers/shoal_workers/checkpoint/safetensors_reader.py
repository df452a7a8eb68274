"""Reads tensors of safetensors files by name, whole or in part: `init_from`. Nothing is unpickled; needs no library.

    8 bytes   length of the header, little endian
    header    JSON: name -> {dtype, shape, data_offsets}
    data      row-major, without gaps

The format is described at https://huggingface.co/docs/safetensors. Called by `engine/model/initial_weights.py`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from shoal_workers.checkpoint.errors import InitialWeightsUnusable
from shoal_workers.checkpoint.storage import Directory, open_directory

_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000
_PIECE_BYTES = 16 << 20
_DTYPES = {
    "C64": torch.complex64,
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The place of one tensor in a file."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class SafetensorsReader:
    """`url`: a `.safetensors` file, or a directory with `model.safetensors` or the index of several files.

    Raises InitialWeightsUnusable, here and in `read`: there is no such file, or it is not a valid one.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        is_file = self._url.endswith(".safetensors")
        folder, _, name = self._url.rpartition("/")
        self._place: Directory = open_directory(folder if is_file else self._url, follows_links=True)
        self.tensors: dict[str, StoredTensor] = {}
        try:
            for file in (name,) if is_file else self._files():
                self.tensors |= self._header(file)
        except OSError as error:
            raise InitialWeightsUnusable(self._url, f"it cannot be read: {type(error).__name__}: {error}") from error
        except (ValueError, KeyError, TypeError, struct.error) as error:
            raise InitialWeightsUnusable(self._url, f"it is not a valid safetensors file: {error}") from error

    def read(self, name: str) -> torch.Tensor:
        """One tensor, in its stored dtype."""
        stored = self.tensors[name]
        out = torch.empty(stored.shape, dtype=stored.dtype)
        self.read_into(name, (0,) * len(stored.shape), out)
        return out

    def read_into(self, name: str, offsets: Sequence[int], out: torch.Tensor) -> None:
        """The part of a tensor that begins at `offsets` and has the shape of `out`, converted to its dtype.

        Reads the rows of the part, in pieces of some MiB; of a part that is narrower than its tensor, other columns
        too."""
        stored = self.tensors[name]
        if out.numel() == 0:
            return
        if not stored.shape:
            out.copy_(self._rows(name, 0, 1).view(out.shape))
            return
        inner = tuple(slice(at, at + size) for at, size in zip(offsets[1:], out.shape[1:], strict=True))
        at_once = max(1, _PIECE_BYTES * stored.shape[0] // stored.num_bytes)
        for row in range(0, out.shape[0], at_once):
            piece = out[row : row + at_once]
            rows = self._rows(name, offsets[0] + row, len(piece)).view(len(piece), *stored.shape[1:])
            piece.copy_(rows[(slice(None), *inner)])

    def _rows(self, name: str, first: int, count: int) -> torch.Tensor:
        """Return `count` rows from `first` on, flat; a tensor without dims has one row."""
        stored = self.tensors[name]
        row_bytes = stored.num_bytes // (stored.shape[0] if stored.shape else 1)
        data = bytearray(count * row_bytes)
        try:
            num_read = self._place.read_into(stored.file, stored.offset + first * row_bytes, memoryview(data))
        except OSError as error:
            raise InitialWeightsUnusable(self._url, f"it cannot be read: {type(error).__name__}: {error}") from error
        if num_read != len(data):
            raise InitialWeightsUnusable(self._url, f"{stored.file} ends within {name}")
        return torch.frombuffer(data, dtype=stored.dtype)

    def _files(self) -> list[str]:
        there = self._place.files()
        if _INDEX in there:
            return sorted(set(json.loads(self._place.read(_INDEX))["weight_map"].values()))
        files = sorted(name for name in there if name.endswith(".safetensors"))
        if len(files) != 1:
            raise ValueError(f"it holds {len(files)} .safetensors files and no {_INDEX}; name one file")
        return files

    def _header(self, file: str) -> dict[str, StoredTensor]:
        prefix = bytearray(8)
        self._place.read_into(file, 0, memoryview(prefix))
        (length,) = struct.unpack("<Q", prefix)
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"the header of {file} would have {length} bytes")
        header = bytearray(length)
        self._place.read_into(file, 8, memoryview(header))
        tensors = {}
        for name, entry in json.loads(header.decode()).items():
            if name == "__metadata__":
                continue
            dtype = _DTYPES.get(entry["dtype"])
            if dtype is None:
                raise ValueError(f"{name} has the dtype {entry['dtype']}, which is not supported")
            begin, end = entry["data_offsets"]
            stored = StoredTensor(file, dtype, tuple(map(int, entry["shape"])), 8 + length + int(begin))
            if stored.num_bytes != end - begin:
                raise ValueError(f"{name} has {end - begin} bytes for {entry['dtype']} of {list(stored.shape)}")
            tensors[name] = stored
        return tensors
