from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal_workers.engine.step.validation import validation_slices


@given(st.integers(1, 200), st.integers(1, 17), st.integers(1, 9))
def test_every_sample_counts_once_and_all_ranks_run_the_same_number(
    num_samples: int, micro_size: int, world: int
) -> None:
    by_rank = [validation_slices(num_samples, micro_size, rank, world) for rank in range(world)]
    assert len({len(own) for own in by_rank}) == 1
    counted = [(samples, weight) for own in by_rank for samples, weight in own if weight]
    assert sorted(index for samples, _ in counted for index in samples) == list(range(num_samples))
    assert all(weight == len(samples) for samples, weight in counted)


def test_padding_has_weight_zero_and_can_be_run() -> None:
    assert validation_slices(5, 2, 1, 2) == [(range(2, 4), 2), (range(2), 0)]
