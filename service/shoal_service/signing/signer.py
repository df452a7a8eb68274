"""Signer: the control plane's side. It signs the calls of one lease epoch to one attempt's supervisor.

Made by a driver with the attempt's private key, which is in the database and nowhere else.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic_core import to_json

from shoal_service.signing.calls import CONTEXT, CallName, SignedCall

SEED_BYTES = 32


def new_seed() -> str:
    """A private key, in hexadecimal digits: for Ed25519 any 32 bytes are one."""
    return secrets.token_hex(SEED_BYTES)


class Signer:
    """Takes about 30 us per call."""

    def __init__(self, seed: str, job_id: str, attempt: int, epoch: int) -> None:
        """`seed`: see `new_seed`."""
        self._key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(seed))
        self._of = {"job_id": job_id, "attempt": attempt, "epoch": epoch}

    @property
    def public_key(self) -> str:
        """For the supervisor: 64 hexadecimal digits."""
        return self._key.public_key().public_bytes_raw().hex()

    def sign(self, name: CallName, arguments: Mapping[str, Any]) -> SignedCall:
        """`arguments`: JSON values."""
        text = to_json({**self._of, "name": name, "arguments": arguments}).decode()
        return SignedCall(text=text, signature=self._key.sign(CONTEXT + text.encode()).hex())
