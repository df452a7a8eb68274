"""The partner's side of a gradient log: a thread that sends gradients to the buddy, and waits for its answers.

    training thread   backward | append          | wait | vote | commit | update ...
    sender thread              | gradients, answer      |      | answer

Gradients are sent from the memory in which they are, so they must not change until `wait` has returned. A commit is
small. The training thread itself writes it into the connection: once `commit` has returned, the kernel delivers it even
if the process is killed. If the buddy does not answer or refuses an entry, the log is broken: `failure` says why, and
training goes on without it. A broken log stays so; the caller opens a new one. Called by the snapshot store.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shoal_workers.contract.snapshots import SnapshotServer
from shoal_workers.snapshot_store.transfer.requests import LogKind, LogMessage, Part, Request, Verb, receive_ok
from shoal_workers.snapshot_store.transfer.wire import SLICE_S, Wire, connect

_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class _Message:
    kind: LogKind
    step: int
    parts: tuple[memoryview, ...]
    is_written: bool = False
    """Only its answer is missing."""

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
        """After `wait`: the vote has accepted the step."""
        message = _Message(LogKind.COMMIT, step, (memoryview(blob),))
        with self._changed:
            if self._wire is not None and not self._queue:
                try:
                    _write(self._wire, message)
                except OSError as error:
                    self._break(str(error))
                message = replace(message, is_written=True)
        self._put(message)

    def abort(self, step: int) -> None:
        """The vote has refused the step."""
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
        """Its thread has not ended."""
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
