"""Whether all ranks have the same text, and which. Called once in a generation for the names of a task's metrics.

1 all-reduce of three numbers      the smallest and the largest digest, and the first rank that has a text
1 broadcast, if needed             its text; the ranks without one (stages of a pipeline) learn it there
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
import torch.distributed as dist

_NOTHING = 2**62
_DIGEST_BYTES = 7
"""A digest and its negative are int64."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """The same on every rank."""

    text: str
    """That of the first rank that has one; empty if none has."""
    rank: int
    """That rank."""
    is_common: bool
    """No rank has another one."""


def agree(text: str | None, *, max_bytes: int, device: torch.device) -> Agreement:
    """All ranks, once. None: this rank has no text, and takes that of the others. At most `max_bytes` in UTF-8."""
    own = _NOTHING if text is None else _digest(text)
    rank = dist.get_rank()
    box = torch.tensor(
        [own, _NOTHING if text is None else -own, _NOTHING if text is None else rank], dtype=torch.int64, device=device
    )
    dist.all_reduce(box, op=dist.ReduceOp.MIN)
    smallest, negative_largest, first = box.tolist()
    if smallest == _NOTHING:
        return Agreement("", 0, is_common=True)
    is_common = smallest == -negative_largest
    if is_common and smallest == _digest(""):
        return Agreement("", first, is_common=True)
    found = torch.zeros(max_bytes, dtype=torch.uint8, device=device)
    if rank == first and text is not None:
        encoded = text.encode()
        found[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8, device=device)
    dist.broadcast(found, first)
    return Agreement(bytes(found.tolist()).rstrip(b"\0").decode(), first, is_common=is_common)


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:_DIGEST_BYTES], "big")
