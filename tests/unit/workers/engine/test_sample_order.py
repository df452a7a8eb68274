from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal_workers.contract.batch_partition import sample_at
from shoal_workers.engine.sample_order import samples_at, training_order, validation_order


@given(st.integers(0, 2**40), st.integers(0, 300), st.integers(1, 5000) | st.integers(1, 2**45), st.integers(0, 2**63))
def test_many_positions_have_the_samples_that_each_has_alone(first: int, num: int, size: int, seed: int) -> None:
    first = min(first, 20 * size)  # several epochs of a small data set
    positions = range(first, first + num)
    assert samples_at(positions, num_samples=size, seed=seed) == [
        sample_at(at, num_samples=size, seed=seed) for at in positions
    ]


def test_a_data_set_may_have_an_order_of_its_own() -> None:
    class Backwards(list[int]):
        def samples_at(self, positions: range, seed: int) -> list[int]:
            return [len(self) - 1 - position % len(self) + seed for position in positions]

    assert training_order(Backwards(range(10)), range(8, 12), seed=0) == [1, 0, 9, 8]
    assert training_order(list(range(10)), range(8, 12), seed=0) == samples_at(range(8, 12), num_samples=10, seed=0)


def test_a_validation_reads_a_draw_of_the_whole_split_that_is_always_the_same() -> None:
    by_class = [0] * 300 + [1] * 300
    drawn = validation_order(by_class, 256, seed=1)
    assert len(set(drawn)) == 256 and 90 <= sum(by_class[index] for index in drawn) <= 166
    assert drawn == validation_order(by_class, 256, seed=2), "the same for a job with another seed"
    assert drawn[:100] == validation_order(by_class, 100, seed=1)
    assert validation_order(by_class, 600, seed=1) == validation_order(by_class, 10**9, seed=1) == list(range(600))


def test_an_order_of_its_own_is_that_of_a_validation_if_it_names_each_sample_once() -> None:
    class Ordered(list[int]):
        def samples_at(self, positions: range, seed: int) -> list[int]:
            return [self[position] for position in positions]

    assert validation_order(Ordered([5, 3, 1, 0, 2, 4]), 3, seed=0) == [5, 3, 1]
    for order in ([5, 5, 1, 0, 2, 4], [5, 6, 1, 0, 2, 4]):
        assert validation_order(Ordered(order), 3, seed=0) == validation_order(list(range(6)), 3, seed=0)
