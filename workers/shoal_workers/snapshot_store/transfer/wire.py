"""Messages and bytes over one TCP connection between two processes that know the attempt's key.

    frame     4 bytes of length, then JSON; a payload follows raw, its length is in the message before it
    proof     server: nonce -> client: nonce + HMAC(key, "client", both nonces) -> server: HMAC(key, "server", both)

Every wait is divided into slices of 0.1 s, and `check` is called after each, so a rank of a fenced generation stops in
time. If a peer makes no progress for `patience_s`, the wait fails with TimeoutError. multiprocessing.connection has the
same frames and proof, but its reads cannot be interrupted in the middle of a message. Nothing is unpickled. Errors are
OSErrors.

The snapshot stores of one attempt send requests. Each request and each answer is one frame.

    FIND       part           -> Answer(part), then index JSON and extra JSON, raw
    READ       part, ranges   -> Answer, then the bytes of the ranges one after the other, raw
    UNCHANGED  part           -> Answer: ok if the part was not overwritten since; sent after reading
    PUT        part           -> Answer: there is room; then the client sends index, extra and payload, raw
                              -> Answer: the copy is complete

A connection may carry any number of requests. Used by both sides: `call` by clients, the types also by the server.
"""

from __future__ import annotations

import hmac
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Annotated, TypeVar

from pydantic import BaseModel, Field, ValidationError

from shoal_workers.contract import Frozen, SnapshotServer
from shoal_workers.snapshot_store.slots.slot_files import PartHeader

CHUNK_BYTES = 8 << 20
SLICE_S = 0.1
_SLICE = struct.pack("@ll", 0, int(SLICE_S * 1e6))
_RECEIVED_AT_ONCE = 1 << 20
NONCE_BYTES = 32
_MAX_PARTS = 256
_FRAME = struct.Struct("=I")
_MAX_FRAME_BYTES = 64 << 20

M = TypeVar("M", bound=BaseModel)


class PeerRefused(ConnectionError):
    """The peer answered, and refused the request."""


class Wire:
    """One connection, for one thread at a time. A context manager that closes the socket."""

    def __init__(self, sock: socket.socket, *, check: Callable[[], None], patience_s: float) -> None:
        self._socket = sock
        self._check = check
        self._patience_s = patience_s
        self._progress_mono = 0.0
        # The kernel waits, in slices: a call for each piece that arrives takes half as much CPU time again.
        sock.setblocking(True)
        for limit in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, limit, _SLICE)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def prove(self, key: str, *, queue_s: float = 0.0) -> None:
        """The client's side of the proof. PeerRefused if the keys differ. `queue_s`: see `connect`."""
        patience_s, self._patience_s = self._patience_s, max(queue_s, self._patience_s)
        server_nonce = self.receive(NONCE_BYTES)
        self._patience_s = patience_s
        nonce = secrets.token_bytes(NONCE_BYTES)
        self.send(nonce + proof(key, b"client", server_nonce + nonce))
        try:
            answer = self.receive(NONCE_BYTES)
        except ConnectionError:  # a server that refuses the proof just closes the connection
            raise PeerRefused("it does not accept this attempt's key") from None
        if not hmac.compare_digest(answer, proof(key, b"server", server_nonce + nonce)):
            raise PeerRefused("it does not know this attempt's key")

    def challenge(self, key: str) -> None:
        """The server's side of the proof. PeerRefused if the client does not know the key."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        self.send(nonce)
        answer = self.receive(2 * NONCE_BYTES)
        nonces = nonce + answer[:NONCE_BYTES]
        if not hmac.compare_digest(answer[NONCE_BYTES:], proof(key, b"client", nonces)):
            raise PeerRefused("it does not know this attempt's key")
        self.send(proof(key, b"server", nonces))

    def set_limits(self, check: Callable[[], None], *, patience_s: float) -> None:
        """Replace both limits, once the peer has proved that it knows the key."""
        self._check, self._patience_s = check, patience_s

    def send_message(self, message: BaseModel) -> None:
        data = message.model_dump_json().encode()
        self.send(_FRAME.pack(len(data)) + data)

    def receive_message(self, kind: type[M]) -> M:
        """ConnectionError if something else arrives than a message of this kind."""
        (length,) = _FRAME.unpack(self.receive(_FRAME.size))
        if length > _MAX_FRAME_BYTES:
            raise ConnectionError(f"a message of {length} bytes is longer than any message of a snapshot store")
        try:
            return kind.model_validate_json(self.receive(length))
        except ValidationError:
            raise ConnectionError(f"the message that arrived is not a valid {kind.__name__}") from None

    def send(self, data: bytes | memoryview) -> None:
        self.send_all((memoryview(data),))

    def send_all(self, parts: Sequence[memoryview]) -> None:
        """The parts one after the other, without copying them together."""
        left = [part for part in parts if len(part)]
        self._progress_mono = time.monotonic()
        while left:
            try:
                done = self._socket.sendmsg(left[:_MAX_PARTS])
            except BlockingIOError:
                done = 0
            self._check_after(done)
            while left and done >= len(left[0]):
                done -= len(left.pop(0))
            if done:
                left[0] = left[0][done:]

    def receive_into(self, view: memoryview) -> None:
        done = 0
        self._progress_mono = time.monotonic()
        while done < len(view):
            try:
                left = view[done : done + _RECEIVED_AT_ONCE]
                count = self._socket.recv_into(left, len(left), socket.MSG_WAITALL)
                if count == 0:
                    raise ConnectionError("it closed the connection")
            except BlockingIOError:
                count = 0
            done += count
            self._check_after(count)

    def receive(self, count: int) -> bytes:
        data = bytearray(count)
        self.receive_into(memoryview(data))
        return bytes(data)

    def _check_after(self, count: int) -> None:
        """Called after each system call, which has moved `count` bytes within a slice."""
        self._check()
        now = time.monotonic()
        if count:
            self._progress_mono = now
        elif now - self._progress_mono > self._patience_s:
            raise TimeoutError(f"no progress for {self._patience_s:g} s")


def connect(
    server: SnapshotServer, key: str, *, check: Callable[[], None], patience_s: float, queue_s: float = 0.0
) -> Wire:
    """OSError if it cannot be reached in time, PeerRefused if it does not have the same key.

    `queue_s`: the server may serve others first for this long, if that is longer than `patience_s`."""
    wire = Wire(open_socket((server.host, server.port), check, patience_s), check=check, patience_s=patience_s)
    try:
        wire.prove(key, queue_s=queue_s)
    except BaseException:
        wire.__exit__()
        raise
    return wire


def open_socket(address: tuple[str, int], check: Callable[[], None], patience_s: float) -> socket.socket:
    """Connect within `patience_s`. Never ask a name server: the address is parsed as a number. OSError."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    socket.inet_pton(family, address[0].partition("%")[0])  # OSError for a name
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setblocking(False)
        try:
            sock.connect(address)
        except BlockingIOError:
            wait_for(sock, select.POLLOUT, check=check, patience_s=patience_s)
            error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error)) from None
    except BaseException:
        sock.close()
        raise
    return sock


