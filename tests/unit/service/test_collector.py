"""The garbage collector is paused within the block, and afterwards as it was before, also if the block fails."""

from __future__ import annotations

import gc
import threading

import pytest

from shoal_service.collector import paused_collector


def test_it_is_on_again_after_a_failure() -> None:
    assert gc.isenabled()
    with pytest.raises(KeyError), paused_collector():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


def test_it_stays_off_until_the_last_of_two_threads_is_done() -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with paused_collector():
            inside.set()
            assert leave.wait(60)

    thread = threading.Thread(target=other)
    with paused_collector():
        thread.start()
        assert inside.wait(60)
    assert not gc.isenabled(), "the other one is in its block"
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with paused_collector():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
