"""Streamed shards: the list, the order of samples and shards, and which one is fetched next."""

import logging
import threading
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_workers.contract.batch_partition import permute, unpermute
from shoal_workers.data.errors import MissingTextError
from shoal_workers.data.streaming import shard_list
from shoal_workers.data.streaming.cache import NoClaim
from shoal_workers.data.streaming.order import BlockOrder, EqualSizes, ListedSizes
from shoal_workers.data.streaming.prefetch import Prefetching, Window

SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any)


@given(sizes=SIZES, block_shards=st.integers(1, 6), seed=st.integers(0, 2**63))
def test_each_epoch_has_each_sample_once_and_a_block_has_the_samples_of_its_shards(
    sizes: list[int], block_shards: int, seed: int
) -> None:
    order = BlockOrder(ListedSizes(sizes), block_shards)
    num = order.sizes.num_samples
    for epoch in range(3):
        samples = order.samples_at(range(epoch * num, (epoch + 1) * num), seed)
        assert sorted(samples) == list(range(num))
        shards: list[int] = []
        at = 0
        while at < num:
            block = order.block_at(epoch * num + at, seed)
            assert (block.epoch, block.start) == (epoch, at)
            own = samples[at : at + block.ends[-1]]
            assert {order.sizes.locate(sample)[0] for sample in own} == {s for s in block.shards if sizes[s]}
            assert len(block.shards) <= block_shards
            shards += block.shards
            at += block.ends[-1]
        assert len(set(shards)) == len(shards)


@given(
    num_shards=st.integers(1, 40),
    samples_per_shard=st.integers(1, 7),
    missing=st.integers(0, 6),
    block_shards=st.integers(1, 9),
    seed=st.integers(0, 2**63),
)
def test_shards_of_one_size_have_the_order_that_a_list_of_their_sizes_gives(
    num_shards: int, samples_per_shard: int, missing: int, block_shards: int, seed: int
) -> None:
    equal = EqualSizes(num_shards, samples_per_shard, num_shards * samples_per_shard - missing % samples_per_shard)
    listed = ListedSizes([equal.size(shard) for shard in range(num_shards)])
    positions = range(2 * equal.num_samples)
    assert BlockOrder(equal, block_shards).samples_at(positions, seed) == BlockOrder(listed, block_shards).samples_at(
        positions, seed
    )


@given(start=st.integers(0, 400), lengths=st.lists(st.integers(0, 50), max_size=8))
def test_the_order_does_not_depend_on_how_much_is_asked_for_at_once(start: int, lengths: list[int]) -> None:
    order = BlockOrder(ListedSizes([5, 9, 1, 0, 30, 12]), 2)
    whole = order.samples_at(range(start, start + sum(lengths)), 3)
    pieces = []
    for length in lengths:
        pieces += order.samples_at(range(start, start + length), 3)
        start += length
    assert pieces == whole


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    order = BlockOrder(EqualSizes(50, 4), 8)
    first, second = (order.samples_at(range(epoch * 200, epoch * 200 + 200), 1) for epoch in (0, 1))
    assert first != second
    assert order.samples_at(range(200), 2) != first


PINNED = [10, 12, 25, 13, 14, 8, 8, 10, 7, 6, 4, 11, 5, 9]
PINNED_FAR = [84906749132, 17785149888, 61088179336]


def test_the_order_never_changes() -> None:
    """A release that changed it would repeat some samples of a running job, and leave others out."""
    assert BlockOrder(EqualSizes(7, 4, 26), 3).samples_at(range(20, 34), 11) == PINNED
    far = BlockOrder(EqualSizes(10**8, 1220), 16).samples_at(range(10**12, 10**12 + 3), 7)
    assert far == PINNED_FAR


def test_a_hundred_million_shards_take_no_memory() -> None:
    tracemalloc.start()
    try:
        order = BlockOrder(EqualSizes(10**8, 10_000), 16)
        for epoch in range(4):
            order.samples_at(range(epoch * 10**12 + 77, epoch * 10**12 + 1077), 5)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@given(size=st.integers(1, 10**6), key=st.integers(0, 2**64 - 1), data=st.data())
