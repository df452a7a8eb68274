"""The lock of a node: one holder, and its progress for those who wait. Two open files stand for two processes."""

import queue
import threading
from pathlib import Path

from shoal_workers.data.prepare import PreparePhase, PrepareProgress
from shoal_workers.node_lock import node_lock

_PATIENCE_S = 60.0


def test_a_process_that_waits_sees_the_progress_of_the_holder(tmp_path: Path) -> None:
    path = tmp_path / "text.lock"
    seen: queue.Queue[str] = queue.Queue()

    def wait() -> None:
        with node_lock(path, seen.put):
            seen.put("locked")

    with node_lock(path, seen.put) as say:
        waiter = threading.Thread(target=wait)
        waiter.start()
        assert seen.get(timeout=_PATIENCE_S) == "", "nothing is known yet"
        say("tokenising 45 %")
        assert seen.get(timeout=_PATIENCE_S) == "tokenising 45 %"
    assert seen.get(timeout=_PATIENCE_S) == "locked"
    waiter.join()
    assert seen.empty()


def test_a_free_lock_is_taken_without_a_word(tmp_path: Path) -> None:
    seen: list[str] = []
    with node_lock(tmp_path / "text.lock", seen.append):
        assert seen == []


def test_a_waiting_preparation_is_described_with_the_progress_of_the_other_process() -> None:
    known = PrepareProgress(PreparePhase.WAITING, of_holder="tokenising 45 %")
    assert known.describe() == "another process of this node prepares the text: tokenising 45 %"
    assert PrepareProgress(PreparePhase.WAITING).describe() == "another process of this node prepares the text"
