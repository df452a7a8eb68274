"""The garbage collector is paused within the block, and afterwards as it was before, also if the block fails."""

from __future__ import annotations

import gc
import threading

import pytest

from shoal_service.collector import collect_rarely, paused_collector


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


def test_a_pass_over_everything_is_rare_and_leaves_out_what_exists() -> None:
    before = gc.get_threshold()
    try:
        collect_rarely()
        young, passes, whole = gc.get_threshold()
        assert young * passes * whole >= 10_000_000 and young * passes <= 50_000
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