def test_the_index_of_a_value_is_where_the_permutation_has_it(size: int, key: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, size - 1))
    assert unpermute(permute(index, size, key), size, key) == index


@pytest.mark.parametrize("num_samples", [0, 20, 31])
def test_numbers_that_do_not_fit_together_are_named(num_samples: int) -> None:
    with pytest.raises(
        ValueError, match=f"3 shards with samples_per_shard=10 .* num_samples={num_samples} does not fit"
    ):
        EqualSizes(3, 10, num_samples)


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
    window.record(shard, NoClaim.FETCHED_BY_OTHER, 0.0)
    assert window.next(0.1) == 8
    assert window.next(0.3) == 7
    window.record(7, NoClaim.PRESENT, 0.3)
    assert window.next(9.0) == 9


def test_a_full_cache_stops_everything_for_a_while_or_until_the_block_is_read() -> None:
    window = _window()
    assert window.next(0.0) == 7
    window.record(7, NoClaim.FULL, 0.0)
    assert window.next(0.5) is None
    assert window.wake_at() == 1.0
    assert window.next(1.0) == 7
    window.record(7, NoClaim.FULL, 1.0)
    window.move([[4, 5], [1]], 0)
    assert window.next(1.1) == 4


def test_a_shard_that_could_not_be_fetched_is_tried_later() -> None:
    window = _window()
    assert window.next(0.0) == 7
    window.record(7, None, 0.0, failed=True)
    assert [window.next(1.0), window.next(2.5)] == [8, 7]


def test_what_is_here_is_not_fetched_again_when_the_window_moves() -> None:
    window = _window()
    for shard in (7, 8, 9, 4):
        assert window.next(0.0) == shard
        window.record(shard, None, 0.0)
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


def test_ranges_of_a_pattern_count_from_the_last_one_on() -> None:
    shards = shard_list.from_pattern("s3://b/{08..11}/part-{0..2}.tar?v={7..7}")
    assert shards.num_shards == 12
    assert [shards.name(number) for number in (0, 2, 3, 11)] == [
        "s3://b/08/part-0.tar?v=7",
        "s3://b/08/part-2.tar?v=7",
        "s3://b/09/part-0.tar?v=7",
        "s3://b/11/part-2.tar?v=7",
    ]


def test_ten_million_shards_are_no_list() -> None:
    shards = shard_list.from_pattern("https://host/c4/{0000000..9999999}.mds")
    assert (shards.num_shards, shards.name(1234567)) == (10**7, "https://host/c4/1234567.mds")


def test_a_name_without_a_range_is_one_shard() -> None:
    shards = shard_list.from_pattern("https://host/a.mds")
    assert (shards.num_shards, shards.name(0)) == (1, "https://host/a.mds")


def test_a_range_that_runs_backwards_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shards='x\{9\.\.1\}': the range 9\.\.1 has no number"):
        shard_list.from_pattern("x{9..1}")


def test_a_copy_elsewhere_is_the_same_data_and_other_shards_are_not() -> None:
    here, there = shard_list.from_pattern("s3://b/c/{0..9}.tar"), shard_list.from_pattern("https://mirror/d/{0..9}.tar")
    assert here.identity == there.identity != shard_list.from_pattern("s3://b/c/{0..8}.tar").identity
    names = ["x/1.tar", "x/2.tar"]
    moved = shard_list.from_names(["gs://y/z/1.tar", "gs://y/z/2.tar"])
    assert shard_list.from_names(names).identity == moved.identity != shard_list.from_names(names[::-1]).identity
    first = shard_list.from_function(lambda number: f"a/{number}", 5)
    assert first.identity == shard_list.from_function(lambda number: f"b/{number}", 5).identity
    assert first.identity != shard_list.from_function(lambda number: f"a/{number}", 6).identity


def test_a_function_needs_the_number_and_a_list_a_name() -> None:
    with pytest.raises(ValueError, match=r"num_shards=None: .* Give num_shards"):
        shard_list.from_function(str, None)
    with pytest.raises(ValueError, match=r"shards=\[\]"):
        shard_list.from_names([])
