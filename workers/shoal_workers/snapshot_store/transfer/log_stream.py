"""A gradient log in transit, both sides of its connection. Only a CPU has a log.

    training thread   backward | append          | wait | vote | commit | update ...
    sender thread              | gradients, answer      |      | answer

    LogSender                       LogReceiver, on the buddy
    Request(LOG), head  ->  Answer
    gradients           ->  Answer  stored in a slot that is not complete yet
    commit              ->  Answer  the entry is complete: its step can be replayed
    abort               ->          the vote refused the step

Gradients are sent from the memory in which they are, so they must not change until `wait` has returned. A commit is
small. The training thread itself writes it into the connection: once `commit` has returned, the kernel delivers it even
if the process is killed. If the buddy does not answer or refuses an entry, the log is broken: `failure` says why, and
training goes on without it. A broken log stays so; the caller opens a new one.

The receiver replays nothing, unless there is no slot for the next entry: then the oldest entries are replayed, which
makes them unnecessary. The snapshot store makes the sender; the server calls the receiver on the connection's thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shoal_workers.contract.snapshots import SnapshotServer
from shoal_workers.snapshot_store.log.records import LogHead, platform
from shoal_workers.snapshot_store.log.replay import Comparison, Replayer, ReplayFailed
from shoal_workers.snapshot_store.slots.buddy_slots import BuddySlots, EntrySlots, OutdatedCopy
from shoal_workers.snapshot_store.slots.slot_files import Regions, SlotFile, Stamp
from shoal_workers.snapshot_store.snapshot_errors import SharedMemoryFull
from shoal_workers.snapshot_store.transfer.requests import Answer, LogKind, LogMessage, Part, Request, Verb, receive_ok
from shoal_workers.snapshot_store.transfer.wire import CHUNK_BYTES, SLICE_S, Wire, connect

_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class _Message:
    kind: LogKind
    step: int
    parts: tuple[memoryview, ...]
    is_written: bool = False
    """True if only its answer is missing."""

    @property
    def num_bytes(self) -> int:
        return sum(len(part) for part in self.parts)


class LogSender:
    """One log of one generation. All methods but those of its thread are called from the training thread."""

    def __init__(self, key: str, buddy: SnapshotServer, part: Part, head: bytes) -> None:
        """`part`: generation, rank, world size, and the step after which the log begins."""
        self._key = key
        self._buddy = buddy
        self._part = part.model_copy(update={"index_bytes": len(head)})
        self._head = head
        self._changed = threading.Condition()
        self._queue: deque[_Message] = deque()
        self._wire: Wire | None = None
        """The connection while the thread does not use it."""
        self._stopped = False
        self.start_step = part.step
        self.acknowledged = part.step
        """Every committed step up to this one can be replayed by the buddy, if it has a whole copy to start from."""
        self._failure = ""
        self._cpu_s = 0.0
        self.sent_bytes = 0
        """Gradients and commits."""
        self._thread = threading.Thread(target=self._run, name="snapshot-log", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> str:
        """Why the log is broken; empty: it is not."""
        with self._changed:
            return self._failure

    def append(self, step: int, parts: Sequence[memoryview]) -> None:
        """The gradients of a step; the memory must not change until `wait` has returned."""
        self._put(_Message(LogKind.GRADIENTS, step, tuple(parts)))

    def commit(self, step: int, blob: bytes) -> None:
        """Called after `wait`: the vote has accepted the step."""
        message = _Message(LogKind.COMMIT, step, (memoryview(blob),))
        with self._changed:
            # Written by the calling thread, so that the kernel has it before the update: it survives a kill of this
            # process.
            if self._wire is not None and not self._queue:
                try:
                    _write(self._wire, message)
                except OSError as error:
                    self._break(str(error))
                message = replace(message, is_written=True)
        self._put(message)

    def abort(self, step: int) -> None:
        """Called when the vote has refused the step: the buddy drops its entry."""
        self._put(_Message(LogKind.ABORT, step, ()))

    def wait(self, check: Callable[[], None], *, patience_s: float) -> None:
        """Returns when the buddy has all that was handed to the log, or the log is broken. Breaks it after
        `patience_s`."""
        give_up = time.monotonic() + patience_s
        while True:
            check()
            with self._changed:
                is_over = self._changed.wait_for(lambda: self._failure or self._is_idle, timeout=SLICE_S)
                if is_over:
                    return
                if time.monotonic() > give_up:
                    self._break(f"{self._buddy.node_id} did not answer within {patience_s:g} s")
                    return

    def take_cost(self) -> float:
        """CPU seconds of both sides since the last call."""
        with self._changed:
            cpu_s, self._cpu_s = self._cpu_s, 0.0
            return cpu_s

    def close(self) -> None:
        """Ends the thread after it has sent what was handed to it, but waits for it only a moment."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join(SLICE_S)

    @property
    def is_alive(self) -> bool:
        """True if its thread has not ended."""
        return self._thread.is_alive()

    def break_off(self) -> None:
        """Ends the thread at once."""
        self._break("this process is closing its snapshot store")
        self._thread.join()

    @property
    def _is_idle(self) -> bool:
        return self._wire is not None and not self._queue

    def _put(self, message: _Message) -> None:
        with self._changed:
            if not self._failure:
                self._queue.append(message)
                self._changed.notify_all()

    def _break(self, why: str) -> None:
        with self._changed:
            self._failure = self._failure or why
            self._queue.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            with connect(self._buddy, self._key, check=self._raise_if_broken, patience_s=_PATIENCE_S) as wire:
                wire.send_message(Request(verb=Verb.LOG, part=self._part))
                wire.send(self._head)
                receive_ok(wire)
                self._serve(wire)
        except Exception as error:  # the boundary of the thread: training goes on without a log
            self._break(str(error) or type(error).__name__)

    def _serve(self, wire: Wire) -> None:
        while True:
            with self._changed:
                self._wire = wire
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._stopped or self._failure or self._queue)
                if not self._queue:
                    return
                message = self._queue.popleft()
                self._wire = None
            cpu_s = time.thread_time()
            if not message.is_written:
                _write(wire, message)
            buddy_s = receive_ok(wire).cpu_s if message.kind is not LogKind.ABORT else 0.0
            with self._changed:
                if message.kind is LogKind.COMMIT:
                    self.acknowledged = message.step
                self._cpu_s += time.thread_time() - cpu_s + buddy_s
                self.sent_bytes += message.num_bytes

    def _raise_if_broken(self) -> None:
        if self._failure:
            raise ConnectionAbortedError(self._failure)


def _write(wire: Wire, message: _Message) -> None:
    wire.send_message(LogMessage(kind=message.kind, step=message.step, num_bytes=message.num_bytes))
    wire.send_all(message.parts)


_IDLE_S = 24 * 3600.0
"""A step may take long. A partner that is gone closes the connection; one that is cut off is outdated sooner."""
_ELEMENT_BYTES = 4


class LogReceiver:
    """Serves any number of threads, each with its own connection."""

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
        """Takes one message and what follows it. Returns why the log ends; empty: it goes on."""
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
