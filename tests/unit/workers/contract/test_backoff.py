"""The pause before a retry."""

import pytest

from shoal_workers.contract.backoff import backoff_s


def test_the_pause_doubles_up_to_the_longest() -> None:
    assert [backoff_s(failures, first_s=0.5, longest_s=3.0) for failures in range(1, 6)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert backoff_s(10_000, first_s=1.0, longest_s=60.0) == 60.0


@pytest.mark.parametrize(("spread", "pause_s"), [(0.0, 1.0), (0.5, 1.5), (1.0, 2.0)])
def test_the_spread_shortens_it_by_up_to_a_half(spread: float, pause_s: float) -> None:
    assert backoff_s(2, first_s=1.0, spread=spread) == pause_s
