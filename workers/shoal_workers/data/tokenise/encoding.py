"""The tokens of one document, and its split: a function of its text, the tokenizer and the settings alone.

So documents can be encoded in any process and in any order. Called by `prepare` and by `child`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal_workers.data.documents import Document, Position
from shoal_workers.data.index import Split
from shoal_workers.data.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EncodedText:
    """What a document becomes."""

    tokens: NDArray[Any]
    """In the dtype of the shards; with the end of the document, if the vocabulary has one."""
    split: Split


@dataclass(frozen=True, slots=True)
class EncodedDocument:
    """The same, and where the next document begins."""

    text: EncodedText
    end: Position


class DocumentEncoder:
    """Encodes documents with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, validation_fraction: float) -> None:
        self.tokenizer = tokenizer
        self.validation_fraction = validation_fraction
        self._dtype = token_dtype(tokenizer.vocab_size)

    def encode(self, document: Document) -> EncodedText:
        body = self.tokenizer.encode(document.text)
        end = self.tokenizer.end_of_document
        closes = document.ends_file and end is not None
        tokens = np.empty(len(body) + closes, dtype=self._dtype)
        tokens[: len(body)] = body
        if closes:
            tokens[-1] = end
        return EncodedText(tokens, split_of(document.text, self.validation_fraction))

    def encode_all(self, documents: Iterable[Document]) -> Iterator[EncodedDocument]:
        """One after the other, in this process."""
        for document in documents:
            yield EncodedDocument(self.encode(document), document.end)


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest unsigned integer type that holds every token; little-endian on every machine."""
    return np.dtype("<u1" if vocab_size <= 1 << 8 else "<u2" if vocab_size <= 1 << 16 else "<u4")


def split_of(text: bytes, validation_fraction: float) -> Split:
    """Depends only on the hash of the text, so renaming and reordering do not change it, nor do equal texts differ."""
    share = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) / 2**64
    return Split.VALIDATION if share < validation_fraction else Split.TRAIN


class Lookahead:
    """Documents of which the next one can be seen before it is taken: one that fits into no shard begins the next."""

    def __init__(self, documents: Iterator[EncodedDocument]) -> None:
        self._documents = documents
        self._next: EncodedDocument | None = None

    def peek(self) -> EncodedDocument | None:
        """None: there are no more."""
        if self._next is None:
            self._next = next(self._documents, None)
        return self._next

    def take(self) -> None:
        """After `peek`: go on to the next one."""
        self._next = None
