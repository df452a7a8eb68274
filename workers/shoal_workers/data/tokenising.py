"""Encodes documents in processes of its own, as many as there are cores; their order is that of the documents.

    documents  d0 d1 d2 d3 d4 ...      batches of about 256 KiB, at most two per process under way
                |  |  |
    process 1  [d0] [d3]               a thread of this process sends a batch and waits for its answer
    process 2  [d1]    [d4]
    process 3  [d2] ...
                |  |  |
    encoded    d0 d1 d2 d3 d4 ...      as one process would have made them

Hidden here: the processes, and that one may be lost. They are programs of their own instead of forks, because this
process has threads; processes instead of threads, because making Python objects of tokens needs the interpreter's lock.
A process that cannot start, is killed, or raises costs nothing but its speed: this process encodes its batch, and meets
the same error if the text is to blame. Called by `prepare`; `main` runs in the processes.
"""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import TracebackType

from shoal_workers.data.documents import Document
from shoal_workers.data.errors import DataError
from shoal_workers.data.tokenizer import DocumentEncoder, EncodedDocument, EncodedText

_Batch = Sequence[Document] | DataError
_BATCH_BYTES = 256 * 1024
_BATCHES_PER_PROCESS = 2
_SOURCES = Path(__file__).parents[2]
_PROGRAM = "import sys; sys.path.append(sys.argv[1]); from shoal_workers.data.tokenising import main; main()"
_LOST = (OSError, EOFError, pickle.UnpicklingError)
_END_S = 5.0


class TokenisingProcesses:
    """Context manager: `num` processes, which live as long as the context.

    Args:
        encoder: each process gets a copy; used for batches that a process did not answer.
    """

    def __init__(self, encoder: DocumentEncoder, num: int) -> None:
        self._encoder = encoder
        self._num = num
        self._all: list[_Process] = []
        self._free: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(num, thread_name_prefix="shoal-tokenise")
        self.num_encoded_here = 0
        """Documents that this process encoded itself."""

    def __enter__(self) -> TokenisingProcesses:
        encoder = pickle.dumps(self._encoder)
        for _ in range(self._num):
            process = _Process(encoder)
            self._all.append(process)
            self._free.put(process)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self._all:
            process.end()
        self._threads.shutdown(cancel_futures=True)
        for process in self._all:
            process.pipe.close()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._all if process.is_alive]

    def encode_all(self, documents: Iterable[Document]) -> Iterator[EncodedDocument]:
        """Encode as `DocumentEncoder.encode_all` does, and read a few batches ahead. An error of `documents` is
        raised in its place, after the documents before it."""
        under_way: deque[tuple[_Batch, Future[list[EncodedText]]]] = deque()
        for batch in _batches(documents):
            under_way.append((batch, self._threads.submit(self._encode, batch)))
            if len(under_way) == _BATCHES_PER_PROCESS * self._num:
                yield from _finished(*under_way.popleft())
        for batch, answer in under_way:
            yield from _finished(batch, answer)

    def _encode(self, batch: _Batch) -> list[EncodedText]:
        """Run on a thread of the pool."""
        if isinstance(batch, DataError):
            raise batch
        process = self._free.get()
        try:
            answer = process.encode(batch)
        finally:
            self._free.put(process)
        if answer is None:
            self.num_encoded_here += len(batch)
            return [self._encoder.encode(document) for document in batch]
        return answer


def _finished(batch: _Batch, answer: Future[list[EncodedText]]) -> Iterator[EncodedDocument]:
    texts = answer.result()  # raises a batch that is an error
    assert not isinstance(batch, DataError)
    for document, text in zip(batch, texts, strict=True):
        yield EncodedDocument(text, document.end)


class _Process:
    """One process; used by one thread at a time."""

    def __init__(self, encoder: bytes) -> None:
        self._first = encoder
        """What it needs before the first batch."""
        self.pipe, its_end = Pipe()
        with its_end:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, str(_SOURCES), str(its_end.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[its_end.fileno()],
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def encode(self, batch: Sequence[Document]) -> list[EncodedText] | None:
        """Return None if the process has ended."""
        try:
            if self._first:
                self.pipe.send_bytes(self._first)
                self._first = b""
            self.pipe.send(batch)
            answer: list[EncodedText] = self.pipe.recv()
        except _LOST:
            self.end()
            return None
        return answer

    def end(self) -> None:
        """Called from any thread; a thread that waits for an answer gets none."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)


def _batches(documents: Iterable[Document]) -> Iterator[_Batch]:
    """The last one may be an error of `documents`."""
    batch: list[Document] = []
    num_bytes = 0
    failed: list[DataError] = []
    try:
        for document in documents:
            batch.append(document)
            num_bytes += len(document.text)
            if num_bytes >= _BATCH_BYTES:
                yield batch
                batch, num_bytes = [], 0
    except DataError as error:
        failed.append(error)
    if batch:  # what was read before the error comes first
        yield batch
    yield from failed


_NICENESS = 5
"""A third of the share of a training process: other jobs of the node train on the same cores."""


def main() -> None:
    """Receive an encoder, and encode what follows it, until the process that started this one ends."""
    os.nice(_NICENESS)
    pipe: Connection = Connection(int(sys.argv[2]))
    try:
        encoder: DocumentEncoder = pipe.recv()  # both ends belong to the process that started this one
        while True:
            pipe.send([encoder.encode(document) for document in pipe.recv()])
    except (EOFError, ConnectionError):  # the kernel closes the pipe also when the other process is killed
        os._exit(0)  # nothing is left to flush, and no process to answer to