def wait_for(sock: socket.socket, event: int, *, check: Callable[[], None], patience_s: float) -> None:
    """Wait until the socket is ready. TimeoutError after `patience_s`; an error of `check` passes within a slice."""
    poll = select.poll()
    poll.register(sock, event)
    give_up = time.monotonic() + patience_s
    while not poll.poll(1000 * SLICE_S):
        check()
        if time.monotonic() > give_up:
            raise TimeoutError(f"no progress for {patience_s:g} s")


def proof(key: str, role: bytes, nonces: bytes) -> bytes:
    """What shows that the sender knows the key; `role` is b"client" or b"server"."""
    return hmac.digest(key.encode(), role + nonces, "sha256")


Count = Annotated[int, Field(ge=0, lt=1 << 62)]


class Verb(StrEnum):
    FIND = "find"
    READ = "read"
    UNCHANGED = "unchanged"
    PUT = "put"


class Part(Frozen):
    """A part as it is sent over the wire."""

    generation: Count
    rank: Count
    world_size: Count = 0
    step: Count
    num_bytes: Count = 0
    index_bytes: Count = 0
    extra_bytes: Count = 0
    sequence: Count = 0
    """Sequence word of the slot that holds it, when its header was read."""

    @classmethod
    def from_header(cls, header: PartHeader) -> Part:
        return cls(
            generation=header.generation,
            rank=header.rank,
            world_size=header.world_size,
            step=header.step,
            num_bytes=header.num_bytes,
            index_bytes=header.index_bytes,
            extra_bytes=header.extra_bytes,
            sequence=header.sequence,
        )


class Request(Frozen):
    verb: Verb
    part: Part
    ranges: tuple[tuple[Count, Count], ...] = ()
    """READ: (offset in the payload, bytes) each."""
    keep_step: Count | None = None
    """PUT: the step of an earlier copy of this rank that must not be overwritten."""


class Answer(Frozen):
    ok: bool = True
    why: str = ""
    """The reason, if not ok."""
    part: Part | None = None
    cpu_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """PUT, in the second answer: CPU seconds that receiving took."""


def call(wire: Wire, request: Request) -> Answer:
    """Send the request and return the answer.

    PeerRefused if it is not ok, another OSError if the connection fails.
    """
    wire.send_message(request)
    return receive_ok(wire)


def receive_ok(wire: Wire) -> Answer:
    """Return the next answer. PeerRefused if it is not ok."""
    answer = wire.receive_message(Answer)
    if not answer.ok:
        raise PeerRefused(answer.why)
    return answer
