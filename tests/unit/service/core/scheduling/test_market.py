"""Rates between, below and above the known world sizes."""

import pytest

from shoal_service.core.scheduling.market import ThroughputCurve

CURVE = ThroughputCurve((2, 4, 8), (10.0, 16.0, 24.0))


@pytest.mark.parametrize(
    ("workers", "rate"),
    [(0, 0.0), (1, 5.0), (2, 10.0), (3, 13.0), (4, 16.0), (6, 20.0), (8, 24.0), (100, 24.0)],
)
def test_the_rate_is_interpolated_between_the_known_sizes(workers: int, rate: float) -> None:
    assert CURVE.rate(workers) == pytest.approx(rate)


def test_a_linear_curve_scales_perfectly_up_to_its_largest_size() -> None:
    curve = ThroughputCurve.linear(3.0, 4)
    assert [curve.rate(n) for n in (1, 2, 4, 5)] == [3.0, 6.0, 12.0, 12.0]


def test_sizes_must_rise() -> None:
    with pytest.raises(AssertionError):
        ThroughputCurve((4, 2), (1.0, 2.0))
