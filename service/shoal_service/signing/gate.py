"""Gate: the supervisor's side. Decides which calls are those of its control plane; counts the others.

Made by the supervisor with the public key of its configuration. `verified` is pure. Takes about 0.1 ms per call.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import TypeVar

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import ValidationError

from shoal_service.signing.calls import CONTEXT, Call, CallName, CallRefused, Refusal, SignedCall
from shoal_workers.contract.base import Frozen

_QUIET_S = 60.0
_T = TypeVar("_T", bound=Frozen)


def verified(signed: SignedCall, public_key: str, *, job_id: str, attempt: int, name: CallName) -> Call:
    """The call, if the owner of the attempt's private key has signed it for this attempt, under this name. Raises
    CallRefused."""
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key))
        text = signed.text.encode()
        key.verify(bytes.fromhex(signed.signature), CONTEXT + text)
        call = Call.model_validate_json(text, extra="ignore")
    except (InvalidSignature, ValidationError, ValueError, TypeError, AttributeError):
        # also: no digits, no UTF-8, no key, and whatever else a caller passes in place of a signed call
        raise CallRefused(name, Refusal.FORGED) from None
    if (call.job_id, call.attempt, call.name) != (job_id, attempt, name):
        raise CallRefused(name, Refusal.MISDIRECTED)
    return call


class Gate:
    """Thread-safe. An attempt that began without a key has an empty one, and takes unsigned calls only."""

    def __init__(self, public_key: str, job_id: str, attempt: int) -> None:
        self._public_key = public_key
        self._job_id = job_id
        self._attempt = attempt
        self._last = (0, 0)
        """Epoch and number of the newest directive that was obeyed."""
        self._lock = threading.Lock()

    def require_no_key(self, name: CallName) -> None:
        """For a call without a signature. Raises CallRefused."""
        if self._public_key:
            raise CallRefused(name, Refusal.UNSIGNED)

    def opened(self, signed: SignedCall, name: CallName, kind: type[_T]) -> tuple[int, _T]:
        """The epoch and the arguments of a call; fields that this release does not know are left out. Raises
        CallRefused."""
        call = verified(signed, self._public_key, job_id=self._job_id, attempt=self._attempt, name=name)
        return call.epoch, kind.model_validate(call.arguments, extra="ignore")

    def require_order(self, epoch: int, number: int) -> None:
        """For a directive whose epoch is obeyed: its number is not below the last one's in that epoch. The same number
        is the same directive, which Ray repeats after a lost connection. Raises CallRefused."""
        with self._lock:
            if (epoch, number) < self._last:
                raise CallRefused(CallName.DIRECT, Refusal.REPLAYED)
            self._last = (epoch, number)


class RefusedCalls:
    """How many calls were refused, and when that is worth an event: at once, then once a minute per call and reason, so
    that a flood of calls is no flood of events. Not thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[CallName, Refusal]] = Counter()
        self._reported: dict[tuple[CallName, Refusal], float] = {}

    def add(self, error: CallRefused, mono: float) -> int | None:
        """How many of this kind there were so far, if an event should say it; else None."""
        kind = error.call, error.refusal
        self._counts[kind] += 1
        if mono - self._reported.get(kind, -_QUIET_S) < _QUIET_S:
            return None
        self._reported[kind] = mono
        return self._counts[kind]
