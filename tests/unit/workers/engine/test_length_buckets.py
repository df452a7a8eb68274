"""Micro-batches of similar lengths: each sample once in an epoch, within the budget, with little padding, and the same
for everybody."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_workers.engine.length_buckets import Bucket, LengthBuckets, class_bounds


class Texts:
    """A dataset of texts of these lengths."""

    content_hash = "texts"

    def __init__(self, lengths: Any, budget: Any) -> None:
        self.lengths = lengths
        self.tokens_per_micro_batch = budget

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, int(self.lengths[index])


def _skewed(num: int, longest: int) -> np.ndarray[Any, Any]:
    return np.clip(np.random.default_rng(4).lognormal(4.0, 0.8, num).astype(np.int64), 1, longest)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(0, 200), st.integers(0, 2**32 - 1))
def test_each_epoch_has_every_sample_once_and_no_bucket_exceeds_the_budget(
    lengths: list[int], more: int, seed: int
) -> None:
    budget = max(lengths) + more
    buckets = LengthBuckets(Texts(lengths, budget), seed)
    for epoch in range(3):
        positions = range(epoch * len(buckets), (epoch + 1) * len(buckets))
        members = [buckets.members(position) for position in buckets.samples_at(positions, seed)]
        assert sorted(number for bucket in members for number in bucket) == list(range(len(lengths)))
        for bucket in members:
            assert bucket and len(bucket) * max(lengths[number] for number in bucket) <= budget


@given(st.integers(1, 1 << 30))
def test_the_lengths_of_a_class_differ_by_a_sixteenth_at_most(length: int) -> None:
    (bound,) = class_bounds(np.asarray([length])).tolist()
    assert length <= bound <= length * 17 / 16
    assert bound == length or length > 32


def test_epochs_have_other_buckets_in_another_order_and_seeds_too() -> None:
    data = Texts(_skewed(500, 512), 2048)
    buckets, others = LengthBuckets(data, 1), LengthBuckets(data, 2)
    num = len(buckets)
    first, second = ([set(buckets.members(at + epoch * num)) for at in range(num)] for epoch in range(2))
    assert first != second
    assert sum(one in second for one in first) < num / 4, "few buckets are the same"
    assert [set(others.members(at)) for at in range(num)] != first
    again = LengthBuckets(data, 1)
    assert [again.members(at) for at in reversed(range(num))] == [buckets.members(at) for at in reversed(range(num))]


def test_buckets_waste_little_where_full_padding_wastes_most() -> None:
    lengths = _skewed(5_000, 512)
    buckets = LengthBuckets(Texts(lengths, 4096), 0)
    groups = [buckets.members(at) for at in range(len(buckets))]
    computed = sum(len(group) * int(lengths[group].max()) for group in groups)
    assert 1 - lengths.sum() / computed < 0.04
    assert 1 - lengths.sum() / (512 * len(lengths)) > 0.8
    fill = [len(group) * int(lengths[group].max()) / 4096 for group in groups]
    assert np.median(fill) > 0.9


def test_a_bucket_has_the_samples_of_the_dataset() -> None:
    buckets = LengthBuckets(Texts([3, 3, 9], 9), 0)
    found = [buckets[at] for at in range(len(buckets))]
    assert all(isinstance(one, Bucket) for one in found)
    assert sorted(map(sorted, found)) == [[(0, 3), (1, 3)], [(2, 9)]]


def test_another_budget_is_another_order_of_the_data() -> None:
    hashes = {
        LengthBuckets(Texts(lengths, budget), 0).content_hash for lengths, budget in (([3], 4), ([3], 5), ([4], 4))
    }
    assert len(hashes) == 3


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (Texts([3], "8"), r"Texts\.tokens_per_micro_batch is '8'"),
        (Texts([9], 8), "the longest sample has 9 tokens, so it has no room"),
        (Texts(np.asarray([0, 1]), 8), "the smallest value 0"),
    ],
)
def test_what_is_no_budget_is_refused_in_words(data: Texts, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LengthBuckets(data, 0)


def test_an_order_of_its_own_or_no_lengths_are_refused() -> None:
    ordered: Any = Texts([3], 8)
    ordered.samples_at = lambda positions, seed: list(positions)
    with pytest.raises(TypeError, match="and Texts has samples_at"):
        LengthBuckets(ordered, 0)
    without: Any = Texts([3], 8)
    without.__class__ = type("Bare", (), {"tokens_per_micro_batch": 8, "__len__": lambda _: 1})
    del without.lengths
    with pytest.raises(TypeError, match="and Bare has no lengths"):
        LengthBuckets(without, 0)
