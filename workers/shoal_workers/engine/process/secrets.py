"""Reads a job's secrets on its node, and masks them in what the worker prints and reports.

Called by the worker's actor before the task is loaded, and by `standalone.py`. Values go into the environment of this
process, and nowhere else: no database, message, journal or log has them, so no other job is given them. Two jobs that
run as one user on one machine can read each other's environment in /proc all the same; a Ray cluster for each tenant
keeps them apart (docs/security.md). The token of a job's attempt, which opens nothing else: `control/driver.py`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal_workers.contract.user_code import SecretSource

MAX_SECRET_BYTES = 64 << 10
_MIN_MASKED_CHARS = 4
"""Shorter values are not masked: they occur in ordinary text."""


class SecretUnreadable(ValueError):
    """A secret is not where the spec says; the message names both, and no value."""


@dataclass(slots=True)
class Mask:
    """Replaces the values of secrets in text. Empty until `add` is called."""

    _values: dict[str, str] = field(default_factory=dict)
    """Value -> its replacement; the longest first, since one may contain another."""

    def add(self, secrets: Mapping[str, str]) -> None:
        values = dict(self._values)
        for name, value in secrets.items():
            for part in {value, *value.splitlines()}:  # a key of several lines is printed line by line
                if len(part.strip()) >= _MIN_MASKED_CHARS:
                    values[part] = f"[secret {name}]"
        self._values = dict(sorted(values.items(), key=lambda item: -len(item[0])))

    def __call__(self, text: str) -> str:
        for value, replacement in self._values.items():
            if value in text:
                text = text.replace(value, replacement)
        return text


def read_secrets(sources: Mapping[str, SecretSource], environment: Mapping[str, str]) -> dict[str, str]:
    """The values by name. Raises SecretUnreadable."""
    return {name: _read(name, source, environment) for name, source in sources.items()}


def _read(name: str, source: SecretSource, environment: Mapping[str, str]) -> str:
    if source.env is not None:
        if source.env not in environment:
            raise SecretUnreadable(
                f"secrets.{name}: the environment of this node has no variable {source.env}. Set it where the Ray node "
                "is started, or name a file."
            )
        return environment[source.env]
    assert source.file is not None
    try:
        descriptor = os.open(source.file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO would block
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise SecretUnreadable(f"secrets.{name}: {source.file} is not a regular file on this node.")
            content = file.read(MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise SecretUnreadable(
            f"secrets.{name}: {source.file} cannot be read on this node: {error.strerror}. It must be there on every "
            "node that runs a worker of the job."
        ) from None
    if len(content) > MAX_SECRET_BYTES:
        raise SecretUnreadable(f"secrets.{name}: {source.file} has more than {MAX_SECRET_BYTES} bytes.")
    try:
        value = content.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise SecretUnreadable(f"secrets.{name}: {source.file} is not UTF-8 text.") from None
    if "\0" in value:
        raise SecretUnreadable(f"secrets.{name}: {source.file} has a NUL character, which no variable can have.")
    return value
