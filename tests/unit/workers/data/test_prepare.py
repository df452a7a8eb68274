"""Data is prepared once, resumed after the last finished shard, verified and repaired; each test counts the documents
read."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from numpy.typing import NDArray

from shoal_workers.contract.text_data import TextDataConfig
from shoal_workers.data.__main__ import prepare_with_bar
from shoal_workers.data.corpus import Corpus
from shoal_workers.data.errors import CacheError, EmptyCorpusError, MissingTextError, UndecodableTextError
from shoal_workers.data.prepare import MIB, PreparePhase, PrepareProgress, prepare_corpus, verify_corpus
from shoal_workers.data.tokenizer import ByteTokenizer, Split

ConfigOf = Callable[..., TextDataConfig]
SHARD_BYTES = 8192


class CountingTokenizer(ByteTokenizer):
    """Bytes, counting the documents."""

    def __init__(self) -> None:
        self.num_documents = 0

    def encode(self, text: bytes) -> NDArray[Any]:
        self.num_documents += 1
        return super().encode(text)


def _prepare(config: TextDataConfig, *, shard_bytes: int = SHARD_BYTES) -> tuple[Corpus, int]:
    """The corpus, and how many documents were tokenised for it."""
    tokenizer = CountingTokenizer()
    corpus = prepare_corpus(config, lambda _: None, shard_bytes=shard_bytes, tokenizer=tokenizer)
    return corpus, tokenizer.num_documents


def _flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def _all_bytes(corpus: Corpus) -> list[bytes]:
    return [corpus.shard_path(number).read_bytes() for number in range(len(corpus.index.shards))]


def test_a_corpus_is_tokenised_once(text_dir: Path, config_of: ConfigOf) -> None:
    corpus, num_documents = _prepare(config_of(text_dir))
    assert num_documents >= 40
    assert len(corpus.index.shards) > 5
    again, num_documents = _prepare(config_of(text_dir))
    assert (again, num_documents) == (corpus, 0)
    assert (corpus.directory / "sources.json").exists()


def test_another_file_setting_or_tokenizer_is_another_corpus(text_dir: Path, config_of: ConfigOf) -> None:
    directories = {_prepare(config_of(text_dir))[0].directory}
    directories.add(_prepare(config_of(text_dir, validation_fraction=0.2))[0].directory)
    directories.add(_prepare(config_of(text_dir, max_bytes=9000))[0].directory)
    os.utime(text_dir / "000.txt", (1, 1))
    directories.add(_prepare(config_of(text_dir))[0].directory)
    (text_dir / "new.txt").write_text("new")
    directories.add(_prepare(config_of(text_dir))[0].directory)
    assert len(directories) == 5


def test_the_content_hash_is_of_the_text_not_of_names_and_times(text_dir: Path, config_of: ConfigOf) -> None:
    before, _ = _prepare(config_of(text_dir))
    text_dir.rename(text_dir.with_name("moved"))
    os.utime(text_dir.with_name("moved") / "007.txt", (1, 1))
    after, num_documents = _prepare(config_of(text_dir.with_name("moved")))
    assert num_documents > 0
    assert after.index.content_hash == before.index.content_hash
    assert _all_bytes(after) == _all_bytes(before)
    (text_dir.with_name("moved") / "007.txt").write_text("other text")
    assert _prepare(config_of(text_dir.with_name("moved")))[0].index.content_hash != before.index.content_hash


def test_a_rename_that_reorders_the_files_moves_no_document_to_the_other_split(
    text_dir: Path, config_of: ConfigOf
) -> None:
    before, _ = _prepare(config_of(text_dir, validation_fraction=0.3))
    for number in range(40):
        (text_dir / f"{number:03d}.txt").rename(text_dir / f"renamed-{(number * 7) % 40:03d}.txt")
    after, _ = _prepare(config_of(text_dir, validation_fraction=0.3))
    assert after.index.content_hash != before.index.content_hash
    for split in Split:
        assert after.index.num_documents(split) == before.index.num_documents(split) > 0
        assert after.index.num_tokens(split) == before.index.num_tokens(split)


@pytest.mark.parametrize("number", [0, 3, -1])
def test_a_flipped_byte_is_found_and_only_its_shard_is_rewritten(
    number: int, text_dir: Path, config_of: ConfigOf
) -> None:
    corpus, num_documents = _prepare(config_of(text_dir))
    whole = _all_bytes(corpus)
    damaged = number % len(whole)
    _flip_a_byte(corpus.shard_path(damaged))
    assert not verify_corpus(corpus)
    again, num_remade = _prepare(config_of(text_dir))
    assert again == corpus
    assert 0 < num_remade < num_documents / 3
    assert _all_bytes(again) == whole
    assert verify_corpus(again)


@pytest.mark.parametrize("damage", ["truncate", "delete", "index", "garbage", "entry"])
def test_damaged_files_are_made_again(damage: str, text_dir: Path, config_of: ConfigOf) -> None:
    corpus, _ = _prepare(config_of(text_dir))
    whole = _all_bytes(corpus)
    match damage:
        case "truncate":
            os.truncate(corpus.shard_path(2), 100)
        case "delete":
            corpus.shard_path(2).unlink()
        case "index":
            (corpus.directory / "index.json").unlink()
        case "garbage":
            (corpus.directory / "index.json").write_bytes(b'{"format": 1, "shards": \xff')
        case _:
            corpus.shard_path(2).with_suffix(".json").write_text("{}")
            (corpus.directory / "index.json").unlink()
    verify_corpus(corpus)
    again, _ = _prepare(config_of(text_dir))
    assert (again, _all_bytes(again)) == (corpus, whole)


def test_an_interrupted_preparation_resumes_after_its_last_finished_shard(text_dir: Path, config_of: ConfigOf) -> None:
    whole, num_documents = _prepare(config_of(text_dir, validation_fraction=0.1))
    (text_dir / "039.txt").write_bytes(b"not utf-8: \xff")
    config = config_of(text_dir, validation_fraction=0.1, encoding_errors="strict")
    with pytest.raises(UndecodableTextError):
        _prepare(config)
    directory = next(d for d in whole.directory.parent.glob("text-*/") if not (d / "index.json").exists())
    num_finished = len(list(directory.glob("tokens-*.json")))
    assert num_finished > 5
    with pytest.raises(UndecodableTextError):
        _prepare(config)
    assert len(list(directory.glob("tokens-*.json"))) == num_finished
    tokenizer = CountingTokenizer()
    with pytest.raises(UndecodableTextError):
        prepare_corpus(config, lambda _: None, shard_bytes=SHARD_BYTES, tokenizer=tokenizer)
    assert tokenizer.num_documents < num_documents / 3


def test_a_corpus_without_text_is_refused(tmp_path: Path, config_of: ConfigOf) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").write_bytes(b"")
    (tmp_path / "empty" / "b.bin").write_bytes(b"\0\0\0")
    with pytest.raises(EmptyCorpusError, match="names 2 files, but they contain no text"):
        _prepare(config_of(tmp_path / "empty"))


def test_a_first_document_beyond_max_bytes_is_refused(text_dir: Path, config_of: ConfigOf) -> None:
    with pytest.raises(EmptyCorpusError, match=r"does not fit into data\.max_bytes 10,"):
        _prepare(config_of(text_dir, max_bytes=10))


def test_missing_files_are_named_before_anything_is_made(tmp_path: Path, config_of: ConfigOf) -> None:
    with pytest.raises(MissingTextError, match=r"data\.paths 'nothing/\*\.txt'"):
        _prepare(config_of("nothing/*.txt"))
    assert not (tmp_path / "cache").exists()


def test_a_cache_directory_that_cannot_be_made_is_named(text_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    config = TextDataConfig(paths=(str(text_dir),), cache_dir=str(tmp_path / "file" / "cache"))
    with pytest.raises(CacheError, match=r"data\.cache_dir .*file/cache cannot be used"):
        _prepare(config)


def test_progress_is_reported_as_text(tmp_path: Path, config_of: ConfigOf) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_bytes(b"a line\n" * (MIB // 7 + 1))
    reported: list[PrepareProgress] = []
    prepare_corpus(config_of(tmp_path / "*.txt"), reported.append)
    texts = [state.describe() for state in reported]
    assert any(text.startswith("tokenising 33 % (1.0 of 3.0 MiB, 1 of 3 files)") for text in texts)
    assert any(text.startswith("tokenising 100 % (3.0 of 3.0 MiB, 3 of 3 files)") for text in texts)
    assert reported[-1].phase is PreparePhase.READY
    assert len(reported) < 10


def test_preparation_with_a_bar_prepares_the_corpus(text_dir: Path, config_of: ConfigOf) -> None:
    [corpus] = prepare_with_bar(config_of(text_dir))
    assert _prepare(config_of(text_dir), shard_bytes=64 * MIB) == (corpus, 0)
