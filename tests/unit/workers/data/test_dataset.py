"""Samples are the right slices, also across shards. A corpus that is too small is refused with the missing amount."""

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
from shoal_workers.data.corpus import Corpus
from shoal_workers.data.dataset import TokenDataset
from shoal_workers.data.errors import CorpusTooSmallError
from shoal_workers.data.prepare import prepare_corpus
from shoal_workers.data.tokenizer import Split

ConfigOf = Callable[..., TextDataConfig]


class WideTokenizer:
    """One token per byte, numbered so high that it takes four bytes; no end of document."""

    fingerprint = "wide"
    vocab_size = 200_000
    end_of_document = None
    bytes_per_process = None

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
