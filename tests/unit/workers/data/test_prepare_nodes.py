"""Several nodes that share a cache directory prepare a corpus together. Each node is a process of this machine."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from shoal_workers.contract.text_data import TextDataConfig
from shoal_workers.data.corpus import Corpus
from shoal_workers.data.prepare import prepare_corpus

SHARD_BYTES = 16384
CHILD = """
import os, sys
from shoal_workers.contract.text_data import TextDataConfig
from shoal_workers.data.prepare import Sharing, prepare_corpus
from shoal_workers.data.tokenizer import ByteTokenizer

config, machine, hold_at = TextDataConfig.model_validate_json(sys.argv[1]), sys.argv[2], int(sys.argv[3])

class Tokenizer(ByteTokenizer):
    num_documents = 0

    def encode(self, text):
        self.num_documents += 1
        if self.num_documents == hold_at:
            print("holding", flush=True)
            sys.stdin.readline()
        return super().encode(text)

tokenizer = Tokenizer()
said = set()

def report(state):
    said.add(state.phase.value)
    if state.num_other_nodes:
        said.add(f"with {state.num_other_nodes}")

corpus = prepare_corpus(
    config, report, shard_bytes=16384, tokenizer=tokenizer, sharing=Sharing(machine=machine, portion_bytes=4000)
)
print(tokenizer.num_documents, corpus.index.content_hash, *sorted(said), flush=True)
"""


@contextmanager
def _node(config: TextDataConfig, machine: str, hold_at: int = -1) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", CHILD, config.model_dump_json(), machine, str(hold_at)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _let_go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()


@pytest.fixture
def alone(text_dir: Path, tmp_path: Path) -> Corpus:
    """What one process makes."""
    config = TextDataConfig(paths=(str(text_dir),), cache_dir=str(tmp_path / "alone"))
    return prepare_corpus(config, lambda _: None, shard_bytes=SHARD_BYTES)


def _files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def _assert_same(tmp_path: Path, alone: Corpus) -> None:
    [directory] = (tmp_path / "cache").glob("text-*/")
    assert _files(directory) == _files(alone.directory)


def test_nodes_share_the_work_and_make_the_shards_of_one_process(
    text_dir: Path, config_of: Callable[..., TextDataConfig], alone: Corpus, tmp_path: Path
) -> None:
    config = config_of(text_dir)
    with ExitStack() as stack:
        holder = stack.enter_context(_node(config, "a", 2))
        assert _line(holder) == "holding"
        helpers = [stack.enter_context(_node(config, machine, 3)) for machine in ("b", "c")]
        assert [_line(helper) for helper in helpers] == ["holding"] * 2
        for node in (*helpers, holder):
            _let_go(node)
        found = [_line(node).split() for node in (holder, *helpers)]
    assert {content_hash for _, content_hash, *_ in found} == {alone.index.content_hash}
    assert all(int(num) >= 2 for num, *_ in found) and sum(int(num) for num, *_ in found) == 40
    assert " with 2" in " ".join(found[0]) and ["helping" in said for _, _, *said in found] == [False, True, True]
    _assert_same(tmp_path, alone)


def test_a_killed_helper_loses_its_portion_alone(
    text_dir: Path, config_of: Callable[..., TextDataConfig], alone: Corpus, tmp_path: Path
) -> None:
    config = config_of(text_dir)
    with _node(config, "a", 2) as holder:
        assert _line(holder) == "holding"
        with _node(config, "b", 6) as helper:  # in its second portion or later
            assert _line(helper) == "holding"
            kept = len(list((tmp_path / "cache").glob("*/portions/*.part")))
            helper.kill()
            assert helper.wait() == -signal.SIGKILL
        _let_go(holder)
        num_documents, content_hash, *_ = _line(holder).split()
    assert kept >= 1 and int(num_documents) < 40, "what the helper had finished was used"
    assert content_hash == alone.index.content_hash
    _assert_same(tmp_path, alone)


def test_a_helper_takes_the_place_of_a_killed_holder(
    text_dir: Path, config_of: Callable[..., TextDataConfig], alone: Corpus, tmp_path: Path
) -> None:
    config = config_of(text_dir)
    with _node(config, "a", 20) as holder:
        assert _line(holder) == "holding"
        with _node(config, "b", 6) as helper:
            assert _line(helper) == "holding"
            holder.kill()
            assert holder.wait() == -signal.SIGKILL
            _let_go(helper)
            num_documents, content_hash, *_ = _line(helper).split()
    assert int(num_documents) < 40
    assert content_hash == alone.index.content_hash
    _assert_same(tmp_path, alone)


def test_a_node_with_a_cache_of_its_own_prepares_alone(
    text_dir: Path, config_of: Callable[..., TextDataConfig], alone: Corpus, tmp_path: Path
) -> None:
    with _node(config_of(text_dir), "a", 2) as holder:
        assert _line(holder) == "holding"
        other = TextDataConfig(paths=(str(text_dir),), cache_dir=str(tmp_path / "other"))
        with _node(other, "b") as node:
            assert _line(node).split()[:2] == ["40", alone.index.content_hash]
