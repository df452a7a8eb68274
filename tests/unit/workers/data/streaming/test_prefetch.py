"""Which shard is fetched next."""

import logging
import threading

import pytest

from shoal_workers.data.errors import MissingTextError
from shoal_workers.data.streaming.cache import NoClaim
from shoal_workers.data.streaming.prefetch import Prefetching, Window


def _window(first: int = 0) -> Window:
    window = Window()
    window.move([[7, 8, 9], [4, 5], [1]], first)
    return window


def test_blocks_come_in_their_order_and_each_shard_once() -> None:
    window = _window()
    assert [window.next(0.0) for _ in range(7)] == [7, 8, 9, 4, 5, 1, None]
    assert window.wake_at() == float("inf")
    assert window.before(4) == [7, 8, 9, 4]


def test_processes_begin_at_different_shards_of_a_block() -> None:
    window = _window(4)
    assert [window.next(0.0) for _ in range(6)] == [8, 9, 7, 4, 5, 1]


def test_a_shard_that_another_process_fetches_is_looked_at_again() -> None:
    window = _window()
    shard = window.next(0.0)
    assert shard == 7
    window.answered(shard, NoClaim.FETCHED_BY_OTHER, 0.0)
    assert window.next(0.1) == 8
    assert window.next(0.3) == 7
    window.answered(7, NoClaim.PRESENT, 0.3)
    assert window.next(9.0) == 9


def test_a_full_cache_stops_everything_for_a_while_or_until_the_block_is_read() -> None:
    window = _window()
    assert window.next(0.0) == 7
    window.answered(7, NoClaim.FULL, 0.0)
    assert window.next(0.5) is None
    assert window.wake_at() == 1.0
    assert window.next(1.0) == 7
    window.answered(7, NoClaim.FULL, 1.0)
    window.move([[4, 5], [1]], 0)
    assert window.next(1.1) == 4


def test_a_shard_that_could_not_be_fetched_is_tried_later() -> None:
    window = _window()
    assert window.next(0.0) == 7
    window.answered(7, None, 0.0, failed=True)
    assert [window.next(1.0), window.next(2.5)] == [8, 7]


def test_what_is_here_is_not_fetched_again_when_the_window_moves() -> None:
    window = _window()
    for shard in (7, 8, 9, 4):
        assert window.next(0.0) == shard
        window.answered(shard, None, 0.0)
    assert window.next(0.0) == 5
    window.move([[4, 5], [1], [2]], 0)
    assert [window.next(0.0) for _ in range(3)] == [1, 2, None], "4 is here, and 5 is being fetched"


def test_threads_fetch_everything_and_what_fails_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    fetched: list[int] = []
    complete, failed = threading.Event(), threading.Semaphore(0)

    def fetch(shard: int, keep: object) -> NoClaim | None:
        if shard in (8, 5):
            failed.release()
            raise MissingTextError(f"{shard} is gone")
        fetched.append(shard)
        if len(fetched) == 3:
            complete.set()
        return None

    with caplog.at_level(logging.WARNING):
        prefetching = Prefetching(fetch, lambda shard: shard == 9, 2)
        prefetching.move([[7, 8, 9], [4, 5], [1]])
        assert complete.wait(60)
        for _ in range(2):
            assert failed.acquire(timeout=60)
        prefetching.close()
        prefetching.join()
    assert sorted(fetched) == [1, 4, 7]
    assert [record.message for record in caplog.records] == ["shards.not_fetched"]
