"""Serves the parts in this node's memory to processes of other nodes, and receives their copies.

    accept thread ---> one thread per connection, at most MAX_CONNECTIONS: proof of the key, then requests, until the
                       client closes the connection
    kernel             further connections wait in the listener's queue, in the order in which they came

A client that hangs, sends nonsense or is cut off occupies one of these threads for a few seconds and does no other
harm: every wait is limited, nothing is unpickled, every message is validated, and a copy is complete only after its
last byte. Started and closed by the snapshot store.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterable

from shoal_workers.contract.snapshots import SnapshotPart
from shoal_workers.snapshot_store.slots.buddy_slots import BuddySlots, OutdatedCopy
from shoal_workers.snapshot_store.slots.registry import OpenPart, SlotRegistry
from shoal_workers.snapshot_store.slots.slot_files import Regions, Stamp
from shoal_workers.snapshot_store.snapshot_errors import SharedMemoryFull
from shoal_workers.snapshot_store.transfer.requests import Answer, Part, Request, Verb
from shoal_workers.snapshot_store.transfer.wire import CHUNK_BYTES, Wire

MAX_CONNECTIONS = 64
_MAX_QUEUED = 4096
"""Linux allows no more unless net.core.somaxconn was raised."""
_PROOF_S = 2.0
_PATIENCE_S = 10.0
_READ_BYTES = 1 << 20
"""Ranges are gathered in a buffer of this size, small enough to stay in the processor's cache."""

_log = logging.getLogger(__name__)


class PartServer:
    """Listens from its construction on; its threads are daemons."""

    def __init__(self, registry: SlotRegistry, buddies: BuddySlots, *, key: str, host: str) -> None:
        self._registry = registry
        self._buddies = buddies
        self._key = key
        self._stopped = threading.Event()
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._threads: set[threading.Thread] = set()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_MAX_QUEUED)
        self.port: int = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, name="snapshot-accept", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Returns when every thread has ended."""
        self._stopped.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._accepting.join()
        self._listener.close()
        for thread in tuple(self._threads):
            thread.join()

    def _accept(self) -> None:
        while True:
            self._free.acquire()
            try:
                sock, _ = self._listener.accept()
            except OSError:
                self._free.release()
                if self._stopped.is_set():
                    return
                _log.warning("snapshot_store.accept_failed", exc_info=True)
                self._stopped.wait(0.1)  # most likely no file descriptor is free
                continue
            thread = threading.Thread(target=self._serve, args=(sock,), name="snapshot-serve", daemon=True)
            self._threads.add(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            with Wire(sock, check=_Deadline(self._stopped), patience_s=_PROOF_S) as wire:
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
            self._free.release()

    def _answer(self, wire: Wire, request: Request) -> None:
        if request.verb is Verb.PUT:
            self._receive_copy(wire, request.part, request.keep_step)
            return
        wanted = request.part
        with self._registry.open_part(wanted.generation, wanted.rank, wanted.step) as stored_part:
            if stored_part is None:
                wire.send_message(Answer(ok=False, why="it no longer exists, or is not complete"))
            elif request.verb is Verb.FIND:
                _describe(wire, stored_part)
            elif stored_part.header.sequence != wanted.sequence:
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
        regions = Regions.of(index_bytes=part.index_bytes, extra_room=part.extra_bytes, num_bytes=part.num_bytes)
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

    def _raise_if_stopped(self) -> None:
        if self._stopped.is_set():
            raise ConnectionAbortedError("this process is closing its snapshot store")


class _Deadline:
    """Cuts off a client that has not proved in time that it knows the key, even if it sends a byte now and then."""

    def __init__(self, stopped: threading.Event) -> None:
        self._stopped = stopped
        self._until = time.monotonic() + _PROOF_S

    def __call__(self) -> None:
        if self._stopped.is_set() or time.monotonic() > self._until:
            raise ConnectionAbortedError(f"the client did not prove within {_PROOF_S:g} s that it knows the key")


def snapshot_parts_of(registry: SlotRegistry, node_id: str) -> tuple[SnapshotPart, ...]:
    """Returns every complete part in this node's memory, each once, sorted by generation, step and rank."""
    parts = {
        SnapshotPart(
            generation=header.generation,
            rank=header.rank,
            world_size=header.world_size,
            step=header.step,
            num_bytes=header.num_bytes,
            node_id=node_id,
        )
        for _, header in registry.parts()
    }
    return tuple(sorted(parts, key=lambda part: (part.generation, part.step, part.rank)))


def _describe(wire: Wire, stored_part: OpenPart) -> None:
    header = stored_part.header
    index = os.pread(stored_part.fd, header.index_bytes, header.index_offset)
    extra = os.pread(stored_part.fd, header.extra_bytes, header.extra_offset)
    if not stored_part.is_unchanged():
        wire.send_message(Answer(ok=False, why="it is being overwritten"))
        return
    part = Part(
        generation=header.generation,
        rank=header.rank,
        world_size=header.world_size,
        step=header.step,
        num_bytes=header.num_bytes,
        index_bytes=header.index_bytes,
        extra_bytes=header.extra_bytes,
        sequence=header.sequence,
    )
    wire.send_message(Answer(part=part))
    wire.send(index)
    wire.send(extra)


def _send_ranges(wire: Wire, part: OpenPart, ranges: Iterable[tuple[int, int]]) -> None:
    buffer = memoryview(bytearray(_READ_BYTES))
    filled = 0
    for offset, count in ranges:
        position, end = part.header.payload_offset + offset, part.header.payload_offset + offset + count
        while position < end:
            got = os.preadv(part.fd, [buffer[filled : filled + min(end - position, CHUNK_BYTES)]], position)
            if got == 0:
                raise ConnectionError("the slot is shorter than its header says")
            position += got
            filled += got
            if filled == len(buffer):
                wire.send(buffer)
                filled = 0
    wire.send(buffer[:filled])
