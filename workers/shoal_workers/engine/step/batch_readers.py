"""Processes that read a task's micro-batches ahead of the training thread, and what they have read.

    prepare         fork n readers, after the task has opened its data and before there is a model or a group
    a generation    BatchReaders.stream   requests in the order of the steps, at most n x prefetch_factor ahead
    a reader        request: split, indices, seed    ->    the collated batch, and the state of the generators

The samples, their order and their random numbers are those of reading on the training thread, bit for bit: a request
names its samples and its seed, and whoever reads leaves the generators as reading leaves them. Since the model is built
after the fork, a reader holds no copy of it, however much of it changes, and no socket of a group.

What goes wrong in a reader never ends a job by itself: the training thread reads that micro-batch again. If that
raises, it does so with the task's own traceback; if it does not, a remark in the log says what the reader met. Tensors
arrive through shared memory, as those of a DataLoader. Called by `TaskProgram` and `Batches`; training thread only.
"""

from __future__ import annotations

import gc
import itertools
import pickle
import queue
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

from shoal_workers.contract.plain_text import text_of
from shoal_workers.engine.process.data_processes import CONTEXT
from shoal_workers.engine.randomness import generator_states, seed_everything, set_generator_states
from shoal_workers.engine.task.task import LoadedTask

_CHECK_S = 0.25
"""A rank that waits for data looks this often whether its group is over."""
_ENDED_S = 1.0
Key = tuple[int, int]
"""Completed steps before it, and the micro-batch's index; of a validation 0 and the position of its first sample."""


@dataclass(frozen=True, slots=True)
class Request:
    """One micro-batch."""

    key: Key
    indices: tuple[int, ...]
    seed: int
    """The generators have it when the first sample is read."""


@dataclass(frozen=True, slots=True)
class _Order:
    stream: int
    number: int
    split: str
    request: Request


@dataclass(frozen=True, slots=True)
class _Read:
    stream: int
    number: int
    batch: Any = None
    states: Tensor | None = None
    """None if nothing was drawn."""
    failed: str = ""


@dataclass(slots=True)
class _Reader:
    process: BaseProcess
    connection: Connection
    asked: deque[tuple[int, int]]
    """Stream and number of what it has not answered yet, in its order."""


class BatchReaders:
    """The readers of one worker process."""

    def __init__(self, task: LoadedTask, num_workers: int, prefetch_factor: int, remark: Callable[[str], None]) -> None:
        """Forks them. `remark` is called with sentences for the job's log."""
        self.remark = remark
        self._most_ahead = num_workers * prefetch_factor
        self._numbers = itertools.count()
        self._streams: dict[int, Stream] = {}
        self._readers: list[_Reader] = []
        for _ in range(num_workers):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_serve, args=(theirs, task), name="shoal-data", daemon=True)
            process.start()
            theirs.close()
            self._readers.append(_Reader(process, ours, deque()))

    @property
    def pids(self) -> list[int]:
        return [reader.process.pid or 0 for reader in self._readers]

    def stream(self, split: str, requests: Callable[[Key], Iterator[Request]], check: Callable[[], None]) -> Stream:
        """What is read of a split from now on; the stream of the split that was opened before ends.

        Args:
            split: "train" or "validation".
            requests: all requests from a key on, in the order in which they will be asked for.
            check: raises if the group is over.
        """
        for number in [number for number, other in self._streams.items() if other.split == split]:
            del self._streams[number]
        number = next(self._numbers)
        self._streams[number] = stream = Stream(self, number, split, requests, check, self._most_ahead)
        return stream

    def close(self) -> None:
        """Ends the processes, also in the middle of a sample."""
        for reader in self._readers:
            reader.process.kill()
            reader.connection.close()
        for reader in self._readers:
            reader.process.join()
        self._readers = []

    def ask(self, order: _Order) -> bool:
        """Returns False if there is no reader."""
        while self._readers:
            reader = min(self._readers, key=lambda reader: len(reader.asked))
            try:
                reader.connection.send(order)
            except OSError:
                self._lose(reader)
                continue
            reader.asked.append((order.stream, order.number))
            return True
        return False

    def receive(self) -> None:
        """Waits a moment for answers, and hands them to their streams."""
        by_connection = {reader.connection: reader for reader in self._readers}
        for ready in wait(list(by_connection), _CHECK_S):
            reader = by_connection[ready]  # type: ignore[index]
            try:
                read: _Read = reader.connection.recv()
            except (EOFError, OSError, pickle.UnpicklingError, RuntimeError) as error:
                # Tensors come from the reader's own server of file descriptors, which may be gone.
                self._lose(reader, error)
                continue
            reader.asked.popleft()
            self._hand(read)

    def _hand(self, read: _Read) -> None:
        if stream := self._streams.get(read.stream):
            stream.arrived[read.number] = read

    def _lose(self, reader: _Reader, error: Exception | None = None) -> None:
        self._readers.remove(reader)
        reader.connection.close()
        reader.process.join(_ENDED_S)
        code = reader.process.exitcode
        reader.process.kill()
        how = f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"
        self.remark(
            f"a process that reads data ahead (batch.num_workers) has ended with {how}"
            f"{f' ({error})' if error is not None and str(error) else ''}. "
            + (
                f"{len(self._readers)} of them read on. "
                if self._readers
                else "None is left, so the training thread reads. "
            )
            + "Signal 9 is that of a lack of memory, signal 7 that of a full /dev/shm."
        )
        for stream, number in reader.asked:
            self._hand(_Read(stream, number, failed=_LOST))


