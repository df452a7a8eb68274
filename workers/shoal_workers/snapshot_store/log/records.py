"""What a gradient log consists of: its head, and one commit for each step. Hides their bytes, and where each gradient
lies.

    entry file   | header: step | index: head | extra: commit, changed tensors, extra JSON | payload: gradients |

The gradients of a step arrive before the vote, the commit right after it. An entry is complete once it has both. Its
payload has the gradients that existed before the vote, in the order of the head's parameters, without gaps. The
state after `step` follows from any state whose step is at least `previous` and below `step`: steps in between changed
nothing. The head also names the platform on which the gradients have the same effect bit for bit. Made by the engine,
stored as it is sent, read by `replay` and the receiver.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated

import torch
from pydantic import Field, ValidationError
from torch import Tensor

from shoal_workers.contract.base import Frozen

Count = Annotated[int, Field(ge=0, lt=1 << 62)]
_START = struct.Struct("=qI")
START_BYTES = _START.size


class LoggedParameter(Frozen):
    """One parameter's shard on the rank that writes the log."""

    name: str
    group: Count
    sizes: tuple[Count, ...]


class LoggedGroup(Frozen):
    """The settings of one parameter group that do not change."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class LoggedOptimizer(Frozen):
    """An optimizer that its task declares elementwise; see `rules`."""

    path: str
    """module:Class"""
    defaults: str
    """JSON."""
    groups: tuple[str, ...]
    """JSON: the settings of each parameter group that do not change."""
    counters: tuple[tuple[str, str], ...] = ()
    """Key and type of the single numbers in the state of each parameter."""


class LogHead(Frozen):
    """All that the commits of one log have in common."""

    groups: tuple[LoggedGroup, ...]
    """The settings of the built-in AdamW."""
    optimizer: LoggedOptimizer | None = None
    """None for the built-in AdamW."""
    parameters: tuple[LoggedParameter, ...]
    num_elements: Count
    """The elements of all parameters: the most that an entry contains."""
    commit_room: Count
    """Bytes that are reserved for a commit."""
    num_threads: int
    """Threads of torch in the writing process. The replay needs as many: they divide long loops into other vectors."""
    torch_version: str
    cpu_capability: str

    @property
    def platform(self) -> tuple[int, str, str]:
        """What must be equal on both sides for the same bits."""
        return self.num_threads, self.torch_version, self.cpu_capability


class Commit(Frozen):
    """What the update needs beside the gradients, and what it changes beside the parameters."""

    step: Count
    """Optimizer steps completed with this one."""
    previous: Count
    """The last step before it that changed anything."""
    is_bf16: bool
    """The gradients are stored in 2 bytes each, which loses nothing."""
    unscale: float
    """1 / loss scale."""
    clip: float
    """Factor of clipping; 1: not clipped."""
    lrs: tuple[float, ...]
    """Learning rates by parameter group."""
    counts: tuple[Count, ...]
    """The number of updates of each parameter, this one included; 0: it is not updated in this step."""
    unused: tuple[Count, ...] = ()
    """Numbers of the parameters that are not updated although the payload has zeros for them: the gradients were sent
    before all ranks knew that none had used them."""
    counters: tuple[tuple[str, tuple[float, ...]], ...] = ()
    """The numbers in the state of each parameter before this update, by key; only with an optimizer of the task."""
    changed: tuple[tuple[str, Count], ...]
    """Name and bytes of every other tensor whose value changed. The values follow in this order."""
    extra_bytes: Count
    """Length of the values that are not tensors, as JSON. They come last."""


@dataclass(frozen=True, slots=True)
class CommitBlob:
    """A commit with the values that follow it."""

    commit: Commit
    changed: tuple[bytes, ...]
    extra: bytes


def encode(blob: CommitBlob) -> bytes:
    text = blob.commit.model_dump_json().encode()
    return b"".join((_START.pack(blob.commit.previous, len(text)), text, *blob.changed, blob.extra))


def previous_of(data: bytes) -> int:
    """`previous` of an encoded commit; `data`: its first START_BYTES or more. ValueError if it is shorter."""
    if len(data) < START_BYTES:
        raise ValueError("a commit is longer")
    return int(_START.unpack_from(data)[0])


def decode(data: bytes) -> CommitBlob:
    """ValueError if it is not an encoded commit."""
    if len(data) < START_BYTES:
        raise ValueError("a commit is longer")
    _, length = _START.unpack_from(data)
    try:
        commit = Commit.model_validate_json(data[START_BYTES : START_BYTES + length])
    except ValidationError as error:
        raise ValueError(f"not a commit: {error.error_count()} errors") from None
    position, changed = START_BYTES + length, []
    for _, num_bytes in commit.changed:
        changed.append(data[position : position + num_bytes])
        position += num_bytes
    extra = data[position:]
    if len(extra) != commit.extra_bytes:
        raise ValueError(f"{len(extra)} bytes of values instead of {commit.extra_bytes}")
    return CommitBlob(commit, tuple(changed), extra)


def head_of(
    groups: Sequence[LoggedGroup],
    parameters: Sequence[tuple[str, int, Sequence[int]]],
    *,
    commit_room: int,
    optimizer: LoggedOptimizer | None = None,
) -> LogHead:
    """`parameters`: name, number of the group, sizes of the shard. `groups`: none with an `optimizer`."""
    num_threads, torch_version, cpu_capability = platform()
    return LogHead(
        groups=tuple(groups),
        optimizer=optimizer,
        parameters=tuple(
            LoggedParameter(name=name, group=group, sizes=tuple(sizes)) for name, group, sizes in parameters
        ),
        num_elements=sum(prod(sizes) for _, _, sizes in parameters),
        commit_room=commit_room,
        num_threads=num_threads,
        torch_version=torch_version,
        cpu_capability=cpu_capability,
    )


def views_of(
    gradients: Tensor, head: LogHead, counts: Sequence[int], unused: Collection[int] = ()
) -> list[Tensor | None]:
    """Returns each parameter's gradient in the payload of an entry; None if its count is 0 and it is not among
    `unused`."""
    views: list[Tensor | None] = []
    end = 0
    for number, (parameter, count) in enumerate(zip(head.parameters, counts, strict=True)):
        if not count and number not in unused:
            views.append(None)
            continue
        start, end = end, end + prod(parameter.sizes)
        views.append(gradients[start:end].view(parameter.sizes))
    return views


def platform() -> tuple[int, str, str]:
    """Returns this process's platform, as `LogHead.platform` has it."""
    return torch.get_num_threads(), str(torch.__version__), torch.backends.cpu.get_cpu_capability()
