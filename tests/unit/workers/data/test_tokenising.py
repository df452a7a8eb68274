"""Documents that are encoded in several processes become the same shards as in one; no process outlives its parent."""

import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
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
from shoal_workers.data.tokenising import TokenisingProcesses
from shoal_workers.data.tokenizer import DocumentEncoder, load_tokenizer

ConfigOf = Callable[..., TextDataConfig]
SHARD_BYTES = 100_000
_WAIT_MS = 60_000
_WORDS = ("shoal", "Grüße", "日本語", "naïve", "x=1;", "…", "\t", "the", "of", "🐟")
_PARENT = """
import json, os, sys
from pathlib import Path
from shoal_workers.contract.text_data import TextDataConfig
from shoal_workers.data.prepare import prepare_corpus

def report(state):
    if state.done_bytes > int(sys.argv[2]):
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        print(json.dumps(children), flush=True)
        sys.stdin.readline()

prepare_corpus(TextDataConfig.model_validate_json(sys.argv[1]), report, shard_bytes=200000, num_processes=2)
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
def test_the_shards_of_processes_are_those_of_one_process(kind: str, hard_text: Path, tmp_path: Path) -> None:
    tokenizer = _tokenizer(kind, tmp_path)
    reported: list[PrepareProgress] = []

    def prepare(num_processes: int) -> Corpus:
        config = TextDataConfig(
            paths=(str(hard_text),),
            tokenizer=tokenizer,
            cache_dir=str(tmp_path / f"cache-{num_processes}"),
            validation_fraction=0.2,
        )
        return prepare_corpus(config, reported.append, shard_bytes=SHARD_BYTES, num_processes=num_processes)

    alone, together = prepare(0), prepare(2)
    assert together.index == alone.index
    assert len(alone.index.shards) >= 2
    assert _bytes_of(together) == _bytes_of(alone)
    assert "files, 2 processes)" in reported[-2].describe()


def _encoded(hard_text: Path, config_of: ConfigOf, kill: Callable[[TokenisingProcesses], None]) -> tuple[int, bool]:
    """How many documents were encoded here, and whether all of them are as one process encodes them."""
    sources = find_sources(config_of(hard_text))
    encoder = DocumentEncoder(load_tokenizer("bytes"), 0.2)
    expected = list(encoder.encode_all(read_documents(sources, Position(), config_of(hard_text))))
    with TokenisingProcesses(encoder, 2) as processes:
        kill(processes)
        found = list(processes.encode_all(read_documents(sources, Position(), config_of(hard_text))))
        here = processes.num_encoded_here
    assert not processes.pids
    same = [
        (a.end, a.text.split, a.text.tokens.tolist()) == (b.end, b.text.split, b.text.tokens.tolist())
        for a, b in zip(found, expected, strict=True)
    ]
    return here, all(same)


def test_all_documents_are_encoded_by_the_processes(hard_text: Path, config_of: ConfigOf) -> None:
    assert _encoded(hard_text, config_of, lambda _: None) == (0, True)


def test_a_killed_process_costs_nothing_but_speed(hard_text: Path, config_of: ConfigOf) -> None:
    def kill(processes: TokenisingProcesses) -> None:
        os.kill(processes.pids[0], signal.SIGKILL)

    here, is_same = _encoded(hard_text, config_of, kill)
    assert here > 0
    assert is_same


def test_a_tokenizer_that_is_replaced_meanwhile_is_not_read_again(hard_text: Path, tmp_path: Path) -> None:
    name = _tokenizer("wordpiece", tmp_path)
    encoder = DocumentEncoder(load_tokenizer(name), 0.0)
    Path(name).write_text(Path(name).read_text().replace('"shoal"', '"shOal"'))
    config = TextDataConfig(paths=(str(hard_text / "e03.txt"),))
    documents = list(read_documents(find_sources(config), Position(), config))
    with TokenisingProcesses(encoder, 1) as processes:
        [found] = processes.encode_all(documents)
        assert processes.num_encoded_here == 0
    assert found.text.tokens.tolist() == encoder.encode(documents[0]).tokens.tolist()


def test_an_error_of_the_text_comes_after_the_shards_before_it(hard_text: Path, config_of: ConfigOf) -> None:
    config = config_of(hard_text, encoding_errors="strict")
    with pytest.raises(UndecodableTextError, match=r"c\.txt is not UTF-8: byte 0xff at offset 4"):
        prepare_corpus(config, lambda _: None, shard_bytes=SHARD_BYTES, num_processes=2)
    [directory] = Path(str(config.cache_dir)).glob("text-*/")
    assert len(list(directory.glob("tokens-*.json"))) >= 2


def test_the_processes_of_a_killed_preparation_end_and_the_next_one_goes_on(
    hard_text: Path, config_of: ConfigOf
) -> None:
    config = config_of(hard_text)
    command = [sys.executable, "-c", _PARENT, config.model_dump_json(), str(PIECE_BYTES)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        ended = select.poll()
        children = [os.pidfd_open(int(pid)) for pid in json.loads(parent.stdout.readline())]
        for child in children:
            ended.register(child, select.POLLIN)
        assert len(children) == 2
        parent.kill()
    for _ in children:
        [(child, _), *_] = ended.poll(_WAIT_MS) or [(-1, 0)]
        assert child in children, "a process outlived its parent"
        ended.unregister(child)
    for child in children:
        os.close(child)
    [directory] = Path(str(config.cache_dir)).glob("text-*/")
    kept = {path: path.stat().st_mtime_ns for path in directory.glob("tokens-*.json")}
    assert kept
    corpus = prepare_corpus(config, lambda _: None, shard_bytes=SHARD_BYTES, num_processes=2)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    other = TextDataConfig(paths=config.paths, cache_dir=f"{config.cache_dir}-other")
    assert prepare_corpus(other, lambda _: None, shard_bytes=SHARD_BYTES, num_processes=0).index == corpus.index
