"""Processes that prepare one corpus, and the death of each. They report over their pipes."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from shoal_workers.contract.text_data import TextDataConfig
from shoal_workers.data.prepare import prepare_corpus

ConfigOf = Callable[..., TextDataConfig]
Process = subprocess.Popen[str]
SHARD_BYTES = 8192
CHILD = """
import os, signal, sys
from shoal_workers.contract.text_data import TextDataConfig
from shoal_workers.data.prepare import prepare_corpus
from shoal_workers.data.tokenizer import ByteTokenizer

stop_at, how = sys.argv[2].encode(), sys.argv[3]

class Tokenizer(ByteTokenizer):
    num_documents = 0
    stopped = False

    def encode(self, text):
        self.num_documents += 1
        if text.startswith(b"document %s," % stop_at) and not self.stopped:
            self.stopped = True
            if how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            print("holding", flush=True)
            sys.stdin.readline()
        return super().encode(text)

tokenizer = Tokenizer()
waiting = []

def report(state):
    if state.phase == "waiting" and not waiting:
        waiting.append(state)
        print("waiting", flush=True)

corpus = prepare_corpus(TextDataConfig.model_validate_json(sys.argv[1]), report, shard_bytes=8192, tokenizer=tokenizer)
print(tokenizer.num_documents, corpus.index.content_hash, flush=True)
"""


def _child(config: TextDataConfig, stop_at: int = -1, how: str = "hold") -> AbstractContextManager[Process]:
    return _process(CHILD, config, str(stop_at), how)


@contextmanager
def _process(program: str, config: TextDataConfig, *arguments: str) -> Iterator[Process]:
    command = [sys.executable, "-c", program, config.model_dump_json(), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _line(process: Process) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("stop_at", [1, 20, 39])
def test_after_sigkill_the_next_process_resumes_after_the_last_finished_shard(
    stop_at: int, text_dir: Path, config_of: ConfigOf, tmp_path: Path
) -> None:
    undisturbed = prepare_corpus(
        TextDataConfig(paths=(str(text_dir),), cache_dir=str(tmp_path / "other")),
        lambda _: None,
        shard_bytes=SHARD_BYTES,
    )
    config = config_of(text_dir)
    with _child(config, stop_at, "die") as process:
        assert process.wait() == -signal.SIGKILL
    num_kept = sum(
        sum(entry.num_documents.values())
        for number, entry in enumerate(undisturbed.index.shards)
        if list((tmp_path / "cache").glob(f"*/tokens-{number:05d}.json"))
    )
    assert num_kept >= stop_at - 6  # all documents except those of one unfinished shard
    with _child(config) as process:
        num_documents, content_hash = _line(process).split()
    num_closed = len(undisturbed.index.shards)  # the document that does not fit is tokenised again by the next shard
    assert 40 - num_kept <= int(num_documents) < 40 - num_kept + num_closed
    assert content_hash == undisturbed.index.content_hash
    [directory] = (tmp_path / "cache").glob("text-*/")
    for number in range(num_closed):
        name = f"tokens-{number:05d}.bin"
        assert (directory / name).read_bytes() == (undisturbed.directory / name).read_bytes()


def test_one_process_of_a_node_works_and_the_others_wait(text_dir: Path, config_of: ConfigOf) -> None:
    config = config_of(text_dir)
    with _child(config, 20) as worker:
        assert _line(worker) == "holding"
        with _child(config) as first, _child(config) as second:
            assert _line(first) == _line(second) == "waiting"
            _let_go(worker)
            reported = [_line(process).split() for process in (worker, first, second)]
    assert [int(num) >= 40 for num, _ in reported] == [True, False, False]
    assert [int(num) for num, _ in reported[1:]] == [0, 0]
    assert len({content_hash for _, content_hash in reported}) == 1


def test_a_killed_holder_frees_the_lock_and_leaves_its_finished_shards(text_dir: Path, config_of: ConfigOf) -> None:
    config = config_of(text_dir)
    with _child(config, 30) as holder:
        assert _line(holder) == "holding"
        with _child(config) as waiter:
            assert _line(waiter) == "waiting"
            holder.kill()
            num_documents, _ = _line(waiter).split()
    assert 0 < int(num_documents) < 30


def _let_go(process: Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
