"""The order of streamed shards: each sample once in each epoch, block by block, however it is asked for."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_workers.contract.batch_partition import permute, unpermute
from shoal_workers.data.streaming.order import BlockOrder, EqualSizes, ListedSizes

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
