"""The garbage collector is paused within the block, and afterwards as it was before, also if the block fails; it leaves
out what is kept of many jobs."""

import gc
import threading
import weakref

import pytest

from shoal_service.collector import SPARED_AT_ONCE, SparedJobs, collect_rarely, paused_collector


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


def test_many_new_jobs_are_left_out_until_they_are_half_as_many() -> None:
    spared = SparedJobs()
    frozen = gc.get_freeze_count()
    try:
        spared.note(SPARED_AT_ONCE - 1, SPARED_AT_ONCE - 1)
        assert gc.get_freeze_count() == frozen, "few jobs do not hold up a pass"
        spared.note(1, SPARED_AT_ONCE)
        assert gc.get_freeze_count() > frozen + 10_000
        spared.note(0, SPARED_AT_ONCE // 2)
        assert gc.get_freeze_count() > frozen + 10_000
        spared.note(0, SPARED_AT_ONCE // 2 - 1)
        assert gc.get_freeze_count() == 0
    finally:
        gc.unfreeze()


def test_a_spared_object_is_freed_with_its_last_reference() -> None:
    class Kept:
        pass

    one, freed = Kept(), []
    weakref.finalize(one, freed.append, "freed")
    try:
        SparedJobs().note(SPARED_AT_ONCE, SPARED_AT_ONCE)
        del one
        assert freed == ["freed"]
    finally:
        gc.unfreeze()
