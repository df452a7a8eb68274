"""Tokens, corpora and samples: the smallest dtype, splits by the text alone, and the right slices across shards."""

import hashlib
import importlib.util
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from shoal_workers.contract.text_data import TextDataConfig
from shoal_workers.data.corpus import Corpus, ShardEntry, Written, file_crc32, load_entry, write_durably, write_shard
from shoal_workers.data.documents import Document, Position
from shoal_workers.data.errors import CorpusTooSmallError, TokenizerError
from shoal_workers.data.mixture import TokenDataset
from shoal_workers.data.prepare import prepare_corpus
from shoal_workers.data.tokenizer import (
    ByteTokenizer,
    DocumentEncoder,
    Lookahead,
    Split,
    choose_split,
    choose_token_dtype,
    load_tokenizer,
)


def _documents(*texts: bytes) -> list[Document]:
    ends = np.cumsum([len(text) for text in texts])
    return [
        Document(text, True, Position(file=n + 1, text_bytes=int(end)))
        for n, (text, end) in enumerate(zip(texts, ends, strict=True))
    ]


@pytest.mark.parametrize(("vocab", "dtype"), [(256, "u1"), (257, "u2"), (65_536, "u2"), (65_537, "u4")])
def test_the_dtype_is_the_smallest_that_holds_the_vocabulary(vocab: int, dtype: str) -> None:
    assert choose_token_dtype(vocab) == np.dtype(f"<{dtype}")


@given(st.binary(min_size=1), st.floats(0, 0.999))
def test_the_split_is_a_function_of_the_text_and_grows_with_the_fraction(text: bytes, fraction: float) -> None:
    assert choose_split(text, fraction) == choose_split(text, fraction)
    assert choose_split(text, 0.0) is Split.TRAIN
    if choose_split(text, fraction) is Split.VALIDATION:
        assert choose_split(text, 0.9999999999) is Split.VALIDATION


def test_about_the_requested_share_of_documents_is_for_validation() -> None:
    num_validation = sum(choose_split(b"document %d" % n, 0.05) is Split.VALIDATION for n in range(10_000))
    assert 400 < num_validation < 600


def _write(path: Path, *texts: bytes, max_bytes: int = 1 << 20, fraction: float = 0.0) -> ShardEntry:
    documents = Lookahead(DocumentEncoder(ByteTokenizer(), fraction).encode_all(_documents(*texts)))
    return write_shard(path, Position(), documents, max_bytes, lambda _: None)


def test_a_shard_contains_training_then_validation_tokens_with_document_ends(tmp_path: Path) -> None:
    texts = [b"text number %d" % n for n in range(30)]
    entry = _write(tmp_path / "tokens-00000.bin", *texts, fraction=0.3)
    expected = [
        token for split in Split for text in texts if choose_split(text, 0.3) is split for token in (*text, 256)
    ]
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


ConfigOf = Callable[..., TextDataConfig]


class WideTokenizer:
    """One token per byte, numbered so high that it takes four bytes; no end of document."""

    fingerprint = "wide"
    vocab_size = 200_000
    end_of_document = None
    bytes_per_thread = None

    def encode(self, text: bytes) -> NDArray[Any]:
        return np.frombuffer(text, dtype=np.uint8).astype(np.uint32) + 100_000


def _tokens(corpus: Corpus, split: Split) -> NDArray[Any]:
    """The split's tokens, read the plain way."""
    parts = []
    for number, entry in enumerate(corpus.index.shards):
        tokens = np.fromfile(corpus.shard_path(number), dtype=corpus.index.dtype)
        num_train = entry.num_tokens[Split.TRAIN]
        parts.append(tokens[:num_train] if split is Split.TRAIN else tokens[num_train:])
    return np.concatenate(parts)


