"""A pass that is slow is followed by a longer pause, within limits."""

import pytest

from shoal_service.control.control_loop import pauses_after


@pytest.mark.parametrize(
    ("pass_s", "requested_s", "reported_s"),
    [(0.0, 0.2, 0.2), (0.05, 0.2, 0.45), (0.3, 0.3, 1.0), (20.0, 1.0, 1.0)],
)
def test_a_request_waits_for_a_shorter_pause_than_reports_do(
    pass_s: float, requested_s: float, reported_s: float
) -> None:
    assert pauses_after(pass_s) == pytest.approx((requested_s, reported_s))
