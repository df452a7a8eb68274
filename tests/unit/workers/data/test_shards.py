"""Tokens take the smallest dtype, splits follow the text alone, files are whole or absent."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_workers.data.documents import Document, Position
from shoal_workers.data.index import Split, file_crc32, load_entry
from shoal_workers.data.shards import ShardWriter, split_of, token_dtype, write_durably
from shoal_workers.data.tokenizer import ByteTokenizer


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


def test_a_shard_contains_training_then_validation_tokens_with_document_ends(tmp_path: Path) -> None:
    texts = [b"text number %d" % n for n in range(30)]
    writer = ShardWriter(ByteTokenizer(), validation_fraction=0.3, max_bytes=1 << 20)
    entry = writer.write(tmp_path / "tokens-00000.bin", Position(), _documents(*texts), lambda _: None)
    expected = [token for split in Split for text in texts if split_of(text, 0.3) is split for token in (*text, 256)]
    assert np.fromfile(tmp_path / "tokens-00000.bin", dtype="<u2").tolist() == expected
    assert entry.last
    assert sum(entry.num_documents.values()) == 30
    assert 0 < entry.num_documents[Split.VALIDATION] < 30
    assert load_entry(tmp_path / "tokens-00000.bin") == entry


def test_a_shard_stops_before_its_bound_but_takes_at_least_one_document(tmp_path: Path) -> None:
    writer = ShardWriter(ByteTokenizer(), validation_fraction=0, max_bytes=50)
    path = tmp_path / "tokens-00000.bin"
    entry = writer.write(path, Position(), _documents(b"x" * 11, b"y" * 11, b"z" * 11), lambda _: None)
    assert (entry.num_bytes, entry.last, entry.end.file) == (48, False, 2)
    entry = writer.write(path, Position(), _documents(b"x" * 100, b"y"), lambda _: None)
    assert (entry.num_bytes, entry.last, entry.end.file) == (202, False, 1)


def test_an_entry_of_a_damaged_shard_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "tokens-00000.bin"
    writer = ShardWriter(ByteTokenizer(), validation_fraction=0, max_bytes=1 << 20)
    writer.write(path, Position(), _documents(b"some text"), lambda _: None)
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
    assert write_durably(path, parts) == zlib.crc32(b"".join(parts)) == file_crc32(path)
    assert [p.name for p in path.parent.iterdir()] == ["file"]