@pytest.mark.parametrize("shard_bytes", [1 << 20, 4096, 1])
@pytest.mark.parametrize("seq_len", [1, 7, 5000])
def test_samples_are_slices_of_the_split_for_any_shards(
    text_dir: Path, config_of: ConfigOf, shard_bytes: int, seq_len: int
) -> None:
    corpus = prepare_corpus(config_of(text_dir, validation_fraction=0.3), lambda _: None, shard_bytes=shard_bytes)
    assert len(corpus.index.shards) >= {1 << 20: 1, 4096: 20, 1: 40}[shard_bytes]
    for split in Split:
        tokens = _tokens(corpus, split)
        data = TokenDataset(corpus, split, seq_len)
        assert len(data) == (len(tokens) - 1) // seq_len
        for index in {0, len(data) // 2, len(data) - 1} if len(data) else set():
            sample = data[index]
            assert sample.dtype == torch.int64
            assert sample.tolist() == tokens[index * seq_len : index * seq_len + seq_len + 1].tolist()


def test_a_sample_is_a_copy_and_an_index_outside_is_refused(text_dir: Path, config_of: ConfigOf) -> None:
    data = TokenDataset(prepare_corpus(config_of(text_dir), lambda _: None), Split.TRAIN, 8)
    before = data[0].tolist()
    data[0].zero_()
    assert data[0].tolist() == before
    for index in (-1, len(data)):
        with pytest.raises(IndexError, match=f"of {len(data)}"):
            data[index]


def test_wide_vocabularies_are_stored_in_four_bytes(text_dir: Path, config_of: ConfigOf) -> None:
    corpus = prepare_corpus(config_of(text_dir), lambda _: None, tokenizer=WideTokenizer())
    assert corpus.index.dtype == "<u4"
    assert corpus.bytes_per_token == 1.0
    assert int(TokenDataset(corpus, Split.TRAIN, 8)[0][0]) == 100_000 + ord("d")


def test_too_little_text_is_refused_with_the_arithmetic(text_dir: Path, config_of: ConfigOf) -> None:
    corpus = prepare_corpus(config_of(text_dir / "000.txt", validation_fraction=0), lambda _: None)
    num_tokens = (text_dir / "000.txt").stat().st_size + 1
    assert len(TokenDataset(corpus, Split.TRAIN, num_tokens - 1)) == 1
    with pytest.raises(CorpusTooSmallError, match=rf"{num_tokens:,} tokens, .*seq_len \+ 1 = {num_tokens + 1:,}\."):
        TokenDataset(corpus, Split.TRAIN, num_tokens)


def test_an_empty_validation_split_has_no_samples(text_dir: Path, config_of: ConfigOf) -> None:
    corpus = prepare_corpus(config_of(text_dir, validation_fraction=0), lambda _: None)
    assert len(TokenDataset(corpus, Split.VALIDATION, 8)) == 0


@given(fraction=st.floats(0, 0.9), shard_bytes=st.integers(1, 10_000))
def test_no_document_is_lost_or_doubled_by_the_split(
    fraction: float, shard_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("split")
    for number in range(5):
        (directory / f"{number}.txt").write_text(f"{number} " * 50 * (number + 1))
    config = TextDataConfig(
        paths=(str(directory / "*.txt"),), cache_dir=str(directory / "cache"), validation_fraction=fraction
    )
    index = prepare_corpus(config, lambda _: None, shard_bytes=shard_bytes).index
    assert sum(index.num_documents(split) for split in Split) == 5
    assert sum(index.num_tokens(split) for split in Split) == index.text_bytes + 5


_WORD_LEVEL = """{"version": "1.0", "truncation": null, "padding": null, "normalizer": null,
"added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
"model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "hello": 1, "world": 2, "</s>": 3}, "unk_token": "[UNK]"}}"""


def test_bytes_are_tokens() -> None:
    tokenizer = load_tokenizer("bytes")
    assert isinstance(tokenizer, ByteTokenizer)
    assert tokenizer.encode("é\0".encode()).tolist() == [0xC3, 0xA9, 0]
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (257, 256)


@pytest.mark.parametrize("name", ["no/such/tokenizer.json", "null\0byte", ""])
def test_a_missing_tokenizer_file_is_named(name: str) -> None:
    with pytest.raises(TokenizerError, match=r'cannot be read: .* must be "bytes" or the path') as caught:
        load_tokenizer(name)
    assert f"data.tokenizer {name!r}" in str(caught.value)


def test_a_tokenizer_file_is_used_or_the_missing_extra_named(tmp_path: Path) -> None:
    """Both are right, depending on whether the optional package is installed where the tests run."""
    path = tmp_path / "tokenizer.json"
    path.write_text(_WORD_LEVEL)
    if importlib.util.find_spec("tokenizers") is None:
        with pytest.raises(TokenizerError, match=r"pip install 'shoal\[hf\]'"):
            load_tokenizer(str(path))
    else:
        tokenizer = load_tokenizer(str(path))
        assert tokenizer.encode(b"hello big world").tolist() == [1, 0, 2]
        assert (tokenizer.vocab_size, tokenizer.end_of_document) == (4, 3)
        path.write_text("{}")
        with pytest.raises(TokenizerError, match="is not a tokenizers JSON file"):
            load_tokenizer(str(path))


def test_the_end_of_a_document_is_what_the_files_of_the_tokenizer_name(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    named = {
        "by its name": ({}, 3),
        "in the tokenizer's settings": ({"tokenizer_config.json": {"eos_token": "hello"}}, 1),
        "with its settings": (
            {"tokenizer_config.json": {"eos_token": {"__type": "AddedToken", "content": "world"}}},
            2,
        ),
        "in the map of special tokens": ({"special_tokens_map.json": {"eos_token": "world"}}, 2),
        "not in the vocabulary, so transformers adds it": ({"tokenizer_config.json": {"eos_token": "<end>"}}, 4),
        "null": ({"tokenizer_config.json": {"eos_token": None}, "config.json": {"eos_token_id": 1}}, 3),
        "in a damaged model's config": ({"config.json": []}, 3),
    }
    no_name = _WORD_LEVEL.replace("</s>", "<over>")
    only_here = {
        "in the model's config": ({"config.json": {"eos_token_id": 3}}, 3),
        "the first of several": ({"config.json": {"eos_token_id": [2, 3]}}, 2),
        "nowhere": ({}, None),
    }
    failures, fingerprints = [], set()
    for text, cases in ((_WORD_LEVEL, named), (no_name, only_here)):
        for name, (files, expected) in cases.items():
            directory = tmp_path / name.replace(" ", "-")
            directory.mkdir()
            (directory / "tokenizer.json").write_text(text)
            for file, content in files.items():
                (directory / file).write_text(json.dumps(content))
            tokenizer = load_tokenizer(str(directory / "tokenizer.json"))
            fingerprints.add((tokenizer.fingerprint, tokenizer.end_of_document))
            if tokenizer.end_of_document != expected:
                failures.append((name, tokenizer.end_of_document))
    assert failures == []
    assert len({fingerprint for fingerprint, _ in fingerprints}) == len(fingerprints)
    for damaged in ("[]", '{"eos_token": 3}', "{"):
        (directory / "tokenizer_config.json").write_text(damaged)
        with pytest.raises(TokenizerError, match=f"transformers cannot read the tokenizer in {directory}"):
            load_tokenizer(str(directory / "tokenizer.json"))
