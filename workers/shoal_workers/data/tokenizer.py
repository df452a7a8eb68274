"""From a document to tokens, and to its split: a function of its text, the tokenizer and the settings alone.

Hidden here: what a tokenizer is (one token per byte, or a trained one from a tokenizers JSON file; with settings beside
it transformers reads it, and decides), the type of a token, which token ends a document. Documents can be encoded in
any order and on any thread, and give the same tokens. Called by `prepare`, by the threads of `tokenising`, and by
tasks for the size of the vocabulary.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal_workers.contract.hugging_face import TOKENIZER_NAME
from shoal_workers.contract.text_data import BYTE_TOKENIZER, BYTE_VOCABULARY
from shoal_workers.data.documents import Document, Position
from shoal_workers.data.errors import TokenizerError

_END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")
"""For a tokenizer without files beside it that name the token."""
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")


class ByteTokenizer:
    """256 byte values, and 256 as the end of a document."""

    name = BYTE_TOKENIZER
    fingerprint = "bytes-v1"
    """Differs between tokenizers that may produce different tokens from the same text."""
    vocab_size = BYTE_VOCABULARY
    end_of_document: int | None = 256
    """The token that follows every document, if the vocabulary has one."""
    bytes_per_thread: int | None = None
    """Text for which one more thread that tokenises is worth its start. None: encoding takes less time than hashing
    and writing the tokens, and holds the interpreter's lock."""
    ends: tuple[tuple[int, ...], tuple[int, ...]] = ((), (BYTE_VOCABULARY - 1,))
    """The tokens that begin and end a text which is given to a model whole, such as [CLS] and [SEP]."""
    special_tokens = frozenset({BYTE_VOCABULARY - 1})
    """Tokens that are in no text."""

    def encode(self, text: bytes) -> NDArray[Any]:
        """Return the tokens of UTF-8 text, in any unsigned integer dtype."""
        return np.frombuffer(text, dtype=np.uint8)

    def encode_whole(self, text: str, max_tokens: int) -> list[int]:
        """Return the tokens of a text between those of `ends`, cut to `max_tokens` with these."""
        return [*text.encode()[: max_tokens - 1], BYTE_VOCABULARY - 1]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, for people."""
        marks = {BYTE_VOCABULARY - 1: b"<end>", BYTE_VOCABULARY: b"<mask>"}
        return b"".join(marks.get(token) or bytes([token]) for token in tokens).decode(errors="replace")

    def find_token(self, names: Sequence[str]) -> int | None:
        """Return the first of these tokens that the vocabulary has."""
        return None


_NUM_TRIED = 64


class JsonTokenizer:
    """A tokenizer of the `tokenizers` package, with the attributes and methods of ByteTokenizer."""

    bytes_per_thread: int | None = 1 << 20
    """A core encodes 1 to 4 MiB in a second."""

    def __init__(self, tokenizer: Any, fingerprint: str, settings: Any = None, directory: Path | None = None) -> None:
        """`settings`: a tokenizer of transformers, which may name the token that ends a document, and how texts are
        cut. `directory`: of the model's config, which may name that token, too."""
        self._tokenizer = tokenizer
        self._truncation_side = getattr(settings, "truncation_side", "right")
        self._splits_marks = bool(getattr(settings, "split_special_tokens", False))
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        by_name = self.find_token(_END_NAMES)
        end = getattr(settings, "eos_token_id", None)
        end = by_name if end is None else end
        self.end_of_document: int | None = _read_end_token(directory, self.vocab_size) if end is None else end
        changed = (self.end_of_document, self._truncation_side, self._splits_marks) != (by_name, "right", False)
        more = f"-{self.end_of_document}{'-left' * (self._truncation_side == 'left')}{'-split' * self._splits_marks}"
        self.fingerprint = f"{fingerprint}{more}" if changed else fingerprint

    @cached_property
    def ends(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        for word in ("a", *islice(self._tokenizer.get_vocab(), _NUM_TRIED)):
            try:
                whole, text = (self._tokenizer.encode(word, add_special_tokens=adds).ids for adds in (True, False))
            except Exception:  # the package raises bare Exception for a word that it does not know
                continue
            if text and self.special_tokens.isdisjoint(text):
                first = next(at for at in range(len(whole) + 1) if whole[at : at + len(text)] == text)
                return tuple(whole[:first]), tuple(whole[first + len(text) :])
        return (), ()

    @cached_property
    def special_tokens(self) -> frozenset[int]:
        return frozenset(
            token_id for token_id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        )

    def encode(self, text: bytes) -> NDArray[Any]:
        # this call releases the interpreter's lock, and finds no offsets, which saves a quarter of the time
        [encoding] = self._tokenizer.encode_batch_fast([text.decode()], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.uint32)

    def encode_whole(self, text: str, max_tokens: int) -> list[int]:
        self._tokenizer.enable_truncation(max_tokens, direction=self._truncation_side)
        tokens: list[int] = self._tokenizer.encode(text).ids[:max_tokens]
        self._tokenizer.no_truncation()
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def find_token(self, names: Sequence[str]) -> int | None:
        return next((token_id for name in names if (token_id := self._tokenizer.token_to_id(name)) is not None), None)


Tokenizer = ByteTokenizer | JsonTokenizer


def _read_end_token(directory: Path | None, vocab_size: int) -> int | None:
    """Return the token that ends a text, as the model's config.json names it; None if it names none."""
    try:
        stored = json.loads((directory / "config.json").read_bytes())["eos_token_id"] if directory else None
    except (OSError, ValueError, LookupError, TypeError):
        return None
    first = next(iter(stored), None) if isinstance(stored, list) else stored
    return first if isinstance(first, int) and first < vocab_size else None


def load_with_transformers(directory: Path) -> Any:
    """Load a directory's tokenizer with transformers. Raises TokenizerError if that fails."""
    try:
        from transformers import AutoTokenizer  # an optional extra, and slow to import
    except ImportError as error:
        raise TokenizerError(
            f"the tokenizer in {directory} needs transformers ({error}). Install it on every node: pip install "
            "'shoal[hf]'."
        ) from error
    try:
        loaded = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        loaded.backend_tokenizer.no_truncation()
        loaded.backend_tokenizer.no_padding()
    except Exception as error:  # the classes raise what they meet in the files
        raise TokenizerError(
            f"transformers cannot read the tokenizer in {directory}: {type(error).__name__}: {error}. Save it again "
            f"with save_pretrained, or name a {TOKENIZER_NAME} without other files beside it."
        ) from error
    return loaded


def load_tokenizer(name: str) -> Tokenizer:
    """Load the tokenizer that `data.tokenizer` names.

    Raises:
        TokenizerError: no such file, not a tokenizer, or the package that reads it is not installed.
    """
    if name == ByteTokenizer.name:
        return ByteTokenizer()
    path = Path(name).expanduser()
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise TokenizerError(
            f'data.tokenizer {name!r} cannot be read: {reason}. It must be "bytes" or the path of a tokenizers JSON '
            f"file that every node can read."
        ) from error
    try:
        import tokenizers  # an optional extra, and slow to import
    except ImportError as error:
        raise TokenizerError(
            f"data.tokenizer {name!r} needs the tokenizers package, which is not installed. "
            f"Install it on every node: pip install 'shoal[hf]'. Or set data.tokenizer: \"bytes\"."
        ) from error
    try:
        loaded = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the package raises bare Exception for a file that it does not understand
        raise TokenizerError(f"data.tokenizer {name!r} is not a tokenizers JSON file: {error}") from error
    fingerprint = hashlib.sha256(content).hexdigest()
    if loaded.truncation is not None or loaded.padding is not None:  # for single texts of some other program
        loaded.no_truncation()
        loaded.no_padding()
        fingerprint += "-whole"  # earlier releases cut every document
    if path.name != TOKENIZER_NAME or not any((path.parent / name).is_file() for name in _SETTINGS):
        return JsonTokenizer(loaded, fingerprint, directory=path.parent)
    settings = load_with_transformers(path.parent)
    backend = settings.backend_tokenizer
    if (text := backend.to_str()) != loaded.to_str():  # settings have changed tokens: case, marks, a prefix
        fingerprint = hashlib.sha256(text.encode()).hexdigest()
    return JsonTokenizer(backend, fingerprint, settings, path.parent)


class Split(StrEnum):
    TRAIN = "train"
    VALIDATION = "validation"


@dataclass(frozen=True, slots=True)
class EncodedText:
    tokens: NDArray[Any]
    """In the dtype of the shards, with the end of the document if the vocabulary has one."""
    split: Split


@dataclass(frozen=True, slots=True)
class EncodedDocument:
    text: EncodedText
    end: Position
    """The place at which the next document begins."""


class DocumentEncoder:
    def __init__(self, tokenizer: Tokenizer, validation_fraction: float) -> None:
        self.tokenizer = tokenizer
        self.validation_fraction = validation_fraction
        self._dtype = choose_token_dtype(tokenizer.vocab_size)

    def encode(self, document: Document) -> EncodedText:
        body = self.tokenizer.encode(document.text)
        end = self.tokenizer.end_of_document
        closes = document.closes and end is not None
        tokens = np.empty(len(body) + closes, dtype=self._dtype)
        tokens[: len(body)] = body
        if closes:
            tokens[-1] = end
        return EncodedText(tokens, choose_split(document.text, self.validation_fraction))

    def encode_all(self, documents: Iterable[Document]) -> Iterator[EncodedDocument]:
        """Encode the documents one after the other."""
        for document in documents:
            yield EncodedDocument(self.encode(document), document.end)


def choose_token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the smallest unsigned integer type that holds every token; little-endian on every machine."""
    return np.dtype("<u1" if vocab_size <= 1 << 8 else "<u2" if vocab_size <= 1 << 16 else "<u4")


def choose_split(text: bytes, validation_fraction: float) -> Split:
    """Choose by the text alone: renaming and reordering files move no document to the other split."""
    share = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) / 2**64
    return Split.VALIDATION if share < validation_fraction else Split.TRAIN


def mark_held_back(is_validation: Sequence[bool], has_validation_files: bool) -> NDArray[np.bool_]:
    """Return a flag for each example. If a fraction holds back all of a few examples, all are for training instead."""
    is_held_back = np.asarray(is_validation, np.bool_)
    return is_held_back & (has_validation_files or not is_held_back.all())


class Lookahead:
    """Documents of which the next one can be seen before it is taken: one that fits into no shard begins the next."""

    def __init__(self, documents: Iterator[EncodedDocument]) -> None:
        self._documents = documents
        self._next: EncodedDocument | None = None

    def peek(self) -> EncodedDocument | None:
        """Return None if there are no more."""
        if self._next is None:
            self._next = next(self._documents, None)
        return self._next

    def take(self) -> None:
        """Called after `peek`: go on to the next one."""
        self._next = None
