"""Secrets: what signs the messages, from environment variables of the service and from files of one directory.

A file is read for each message, so that a secret can be changed without a restart. Thread-safe.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path

_BASE64 = "whsec_"
"""Beginning of a secret in the form of Standard Webhooks: the rest is base64."""
_MAX_BYTES = 4096
_MIN_BYTES = 16


class SecretUnusable(Exception):
    """There is no such secret, or it cannot be used. The message names the reference, never the secret."""

    def __init__(self, reference: str, reason: str) -> None:
        super().__init__(reference, reason)
        self.reference = reference
        self.reason = reason

    def __str__(self) -> str:
        return f"secret {self.reference}: {self.reason}"


class Secrets:
    """By reference; see `WebhookSpec.secret`."""

    def __init__(self, variables: Mapping[str, str], directory: Path) -> None:
        self._variables = dict(variables)
        self._directory = directory

    def __repr__(self) -> str:
        return f"Secrets({len(self._variables)} variables, {self._directory})"

    def key(self, reference: str) -> bytes:
        """The key that signs. Blocks, if it is in a file. Raises SecretUnusable."""
        return _decoded(reference, self._text(reference))

    def url(self, reference: str) -> str:
        """The apprise URL. Blocks, if it is in a file. Raises SecretUnusable."""
        text = self._text(reference)
        if not text or len(text.split()) > 1:
            raise SecretUnusable(reference, "it is not one URL; a hook has one, so use more hooks")
        return text

    def _text(self, reference: str) -> str:
        kind, _, name = reference.partition(":")
        text = self._variables.get(name) if kind == "env" else self._read(reference, name)
        if text is None:
            raise SecretUnusable(reference, "the service has no such environment variable")
        return text.strip()

    def _read(self, reference: str, name: str) -> str:
        try:
            with (self._directory / name).open("rb") as file:
                return file.read(_MAX_BYTES).decode()
        except UnicodeDecodeError:
            raise SecretUnusable(reference, "the file is not text") from None
        except OSError as error:
            raise SecretUnusable(reference, f"the file in webhook_secrets_dir: {error.strerror}") from None


def _decoded(reference: str, text: str) -> bytes:
    try:
        key = base64.b64decode(text.removeprefix(_BASE64), validate=True) if text.startswith(_BASE64) else text.encode()
    except binascii.Error:
        raise SecretUnusable(reference, f"what follows {_BASE64} is not base64") from None
    if len(key) < _MIN_BYTES:
        raise SecretUnusable(reference, f"it has fewer than {_MIN_BYTES} bytes")
    return key
