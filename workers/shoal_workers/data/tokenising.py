"""Encodes documents on several threads; their order is that of the documents.

    documents  d0 d1 d2 d3 d4 ...      batches of about 256 KiB, at most two per thread under way
                |  |  |
    thread 1   [d0] [d2]               the package tokenizers releases the interpreter's lock while it encodes
    thread 2   [d1] [d3] ...
                |  |  |
    encoded    d0 d1 d2 d3 d4 ...      as one thread would have made them

The threads have a lower priority than the process, because other jobs of the node train on the same cores. Called by
`prepare`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

from shoal_workers.data.documents import Document
from shoal_workers.data.errors import DataError
from shoal_workers.data.tokenizer import DocumentEncoder, EncodedDocument

_BATCH_BYTES = 256 * 1024
_BATCHES_PER_THREAD = 2
_NICENESS = 5
"""A third of the share of a training process."""
_PARALLELISM = "TOKENIZERS_PARALLELISM"


def encode_on_threads(
    encoder: DocumentEncoder, documents: Iterable[Document], num_threads: int
) -> Iterator[EncodedDocument]:
    """Encode as `DocumentEncoder.encode_all` does, and read a few batches ahead.

    An error of `documents` is raised in its place, after the documents before it.
    """
    under_way: deque[Future[list[EncodedDocument]]] = deque()
    lower_priority = partial(os.nice, _NICENESS)  # Linux has a priority for each thread
    with (
        _one_thread_per_call(),
        ThreadPoolExecutor(num_threads, thread_name_prefix="shoal-tokenise", initializer=lower_priority) as threads,
    ):
        for batch in _batches(documents):
            under_way.append(threads.submit(_encode, encoder, batch))
            if len(under_way) == _BATCHES_PER_THREAD * num_threads:
                yield from under_way.popleft().result()
        while under_way:
            yield from under_way.popleft().result()


@contextmanager
def _one_thread_per_call() -> Iterator[None]:
    """Let the package tokenizers start no threads of its own, unless the user has set how it does that."""
    is_set = _PARALLELISM in os.environ
    os.environ.setdefault(_PARALLELISM, "false")
    try:
        yield
    finally:
        if not is_set:
            del os.environ[_PARALLELISM]


def _encode(encoder: DocumentEncoder, batch: Sequence[Document] | DataError) -> list[EncodedDocument]:
    if isinstance(batch, DataError):
        raise batch
    return list(encoder.encode_all(batch))


def _batches(documents: Iterable[Document]) -> Iterator[Sequence[Document] | DataError]:
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
