"""Documents that are encoded on several threads become the same shards as on one."""

import importlib.util
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal_workers.contract.text_data import TextDataConfig
from shoal_workers.data.corpus import Corpus
from shoal_workers.data.documents import PIECE_BYTES, Position, read_documents
from shoal_workers.data.errors import UndecodableTextError
from shoal_workers.data.prepare import PrepareProgress, prepare_corpus
from shoal_workers.data.sources import find_sources
from shoal_workers.data.tokenising import encode_on_threads
from shoal_workers.data.tokenizer import DocumentEncoder, load_tokenizer

ConfigOf = Callable[..., TextDataConfig]
SHARD_BYTES = 100_000
_WORDS = ("shoal", "Grüße", "日本語", "naïve", "x=1;", "…", "\t", "the", "of", "🐟")
_KILLED = """
import os, signal, sys
from shoal_workers.contract.text_data import TextDataConfig
from shoal_workers.data.prepare import prepare_corpus

def report(state):
    if state.done_bytes > int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)

prepare_corpus(TextDataConfig.model_validate_json(sys.argv[1]), report, shard_bytes=100000, num_threads=2)
"""


@pytest.fixture
def hard_text(tmp_path: Path) -> Path:
    """Large files whose pieces end in the middle of words, lines and characters, and many small ones."""
    directory = tmp_path / "hard"
    directory.mkdir()
    line = " ".join(_WORDS * 3) + "\r\n"
    (directory / "a.txt").write_bytes((line * (PIECE_BYTES * 2 // len(line.encode()) + 9)).encode() + b"no line end")
    (directory / "b.txt").write_text("".join(_WORDS[n % 3] + " " for n in range(40_000)))  # no line end at all
    (directory / "c.txt").write_bytes(b"not \xff utf-8 \xc3\n" * 4000)
    (directory / "d.txt").write_bytes(b"")
    for number in range(60):
        (directory / f"e{number:02d}.txt").write_text("".join(f"{word} {number}\n" for word in _WORDS * (number % 4)))
    return directory


def _tokenizer(kind: str, tmp_path: Path) -> str:
    """What data.tokenizer names; those that are trained have a text of their own."""
    if kind == "bytes":
        return kind
    if importlib.util.find_spec("tokenizers") is None:
        pytest.skip("the optional package tokenizers is not installed")
    import tokenizers
    from tokenizers import models, pre_tokenizers, trainers

    model, trainer, before = {
        "bpe": (models.BPE(), trainers.BpeTrainer, pre_tokenizers.ByteLevel(add_prefix_space=True)),
        "unigram": (models.Unigram(), trainers.UnigramTrainer, pre_tokenizers.Metaspace()),
        "wordpiece": (models.WordPiece(unk_token="[UNK]"), trainers.WordPieceTrainer, pre_tokenizers.Whitespace()),
    }[kind]
    made: Any = tokenizers.Tokenizer(model)
    made.pre_tokenizer = before
    special = ["[UNK]", "<|endoftext|>"]
    settings = {"unk_token": "[UNK]"} if kind == "unigram" else {}
    made.train_from_iterator(
        [" ".join(_WORDS), "words of a small corpus"],
        trainer(vocab_size=300, special_tokens=special, show_progress=False, **settings),
    )
    path = tmp_path / f"{kind}.json"
    made.save(str(path))
    return str(path)


def _bytes_of(corpus: Corpus) -> list[bytes]:
    return [corpus.shard_path(number).read_bytes() for number in range(len(corpus.index.shards))]


@pytest.mark.cells(2)
@pytest.mark.parametrize("kind", ["bytes", "bpe", "unigram", "wordpiece"])
def test_the_shards_of_several_threads_are_those_of_one(kind: str, hard_text: Path, tmp_path: Path) -> None:
    tokenizer = _tokenizer(kind, tmp_path)
    reported: list[PrepareProgress] = []

    def prepare(num_threads: int) -> Corpus:
        config = TextDataConfig(
            paths=(str(hard_text),),
            tokenizer=tokenizer,
            cache_dir=str(tmp_path / f"cache-{num_threads}"),
            validation_fraction=0.2,
        )
        return prepare_corpus(config, reported.append, shard_bytes=SHARD_BYTES, num_threads=num_threads)

    alone, together = prepare(0), prepare(2)
    assert together.index == alone.index
    assert len(alone.index.shards) >= 2
    assert _bytes_of(together) == _bytes_of(alone)
    assert "files, 2 threads)" in reported[-2].describe()


def test_the_library_starts_no_threads_of_its_own_meanwhile(
    hard_text: Path, config_of: ConfigOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    documents = read_documents(find_sources(config_of(hard_text)), Position(), config_of(hard_text))
    encoded = encode_on_threads(DocumentEncoder(load_tokenizer("bytes"), 0.2), documents, 2)
    next(encoded)
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
    encoded.close()
    assert "TOKENIZERS_PARALLELISM" not in os.environ
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("shoal-tokenise")]


def test_an_error_of_the_text_comes_after_the_shards_before_it(hard_text: Path, config_of: ConfigOf) -> None:
    config = config_of(hard_text, encoding_errors="strict")
    with pytest.raises(UndecodableTextError, match=r"c\.txt is not UTF-8: byte 0xff at offset 4"):
        prepare_corpus(config, lambda _: None, shard_bytes=SHARD_BYTES, num_threads=2)
    [directory] = Path(str(config.cache_dir)).glob("text-*/")
    assert len(list(directory.glob("tokens-*.json"))) >= 2


def test_a_preparation_goes_on_after_one_that_was_killed(hard_text: Path, config_of: ConfigOf) -> None:
    config = config_of(hard_text)
    command = [sys.executable, "-c", _KILLED, config.model_dump_json(), str(PIECE_BYTES)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    [directory] = Path(str(config.cache_dir)).glob("text-*/")
    kept = {path: path.stat().st_mtime_ns for path in directory.glob("tokens-*.json")}
    assert kept
    corpus = prepare_corpus(config, lambda _: None, shard_bytes=SHARD_BYTES, num_threads=2)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    other = TextDataConfig(paths=config.paths, cache_dir=f"{config.cache_dir}-other")
    assert prepare_corpus(other, lambda _: None, shard_bytes=SHARD_BYTES, num_threads=0).index == corpus.index