_LOST = "its process has ended"


class Stream:
    """What is read ahead of one split in one generation."""

    def __init__(
        self,
        readers: BatchReaders,
        number: int,
        split: str,
        requests: Callable[[Key], Iterator[Request]],
        check: Callable[[], None],
        most_ahead: int,
    ) -> None:
        self.split = split
        self.arrived: dict[int, _Read] = {}
        self._readers = readers
        self._number = number
        self._requests = requests
        self._check = check
        self._most_ahead = most_ahead
        self._coming: Iterator[Request] = iter(())
        self._numbers = itertools.count()
        self._pending: deque[tuple[int, Key]] = deque()
        self._newest: Key | None = None
        """The newest of all that was asked for."""
        self._noted = False

    def get(self, key: Key) -> tuple[Any] | None:
        """The batch, with the generators as reading leaves them; None if the training thread has to read it.

        That is so for what is read a second time, out of order, or what a reader could not read.
        """
        if not self._readers.pids:
            return None
        if not any(pending == key for _, pending in self._pending) and not self._begin(key):
            return None
        while self._pending[0][1] != key:
            self._await(self._pending.popleft()[0])
        number, _ = self._pending.popleft()
        self._fill()
        read = self._await(number)
        if read.failed:
            self._note(read.failed)
            return None
        if read.states is not None:
            set_generator_states(read.states)
        return (read.batch,)

    def _begin(self, key: Key) -> bool:
        """Asks from a key on. Returns False if it was asked for before, or is none of this rank."""
        if self._pending and self._newest is not None and key <= self._newest:
            return False
        while self._pending:
            self._await(self._pending.popleft()[0])
        coming = self._requests(key)
        first = next(coming, None)
        if first is None or first.key != key:
            return False
        self._coming = itertools.chain((first,), coming)
        self._fill()
        return bool(self._pending)

    def _fill(self) -> None:
        while len(self._pending) < self._most_ahead and (request := next(self._coming, None)) is not None:
            number = next(self._numbers)
            if not self._readers.ask(_Order(self._number, number, self.split, request)):
                self._coming = itertools.chain((request,), self._coming)
                return
            self._pending.append((number, request.key))
            self._newest = request.key

    def _await(self, number: int) -> _Read:
        while number not in self.arrived:
            self._check()
            self._readers.receive()
        return self.arrived.pop(number)

    def _note(self, failed: str) -> None:
        if failed != _LOST and not self._noted:
            self._noted = True
            self._readers.remark(
                f"a process that reads data ahead (batch.num_workers) could not read a micro-batch: {failed}. The "
                "training thread reads it instead. What the samples and collate need must be there before build_model "
                "is called."
            )


def _serve(connection: Connection, task: LoadedTask) -> None:
    """Runs in a reader until it is killed, or its rank closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the rank ends this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.freeze()  # a collection would write to the pages of all objects, and so copy them
    torch.set_num_threads(1)
    orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
    # A thread takes the orders out of the pipe, so a rank that sends never waits for a reader that sends.
    threading.Thread(target=_take, args=(connection, orders), name="shoal-data-orders", daemon=True).start()
    while (order := orders.get()) is not None:
        read = _read(task, order)
        try:
            content = ForkingPickler.dumps(read)
        except Exception as error:
            failed = f"it cannot be sent to the training thread ({text_of(error)})"
            content = ForkingPickler.dumps(_Read(order.stream, order.number, failed=failed))
        try:
            connection.send_bytes(content)
        except OSError:
            return


def _take(connection: Connection, orders: queue.SimpleQueue[_Order | None]) -> None:
    try:
        while True:
            orders.put(connection.recv())
    except (EOFError, OSError):
        orders.put(None)


def _read(task: LoadedTask, order: _Order) -> _Read:
    data = task.validation_data if order.split == "validation" else task.train_data
    assert data is not None
    request = order.request
    try:
        seed_everything(request.seed)
        before = generator_states()
        batch = task.collate([data[index] for index in request.indices])
        after = generator_states()
    except Exception as error:
        return _Read(order.stream, order.number, failed=f"{type(error).__name__}: {text_of(error)}")
    return _Read(order.stream, order.number, batch, None if torch.equal(before, after) else after)
