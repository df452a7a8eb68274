"""The index of one rank's shard: tensor, slice, offset in the .bin file and checksum of each item.

    shard-00002.bin     | embed.weight[2000:3000] | pad | layers.0.wq[...] | pad | ...     raw bytes, 64-byte aligned
    shard-00002.json    {"items": [{"fqn": "embed.weight", "offsets": [2000, 0], "file_offset": 0, "crc32": ...}, ...],
                         "extra": {...}, ...}

Pure data, stored as JSON: nothing in storage is unpickled. Imports no torch.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import ConfigDict, Field, ValidationError

from shoal_workers.contract.base import Frozen
from shoal_workers.contract.plain_text import first_problem

ALIGNMENT_BYTES = 64


class IndexItem(Frozen):
    """One slice of one tensor."""

    fqn: str
    dtype: str
    """torch's name without the prefix: float32, bfloat16 ..."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offsets: tuple[int, ...]
    """Start of the slice in the whole tensor, per dim."""
    sizes: tuple[int, ...]
    """Size of the slice, per dim; its bytes are in row-major order."""
    file_offset: int = Field(ge=0)
    nbytes: int = Field(ge=0)
    crc32: int = Field(ge=0, le=0xFFFFFFFF)


class ShardIndex(Frozen):
    """Everything that one rank wrote."""

    model_config = ConfigDict(ser_json_inf_nan="constants")  # an optimizer's `best` begins as infinity
    format: int = Field(1, ge=1, le=1)
    rank: int
    world_size: int
    generation: int
    step: int
    items: tuple[IndexItem, ...]
    extra: dict[str, Any]
    """The engine's values that are not tensors; JSON values only."""

    def to_json(self) -> bytes:
        return self.model_dump_json().encode()

    @staticmethod
    def from_json(data: bytes) -> ShardIndex:
        """ValueError, with a message of one line, if it is not an index."""
        try:
            return ShardIndex.model_validate_json(data)
        except ValidationError as error:
            raise ValueError(first_problem(error)) from None


def jsonable(extra: Any) -> dict[str, Any]:
    """`extra` as it will be read: tuples as lists, keys as strings, infinite numbers as they are. TypeError or
    ValueError if it is no JSON."""
    return dict(json.loads(json.dumps(dict(extra))))


def payload_name(rank: int) -> str:
    return f"shard-{rank:05d}.bin"


def index_name(rank: int) -> str:
    return f"shard-{rank:05d}.json"
