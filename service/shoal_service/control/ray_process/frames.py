"""Frames between the control plane and its Ray process: two lengths, a header in JSON, and a body.

    4 bytes: header's length | 8 bytes: body's length | header | body

The body is the answer's JSON, or a code archive. Either side ends the connection at a frame that is too long.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import dataclass

MAX_HEADER_BYTES = 32 << 20
"""A request has the configuration of a supervisor, whose spec has at most 1 MiB, or the avoided nodes."""
MAX_BODY_BYTES = 256 << 20
_LENGTHS = struct.Struct("!IQ")


class FrameError(ConnectionError):
    """The other side has closed the connection, or sent a frame that is too long."""


@dataclass(frozen=True, slots=True)
class Frame:
    header: bytes
    body: bytes = b""

    def pack(self) -> bytes:
        return b"".join((_LENGTHS.pack(len(self.header), len(self.body)), self.header, self.body))


def receive(connection: socket.socket) -> Frame:
    """Blocks. Raises FrameError, OSError."""
    header_bytes, body_bytes = _checked(_receive(connection, _LENGTHS.size))
    return Frame(_receive(connection, header_bytes), _receive(connection, body_bytes))


async def read(reader: asyncio.StreamReader) -> Frame:
    """Raises FrameError, OSError."""
    try:
        header_bytes, body_bytes = _checked(await reader.readexactly(_LENGTHS.size))
        return Frame(await reader.readexactly(header_bytes), await reader.readexactly(body_bytes))
    except asyncio.IncompleteReadError:
        raise FrameError("the other process has ended") from None


def _checked(lengths: bytes) -> tuple[int, int]:
    header_bytes, body_bytes = _LENGTHS.unpack(lengths)
    if header_bytes > MAX_HEADER_BYTES or body_bytes > MAX_BODY_BYTES:
        raise FrameError(f"a frame of {header_bytes} + {body_bytes} bytes is too long")
    return header_bytes, body_bytes


def _receive(connection: socket.socket, count: int) -> bytes:
    """In pieces: memory is taken for what has arrived, not for what was announced."""
    pieces, missing = [], count
    while missing:
        piece = connection.recv(min(missing, 1 << 20))
        if not piece:
            raise FrameError("the other process has ended")
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)
