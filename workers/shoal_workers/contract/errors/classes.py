"""The class of an exception, and its origin. Pure functions over names, texts, error numbers and frames.

    class     what failed: the device, memory, the network library, the operating system; or nothing of these
    origin    whose code raised it: that of the task, or the engine's

Called in the worker, by `engine/task/user_code.py` and `actor.py`. It does not decide who is to blame:
one rank alone cannot know whether the others have the same error.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from shoal_workers.contract.errors.texts import TEXTS


class ErrorClass(StrEnum):
    """What failed. All but PLAIN are faults of a worker or of its node if one rank reports them, and not all."""

    PLAIN = "plain"
    """None of the others: a fault of the code that raised it."""
    DEVICE = "device"
    """The GPU, its driver, its memory's ECC, or a kernel that it ended."""
    DEVICE_MEMORY = "device_memory"
    """No memory left on the GPU."""
    HOST_MEMORY = "host_memory"
    """No memory, or no shared memory, left on the node."""
    NETWORK = "network"
    """NCCL failed on this rank itself, not because another rank is gone."""
    SYSTEM = "system"
    """The operating system could not do what it was asked to: a disk, a mount, a limit of the node."""


class Origin(StrEnum):
    """Whose code raised."""

    TASK = "task"
    ENGINE = "engine"


class FrameOwner(StrEnum):
    """Whose code a frame of the stack runs."""

    TASK = "task"
    ENGINE = "engine"
    LIBRARY = "library"
    """torch, the standard library, anything that is installed: it acts for its caller."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a traceback."""

    owner: FrameOwner
    is_communication: bool = False
    """The frame is one of torch.distributed; its owner is LIBRARY."""
    is_refusal: bool = False
    """The frame ended with a `raise` statement, other than a failed assertion."""


ERRNOS = frozenset(
    {
        errno.EIO,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.ESTALE,
        errno.ENOMEM,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENODEV,
        errno.ENXIO,
        errno.EREMOTEIO,
        errno.ENOTCONN,
        errno.ESHUTDOWN,
        errno.EHOSTDOWN,
        errno.ENETDOWN,
        errno.EBUSY,
        errno.EUCLEAN,
    }
)
"""Errors of the node. Not ENOENT, EACCES or EEXIST: a task that names a wrong path gets these."""

_TYPES: dict[str, ErrorClass] = {
    "MemoryError": ErrorClass.HOST_MEMORY,
    "torch.OutOfMemoryError": ErrorClass.DEVICE_MEMORY,
    "torch.cuda.OutOfMemoryError": ErrorClass.DEVICE_MEMORY,
}


@dataclass(frozen=True, slots=True)
class Link:
    """One exception of a chain of causes."""

    type: str
    """Qualified name; without the module if it is a builtin."""
    message: str
    errno: int | None = None


def error_class_of(chain: Sequence[Link]) -> ErrorClass:
    """The class of an exception: of the first one in the chain that is not PLAIN.

    Args:
        chain: the exception, then what it was raised from, and so on.
    """
    for link in chain:
        found = _class_of_link(link)
        if found is not ErrorClass.PLAIN:
            return found
    return ErrorClass.PLAIN


def origin_of(frames: Sequence[Frame], *, in_task_call: bool) -> Origin:
    """Whose code raised.

    The innermost frame that is the task's or the engine's decides; libraries act for their caller. Two cases while the
    engine has called into the task: a library that the engine runs on the task's objects (a backward pass, a module's
    call) raises because of these objects, unless it communicates; and an explicit `raise` of the engine refuses
    something that the task has returned.

    Args:
        frames: outermost first.
        in_task_call: the engine had called into the task when the exception was raised.
    """
    inner: Frame | None = None
    """The frame that the one in hand called."""
    for frame in reversed(frames):
        if frame.owner is FrameOwner.TASK:
            return Origin.TASK
        if frame.owner is FrameOwner.ENGINE:
            is_the_tasks = frame.is_refusal if inner is None else not inner.is_communication
            return Origin.TASK if in_task_call and is_the_tasks else Origin.ENGINE
        inner = frame
    return Origin.TASK if in_task_call else Origin.ENGINE


def _class_of_link(link: Link) -> ErrorClass:
    if link.type in _TYPES:
        return _TYPES[link.type]
    if link.errno is not None:
        if link.errno == errno.ENOMEM:
            return ErrorClass.HOST_MEMORY
        return ErrorClass.SYSTEM if link.errno in ERRNOS else ErrorClass.PLAIN
    for text in TEXTS:
        if text.pattern.search(link.message):
            return ErrorClass(text.error_class)
    return ErrorClass.PLAIN
