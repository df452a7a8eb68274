"""Tokens take the smallest dtype, splits follow the text alone, files are whole or absent."""

import hashlib
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_workers.data.corpus import ShardEntry, Written, file_crc32, load_entry, write_durably, write_shard
from shoal_workers.data.documents import Document, Position
from shoal_workers.data.tokenizer import ByteTokenizer, DocumentEncoder, Lookahead, Split, split_of, token_dtype


def _documents(*texts: bytes) -> list[Document]:
    ends = np.cumsum([len(text) for text in texts])
    return [
        Document(text, True, Position(file=n + 1, text_bytes=int(end)))
        for n, (text, end) in enumerate(zip(texts, ends, strict=True))
    ]


@pytest.mark.parametrize(("vocab", "dtype"), [(256, "u1"), (257, "u2"), (65_536, "u2"), (65_537, "u4")])
def test_the_dtype_is_the_smallest_that_holds_the_vocabulary(vocab: int, dtype: str) -> None:
    assert token_dtype(vocab) == np.dtype(f"<{dtype}")


@given(st.binary(min_size=1), st.floats(0, 0.999))
def test_the_split_is_a_function_of_the_text_and_grows_with_the_fraction(text: bytes, fraction: float) -> None:
    assert split_of(text, fraction) == split_of(text, fraction)
    assert split_of(text, 0.0) is Split.TRAIN
    if split_of(text, fraction) is Split.VALIDATION:
        assert split_of(text, 0.9999999999) is Split.VALIDATION


def test_about_the_requested_share_of_documents_is_for_validation() -> None:
    num_validation = sum(split_of(b"document %d" % n, 0.05) is Split.VALIDATION for n in range(10_000))
    assert 400 < num_validation < 600


def _write(path: Path, *texts: bytes, max_bytes: int = 1 << 20, fraction: float = 0.0) -> ShardEntry:
    documents = Lookahead(DocumentEncoder(ByteTokenizer(), fraction).encode_all(_documents(*texts)))
    return write_shard(path, Position(), documents, max_bytes, lambda _: None)


def test_a_shard_contains_training_then_validation_tokens_with_document_ends(tmp_path: Path) -> None:
    texts = [b"text number %d" % n for n in range(30)]
    entry = _write(tmp_path / "tokens-00000.bin", *texts, fraction=0.3)
    expected = [token for split in Split for text in texts if split_of(text, 0.3) is split for token in (*text, 256)]
    assert np.fromfile(tmp_path / "tokens-00000.bin", dtype="<u2").tolist() == expected
    assert entry.last
    assert sum(entry.num_documents.values()) == 30
    assert 0 < entry.num_documents[Split.VALIDATION] < 30
    assert load_entry(tmp_path / "tokens-00000.bin") == entry


def test_a_shard_stops_before_its_bound_but_takes_at_least_one_document(tmp_path: Path) -> None:
    path = tmp_path / "tokens-00000.bin"
    entry = _write(path, b"x" * 11, b"y" * 11, b"z" * 11, max_bytes=50)
    assert (entry.num_bytes, entry.last, entry.end.file) == (48, False, 2)
    entry = _write(path, b"x" * 100, b"y", max_bytes=50)
    assert (entry.num_bytes, entry.last, entry.end.file) == (202, False, 1)


def test_the_document_that_does_not_fit_begins_the_next_shard(tmp_path: Path) -> None:
    documents = Lookahead(DocumentEncoder(ByteTokenizer(), 0.0).encode_all(_documents(b"x" * 11, b"y" * 11, b"z")))
    first = write_shard(tmp_path / "tokens-00000.bin", Position(), documents, 30, lambda _: None)
    second = write_shard(tmp_path / "tokens-00001.bin", first.end, documents, 30, lambda _: None)
    assert (first.num_tokens[Split.TRAIN], first.last) == (12, False)
    assert (second.num_tokens[Split.TRAIN], second.start, second.last) == (14, first.end, True)


def test_an_entry_of_a_damaged_shard_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "tokens-00000.bin"
    _write(path, b"some text")
    content = bytearray(path.read_bytes())
    content[4] ^= 1
    path.write_bytes(content)
    assert load_entry(path) is None
    path.write_bytes(content[:-1])
    assert load_entry(path) is None
    path.unlink()
    assert load_entry(path) is None


@given(parts=st.lists(st.binary()))
def test_the_checksum_of_a_write_is_that_of_the_file(
    parts: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("durable") / "file"
    whole = b"".join(parts)
    assert write_durably(path, parts) == Written(zlib.crc32(whole), hashlib.blake2b(whole, digest_size=16).hexdigest())
    assert file_crc32(path) == zlib.crc32(whole)
    assert [p.name for p in path.parent.iterdir()] == ["file"]
