"""The fork server's connections until their request has arrived, and what a request is. Nothing here waits.

A client sends its request as one message, right after it has connected. One that does not is disconnected after
`PATIENCE_S`, or when `MAX_WAITING` newer ones wait. Called by the fork server, on its only thread.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass, field
from typing import Any

from shoal_workers.forkserver.launch import LARGEST_REQUEST, is_of_this_user

PATIENCE_S = 10.0
MAX_WAITING = 64
_NUM_STREAMS = 3


@dataclass(frozen=True, slots=True)
class Request:
    """What a new process runs. `streams`: file descriptors of its standard input, output and error."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    streams: tuple[int, ...]


@dataclass(slots=True)
class Clients:
    """Connections that have not sent their request yet."""

    waiting: dict[int, tuple[socket.socket, float]] = field(default_factory=dict)
    """By file descriptor, oldest first: the connection, and since when by the monotonic clock, in seconds."""

    def add(self, connection: socket.socket, now: float) -> None:
        connection.setblocking(False)
        self.waiting[connection.fileno()] = connection, now

    def take(self, number: int) -> socket.socket:
        """The caller closes it."""
        return self.waiting.pop(number)[0]

    def overdue(self, now: float) -> list[int]:
        """Those to disconnect."""
        num_surplus = len(self.waiting) - MAX_WAITING
        waiting = enumerate(self.waiting.items())
        return [number for i, (number, (_, since)) in waiting if i < num_surplus or now - since >= PATIENCE_S]

    def patience_s(self, now: float) -> float | None:
        """Seconds until one of them is overdue; None: none waits."""
        oldest = next(iter(self.waiting.values()), None)
        return None if oldest is None else max(0.0, oldest[1] + PATIENCE_S - now)

    def close(self) -> None:
        for connection, _ in self.waiting.values():
            connection.close()
        self.waiting.clear()


def receive(connection: socket.socket) -> Request | None:
    """None: the client has gone, is of another user, or has sent something else than a request."""
    if not is_of_this_user(connection):
        return None
    try:
        message, streams, _, _ = socket.recv_fds(connection, LARGEST_REQUEST, _NUM_STREAMS)
    except OSError:
        return None
    try:
        return parse(message, tuple(streams))
    except (ValueError, RecursionError):
        for stream in streams:
            os.close(stream)
        return None


def parse(message: bytes, streams: tuple[int, ...]) -> Request:
    """ValueError or RecursionError: not a request."""
    decoded = json.loads(message)
    if not isinstance(decoded, dict):
        raise ValueError("a request is an object")
    argv, env, cwd = (decoded.get(key) for key in ("argv", "env", "cwd"))
    if not (isinstance(argv, list) and argv and _are_text(argv)):
        raise ValueError("argv is a list of texts, and has at least one")
    if not (isinstance(env, dict) and _are_text([*env.values()])):
        raise ValueError("env is an object of texts")
    if not isinstance(cwd, str) or len(streams) != _NUM_STREAMS:
        raise ValueError("a request has a directory and three streams")
    return Request(argv, env, cwd, streams)


def _are_text(values: list[Any]) -> bool:
    return all(isinstance(value, str) for value in values)
