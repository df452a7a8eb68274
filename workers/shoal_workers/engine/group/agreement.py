"""Whether all ranks have the same text, and which; or the text of each (`gather_texts`, two all-gathers).

Called once in a generation for the names of a task's metrics, and for those of the buffers that a forward pass changes.

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
    """The text of the first rank that has one; empty if none has."""
    rank: int
    """The first rank that has a text."""
    is_common: bool
    """No rank has another one."""


def agree(text: str | None, *, max_bytes: int, device: torch.device) -> Agreement:
    """Compares the texts of all ranks: a collective. None if this rank has no text, and takes that of the others. A
    text has at most `max_bytes` in UTF-8."""
    digest = _NOTHING if text is None else _digest(text)
    rank = dist.get_rank()
    # The smallest negative is the negative of the largest: one all-reduce finds both ends.
    box = torch.tensor(
        [digest, _NOTHING if text is None else -digest, _NOTHING if text is None else rank],
        dtype=torch.int64,
        device=device,
    )
    dist.all_reduce(box, op=dist.ReduceOp.MIN)
    smallest, negative_largest, first = box.tolist()
    if smallest == _NOTHING:
        return Agreement("", 0, is_common=True)
    is_common = smallest == -negative_largest
    if is_common and smallest == _digest(""):
        return Agreement("", first, is_common=True)
    buffer = torch.zeros(max_bytes, dtype=torch.uint8, device=device)
    if rank == first and text is not None:
        encoded = text.encode()
        buffer[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8, device=device)
    dist.broadcast(buffer, first)
    return Agreement(bytes(buffer.tolist()).rstrip(b"\0").decode(), first, is_common=is_common)


def gather_texts(text: str, device: torch.device) -> list[str]:
    """All ranks: the text of each. One collective if all are empty, else two."""
    encoded = text.encode()
    world_size = dist.get_world_size()
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world_size)]
    dist.all_gather(lengths, torch.tensor([len(encoded)], dtype=torch.int64, device=device))
    sizes = [int(length) for length in lengths]
    if not any(sizes):
        return [""] * world_size
    local_text = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    if encoded:
        local_text[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8).to(device)
    gathered = [torch.zeros_like(local_text) for _ in range(world_size)]
    dist.all_gather(gathered, local_text)
    return [bytes(size_tensor[:size].tolist()).decode() for size_tensor, size in zip(gathered, sizes, strict=True)]


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:_DIGEST_BYTES], "big")
