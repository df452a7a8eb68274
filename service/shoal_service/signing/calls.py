"""What is signed: one call to the supervisor of one attempt, as a text. And why a call is refused. Pure data.

    control plane                                                    supervisor
    Call -> text -> signature    -- SignedCall, through Ray -->      signature fits the text? -> text -> Call

What is signed is what is read: the supervisor parses the very text that it has verified. So a control plane of a newer
release may add fields, which an older supervisor leaves out.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from shoal_workers.contract.base import Frozen

CONTEXT = b"shoal call v1\n"
"""Before the text when it is signed, so that no signature of something else fits."""


class CallName(StrEnum):
    """The calls of a control plane to a supervisor."""

    PULL = "pull"
    DIRECT = "direct"
    STACKS = "stacks"
    RELEASE = "release"


class SignedCall(Frozen):
    """A call as it travels."""

    text: str
    """JSON of a Call."""
    signature: str
    """Ed25519 of CONTEXT and the text in UTF-8, in hexadecimal digits."""


class Call(Frozen):
    """A call to the supervisor of one attempt."""

    job_id: str
    attempt: int
    epoch: int
    """Lease epoch of the control plane."""
    name: CallName
    arguments: dict[str, Any]


class PullArguments(Frozen):
    after: int
    wait_s: float


class StacksArguments(Frozen):
    rank: int | None
    native: bool


class ReleaseArguments(Frozen):
    pass


class Refusal(StrEnum):
    """Why a supervisor does not do what a call asks."""

    UNSIGNED = "unsigned"
    """Its attempt began with a key, and the call has no signature."""
    FORGED = "forged"
    """The signature does not fit the text and the key of the attempt."""
    MISDIRECTED = "misdirected"
    """The control plane has signed it for another attempt, or as another call."""
    REPLAYED = "replayed"
    """A directive of the same control plane with a higher number was obeyed before."""


WORDS = {
    Refusal.UNSIGNED: "it has no signature",
    Refusal.FORGED: "its signature does not fit the key of the attempt",
    Refusal.MISDIRECTED: "it was signed for another attempt or as another call",
    Refusal.REPLAYED: "a newer one was obeyed before",
}


class CallRefused(Exception):
    """Survives pickling: Ray carries it to the control plane."""

    def __init__(self, call: str, refusal: str) -> None:
        super().__init__(call, refusal)
        self.call = CallName(call)
        self.refusal = Refusal(refusal)

    def __str__(self) -> str:
        return f"the supervisor refuses the call {self.call}: {WORDS[self.refusal]}"
