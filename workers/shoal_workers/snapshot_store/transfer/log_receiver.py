"""The buddy's side of a gradient log: one connection, from its opening until the partner closes it or dies.

    Request(LOG), head  ->  Answer
    gradients           ->  Answer          stored in a slot that is not complete yet
    commit              ->  Answer          the entry is complete: its step can be replayed
    abort               ->                  the vote refused the step

Nothing is replayed here, unless there is no slot for the next entry: then the oldest entries are replayed, which makes
them unnecessary. Called by the server, on the thread of the connection;
apart from it, because it is the other side of log_sender.py, and only a CPU has a log.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from shoal_workers.snapshot_store.log.comparison import Comparison
from shoal_workers.snapshot_store.log.entry_slots import EntrySlots
from shoal_workers.snapshot_store.log.records import LogHead, platform
from shoal_workers.snapshot_store.log.replay import Replayer, ReplayFailed
from shoal_workers.snapshot_store.slots.buddy_slots import BuddySlots, OutdatedCopy
from shoal_workers.snapshot_store.slots.slot import Regions, SlotFile, Stamp
from shoal_workers.snapshot_store.snapshot_errors import SharedMemoryFull
from shoal_workers.snapshot_store.transfer.requests import Answer, LogKind, LogMessage, Part
from shoal_workers.snapshot_store.transfer.wire import CHUNK_BYTES, Wire

_IDLE_S = 24 * 3600.0
"""A step may take long. A partner that is gone closes the connection; one that is cut off is outdated sooner."""
_ELEMENT_BYTES = 4


class LogReceiver:
    """Any number of threads, each with its own connection."""

    def __init__(self, entries: EntrySlots, buddies: BuddySlots, replayer: Replayer, comparison: Comparison) -> None:
        self.entries = entries
        self.buddies = buddies
        self.replayer = replayer
        self.comparison = comparison

    def receive(self, wire: Wire, part: Part, check: Callable[[], None], *, patience_s: float) -> None:
        """Returns when the log was refused. Raises OSError when the connection ends."""
        data = wire.receive(part.index_bytes)
        try:
            head = LogHead.model_validate_json(data)
        except ValueError:
            raise ConnectionError("the log has no valid head") from None
        log = _Log(self, part, head, data)
        why = log.refusal()
        if why:
            wire.send_message(Answer(ok=False, why=why))
            return
        wire.send_message(Answer())

        def check_log() -> None:
            check()
            if self.entries.is_outdated(part.generation):
                raise ConnectionAbortedError(f"the log of generation {part.generation} is over")

        try:
            while True:
                wire.set_limits(check_log, patience_s=_IDLE_S)
                message = wire.receive_message(LogMessage)
                wire.set_limits(check_log, patience_s=patience_s)
                why = log.take(wire, message)
                if message.kind is not LogKind.ABORT:
                    wire.send_message(Answer(ok=not why, why=why, cpu_s=log.take_cpu_s()))
                    if why:
                        return
        finally:
            wire.set_limits(check, patience_s=patience_s)
            log.abort()


class _Log:
    """One open log, and the entry that waits for its commit."""

    def __init__(self, receiver: LogReceiver, part: Part, head: LogHead, data: bytes) -> None:
        self._entries = receiver.entries
        self._buddies = receiver.buddies
        self._replayer = receiver.replayer
        self._comparison = receiver.comparison
        self._part = part
        self._head = head
        self._data = data
        self._regions = Regions.of(
            index_bytes=len(data), extra_room=head.commit_room, num_bytes=head.num_elements * _ELEMENT_BYTES
        )
        self._slot: SlotFile | None = None
        self._num_bytes = 0
        """The bytes of the gradients in the entry."""
        self._cpu_s = time.thread_time()

    def refusal(self) -> str:
        """Why this log cannot be kept here; empty: it can."""
        if self._head.platform != platform():
            return f"the same bits need the same platform: {self._head.platform} there, {platform()} here"
        return ""

    def take(self, wire: Wire, message: LogMessage) -> str:
        """One message and what follows it. Returns why the log ends; empty: it goes on."""
        match message.kind:
            case LogKind.GRADIENTS:
                return self._take_gradients(wire, message)
            case LogKind.COMMIT:
                return self._take_commit(wire, message)
            case LogKind.ABORT:
                self.abort()
                return ""

    def take_cpu_s(self) -> float:
        """CPU seconds of this thread since the last call."""
        before, self._cpu_s = self._cpu_s, time.thread_time()
        return self._cpu_s - before

    def abort(self) -> None:
        if self._slot is not None:
            self._entries.release(self._slot)
            self._slot = None

    def _take_gradients(self, wire: Wire, message: LogMessage) -> str:
        self.abort()
        if message.num_bytes > self._regions.num_bytes:
            return _discard(wire, message, f"the gradients of step {message.step} take {message.num_bytes} bytes")
        try:
            slot = self._acquire()
        except OutdatedCopy as error:
            return _discard(wire, message, str(error))
        if slot is None:
            return _discard(wire, message, f"no shared memory for the entry of step {message.step}")
        self._slot, self._num_bytes, regions = slot, message.num_bytes, self._regions
        slot.map[regions.index_offset : regions.index_offset + regions.index_bytes] = self._data
        with memoryview(slot.map) as memory:
            wire.receive_into(memory[regions.payload_offset : regions.payload_offset + message.num_bytes])
        return ""

    def _take_commit(self, wire: Wire, message: LogMessage) -> str:
        slot, regions, part = self._slot, self._regions, self._part
        if slot is None:
            return _discard(wire, message, f"the gradients of step {message.step} are missing")
        if message.num_bytes > regions.extra_room:
            why = f"the commit of step {message.step} takes {message.num_bytes} bytes, more than were reserved"
            return _discard(wire, message, why)
        with memoryview(slot.map) as memory:
            wire.receive_into(memory[regions.extra_offset : regions.extra_offset + message.num_bytes])
        stamp = Stamp(part.generation, part.rank, part.world_size, message.step)
        slot.finish(replace(regions, num_bytes=self._num_bytes), stamp, num_extra_bytes=message.num_bytes)
        self.abort()  # it is complete, so this only releases it
        return ""

    def _acquire(self) -> SlotFile | None:
        generation, rank = self._part.generation, self._part.rank
        for is_last in (False, True):
            newest_copy = self._buddies.newest_step(generation, rank)
            if not is_last and self._comparison.needs_entries(generation, rank):
                newest_copy = None
            slot = self._entries.acquire(self._regions, generation=generation, rank=rank, newest_copy=newest_copy)
            if slot is not None or is_last:
                return slot
            newest = self._replayer.newest_step(generation, rank)
            try:
                if newest is None or not self._replayer.make(generation, rank, newest, keeps_copies=False):
                    return None
            except (ReplayFailed, SharedMemoryFull):
                return None
        return None


def _discard(wire: Wire, message: LogMessage, why: str) -> str:
    """Reads what follows the message: if it stayed unread, closing the connection would also discard the answer."""
    left = message.num_bytes
    memory = memoryview(bytearray(min(left, CHUNK_BYTES)))
    while left:
        count = min(left, len(memory))
        wire.receive_into(memory[:count])
        left -= count
    return why
