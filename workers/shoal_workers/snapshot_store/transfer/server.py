"""Serves this node's snapshot parts to other nodes, and receives copies of theirs.

    accept thread ---> one thread per connection, at most MAX_CONNECTIONS: proof of the key, then requests, until the
                       client closes the connection
    kernel             further connections wait in the listener's queue, in the order in which they came

A client that hangs, sends nonsense or is cut off occupies one of these threads for a few seconds and does no other
harm: every wait is limited, nothing is unpickled, every message is validated, and a copy is complete only after its
last byte. Started and closed by the snapshot store.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Iterable
from functools import partial

from shoal_workers.snapshot_store.slots.buddy_slots import BuddySlots, OutdatedCopy
from shoal_workers.snapshot_store.slots.registry import OpenPart, SlotRegistry
from shoal_workers.snapshot_store.slots.slot_files import Regions, Stamp
from shoal_workers.snapshot_store.snapshot_errors import SharedMemoryFull
from shoal_workers.snapshot_store.transfer.wire import CHUNK_BYTES, Answer, Part, Request, Verb, Wire

MAX_CONNECTIONS = 64
_MAX_QUEUED = 4096
"""Linux allows no more unless net.core.somaxconn was raised."""
_PROOF_S = 2.0
_PATIENCE_S = 10.0
_READ_BYTES = 1 << 20
"""Ranges are gathered in a buffer of this size, small enough to stay in the processor's cache."""

_log = logging.getLogger(__name__)


class PartServer:
    """Listens from its construction until `close`; its threads are daemons."""

    def __init__(self, registry: SlotRegistry, buddies: BuddySlots, *, key: str, host: str) -> None:
        self._registry = registry
        self._buddies = buddies
        self._key = key
        self._stopped = threading.Event()
        self._free_connections = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._threads: set[threading.Thread] = set()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_MAX_QUEUED)
        self.port: int = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, name="snapshot-accept", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Stop listening; return when every thread has ended."""
        self._stopped.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._accepting.join()
        self._listener.close()
        for thread in tuple(self._threads):
            thread.join()

    def _accept(self) -> None:
        while True:
            self._free_connections.acquire()
            try:
                sock, _ = self._listener.accept()
            except OSError:
                self._free_connections.release()
                if self._stopped.is_set():
                    return
                _log.warning("snapshot_store.accept_failed", exc_info=True)
                self._stopped.wait(0.1)  # most likely no file descriptor is free
                continue
            thread = threading.Thread(target=self._serve, args=(sock,), name="snapshot-serve", daemon=True)
            self._threads.add(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        check = partial(self._raise_if_stopped, time.monotonic() + _PROOF_S)
        try:
            with Wire(sock, check=check, patience_s=_PROOF_S) as wire:
                wire.challenge(self._key)
                wire.set_limits(self._raise_if_stopped, patience_s=_PATIENCE_S)
                while True:
                    self._answer(wire, wire.receive_message(Request))
        except OSError as error:  # the client closed it, died, or does not belong to this attempt
            _log.debug("snapshot_store.connection_ended", extra={"error": str(error)})
        except Exception:  # the boundary of the thread: a bug must not look like a dead node
            _log.exception("snapshot_store.request_failed")
        finally:
            self._threads.discard(threading.current_thread())
            self._free_connections.release()

    def _answer(self, wire: Wire, request: Request) -> None:
        if request.verb is Verb.PUT:
            self._receive_copy(wire, request.part, request.keep_step)
            return
        requested = request.part
        with self._registry.open_part(requested.generation, requested.rank, requested.step) as stored_part:
            if stored_part is None:
                wire.send_message(Answer(ok=False, why="it no longer exists, or is not complete"))
            elif request.verb is Verb.FIND:
                _send_description(wire, stored_part)
            elif stored_part.header.sequence != requested.sequence:
                wire.send_message(Answer(ok=False, why="it was overwritten"))
            elif request.verb is Verb.UNCHANGED:
                wire.send_message(Answer())
            elif any(offset + count > stored_part.header.num_bytes for offset, count in request.ranges):
                wire.send_message(Answer(ok=False, why="the requested range exceeds its payload"))
            else:
                wire.send_message(Answer())
                _send_ranges(wire, stored_part, request.ranges)

    def _receive_copy(self, wire: Wire, part: Part, keep_step: int | None) -> None:
        start_s = time.thread_time()
        regions = Regions.lay_out(index_bytes=part.index_bytes, extra_room=part.extra_bytes, num_bytes=part.num_bytes)
        try:
            slot = self._buddies.acquire(regions, generation=part.generation, rank=part.rank, keep_step=keep_step)
        except (SharedMemoryFull, OutdatedCopy) as error:
            wire.send_message(Answer(ok=False, why=str(error)))
            return
        try:
            wire.send_message(Answer())
            memory = memoryview(slot.map)
            for offset, count in (
                (regions.index_offset, part.index_bytes),
                (regions.extra_offset, part.extra_bytes),
                (regions.payload_offset, part.num_bytes),
            ):
                wire.receive_into(memory[offset : offset + count])
            stamp = Stamp(part.generation, part.rank, part.world_size, part.step)
            slot.finish(regions, stamp, num_extra_bytes=part.extra_bytes)
        finally:
            self._buddies.release(slot)
        wire.send_message(Answer(cpu_s=time.thread_time() - start_s))

    def _raise_if_stopped(self, proof_due_mono: float = math.inf) -> None:
        """Raise ConnectionAbortedError if the store closes, or if the client has not proved in time that it knows the
        key. A byte now and then does not extend that time."""
        if self._stopped.is_set():
            raise ConnectionAbortedError("this process is closing its snapshot store")
        if time.monotonic() > proof_due_mono:
            raise ConnectionAbortedError(f"the client did not prove within {_PROOF_S:g} s that it knows the key")


def _send_description(wire: Wire, stored_part: OpenPart) -> None:
    description = stored_part.read_description()
    if description is None:
        wire.send_message(Answer(ok=False, why="it is being overwritten"))
        return
    wire.send_message(Answer(part=Part.from_header(stored_part.header)))
    wire.send_all([memoryview(document) for document in description])


def _send_ranges(wire: Wire, part: OpenPart, ranges: Iterable[tuple[int, int]]) -> None:
    buffer = memoryview(bytearray(_READ_BYTES))
    filled = 0
    for offset, count in ranges:
        position, end = part.header.payload_offset + offset, part.header.payload_offset + offset + count
        while position < end:
            count_read = os.preadv(part.fd, [buffer[filled : filled + min(end - position, CHUNK_BYTES)]], position)
            if not count_read:
                raise ConnectionError("the slot is shorter than its header says")
            position += count_read
            filled += count_read
            if filled == len(buffer):
                wire.send(buffer)
                filled = 0
    wire.send(buffer[:filled])
