"""The resource of the REST API about the verification of a checkpoint. Pure data, as those in `views`."""

from __future__ import annotations

from enum import StrEnum

from shoal_workers.contract.base import Frozen


class VerificationState(StrEnum):
    RUNNING = "running"
    WHOLE = "whole"
    """Every file has the length and the checksum that its marker names."""
    DAMAGED = "damaged"
    """A file differs. The checkpoint's state is `damaged` from now on."""
    MISSING = "missing"
    """Its marker is not in the storage: it was deleted meanwhile, or not by Shoal."""
    FAILED = "failed"
    """The storage did not answer; nothing is known."""


class VerificationView(Frozen):
    """The verification of a checkpoint: every byte is read once, and compared with its marker."""

    name: str
    state: VerificationState
    bytes_read: int = 0
    bytes: int = 0
    """Bytes of all files; 0: not known yet."""
    seconds: float = 0.0
    """Seconds since it began."""
    message: str = ""
    """What differs, or why it failed."""
