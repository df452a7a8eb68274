"""Sends snapshots to the buddy on a thread of its own, one at a time, and measures their cost.

A slot must not change until `on_end` was called for it: its bytes are sent from the pages that the training thread
wrote. They are sent from a map, not with sendfile, which takes as much CPU time of the sender, three times as much of
the receiver, and reaches half the speed. If the buddy does not answer, this copy is lost and training goes on: the
failure is logged, and the slot may be overwritten again. Called by the snapshot store.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from shoal_workers.contract.snapshots import SnapshotServer
from shoal_workers.snapshot_store.slots.slot_files import PartHeader
from shoal_workers.snapshot_store.transfer.wire import Part, Request, Verb, Wire, call, connect, receive_ok

_PATIENCE_S = 5.0
_BREAK_OFF_S = 0.5

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SendCost:
    """The cost of one copy to the buddy."""

    cpu_s: float
    """CPU time of the sender thread and of the buddy's receiving thread, kernel included."""
    wall_s: float
    num_bytes: int
    generation: int = 0
    step: int = 0
    """Generation and step of the snapshot."""


@dataclass(frozen=True, slots=True)
class Sending:
    """A complete slot, with a function to call before it is sent, and one to call when it may change again."""

    memory: memoryview
    header: PartHeader
    buddy: SnapshotServer
    on_start: Callable[[], None]
    on_end: Callable[[bool], None]
    """True: the buddy has a complete copy."""
    keep_step: int | None = None
    """An earlier step of which the buddy must not overwrite its copy."""


class Sender:
    """One thread, started at the first `offer`. `offer` and `close` are called from one thread."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot-send")
        self._sending: Future[None] | None = None
        self._costs: deque[SendCost] = deque()
        """Costs of completed copies, until they are taken."""
        self._stopped = False
        self._is_broken_off = False

    @property
    def is_busy(self) -> bool:
        return self._sending is not None and not self._sending.done()

    def offer(self, sending: Sending) -> None:
        """The sender must not be busy: asserted."""
        assert not self.is_busy
        self._is_broken_off = False
        self._sending = self._thread.submit(self._run, sending)

    def break_off(self) -> None:
        """Break off the copy that is being sent, because it is not needed any more. Return once it has ended, or
        after a moment."""
        self._is_broken_off = True
        if self._sending is not None:
            wait([self._sending], _BREAK_OFF_S)

    def take_cost(self) -> SendCost | None:
        """Cost of the last copy that was completed since the last call; None if none was."""
        cost = None
        while self._costs:
            cost = self._costs.popleft()
        return cost

    def close(self) -> None:
        """Break off the copy that is being sent."""
        self._stopped = True
        self._thread.shutdown()

    def _run(self, sending: Sending) -> None:
        cost = self._send(sending)
        sending.on_end(cost is not None)  # first: `OwnSlots.hand_over` asserts that nothing is sent
        if cost is not None:
            self._costs.append(cost)

    def _send(self, sending: Sending) -> SendCost | None:
        try:
            sending.on_start()
            wall, cpu = time.perf_counter(), time.thread_time()
            with connect(sending.buddy, self._key, check=self._raise_if_stopped, patience_s=_PATIENCE_S) as wire:
                buddy_s = put(wire, sending.memory, sending.header, keep_step=sending.keep_step)
        except Exception as error:  # the boundary of the thread: training goes on without a copy
            header = sending.header
            _log.warning(
                "snapshot_store.send_failed",
                extra={
                    "generation": header.generation,
                    "rank": header.rank,
                    "step": header.step,
                    "buddy": sending.buddy.node_id,
                    "error": f"{type(error).__name__}: {error}",
                },
            )
            return None
        return SendCost(
            cpu_s=time.thread_time() - cpu + buddy_s,
            wall_s=time.perf_counter() - wall,
            num_bytes=sending.header.num_bytes,
            generation=sending.header.generation,
            step=sending.header.step,
        )

    def _raise_if_stopped(self) -> None:
        if self._stopped:
            raise ConnectionAbortedError("this process is closing its snapshot store")
        if self._is_broken_off:
            raise ConnectionAbortedError("its generation is over")


def put(wire: Wire, memory: memoryview, header: PartHeader, *, keep_step: int | None = None) -> float:
    """Send the slot in `memory`. Return the buddy's CPU seconds once its copy is complete; OSError otherwise."""
    call(wire, Request(verb=Verb.PUT, part=Part.from_header(header), keep_step=keep_step))
    for offset, count in (
        (header.index_offset, header.index_bytes),
        (header.extra_offset, header.extra_bytes),
        (header.payload_offset, header.num_bytes),
    ):
        wire.send(memory[offset : offset + count])
    return receive_ok(wire).cpu_s
