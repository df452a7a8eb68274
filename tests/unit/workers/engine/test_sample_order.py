from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal_workers.contract.batch_partition import sample_at
from shoal_workers.engine.sample_order import samples_at


@given(st.integers(0, 2**40), st.integers(0, 300), st.integers(1, 5000) | st.integers(1, 2**45), st.integers(0, 2**63))
def test_many_positions_have_the_samples_that_each_has_alone(first: int, num: int, size: int, seed: int) -> None:
    first = min(first, 20 * size)  # several epochs of a small data set
    positions = range(first, first + num)
    assert samples_at(positions, num_samples=size, seed=seed) == [
        sample_at(at, num_samples=size, seed=seed) for at in positions
    ]
