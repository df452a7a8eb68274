"""System metrics of a job over HTTP."""

from collections.abc import Callable
from typing import Any

import pytest

from shoal_api.client import BadRequest
from shoal_service.core.system_metrics import SystemMetric, SystemSample

SAMPLES = tuple(
    SystemSample(at=1000.0 + 10 * number, generation=1, values={"busy": (0.5, 0.25, 0.75, 1.0)}) for number in range(3)
)


def test_a_metric_comes_as_columns_by_rank(service: Any, supervise: Callable[..., str]) -> None:
    found = service.client.system(supervise(system=SAMPLES))
    assert (found.metric, found.metrics, found.width_s) == (SystemMetric.BUSY, (SystemMetric.BUSY,), 10.0)
    assert found.at == (1000.0, 1010.0, 1020.0) and found.ranks == (0, 1, 2, 3)
    assert found.values == ((0.5,) * 3, (0.25,) * 3, (0.75,) * 3, (1.0,) * 3)


def test_some_ranks_and_a_later_time_are_chosen(service: Any, supervise: Callable[..., str]) -> None:
    found = service.client.system(supervise(system=SAMPLES), ranks="0,2-9000000", after=1005.0)
    assert found.ranks == (0, 2, 3) and found.at == (1010.0, 1020.0)


@pytest.mark.parametrize("ranks", ["a", "1-", "-1", "1,,2", "1;2"])
def test_ranks_that_are_no_numbers_are_refused(service: Any, supervise: Callable[..., str], ranks: str) -> None:
    with pytest.raises(BadRequest) as caught:
        service.client.system(supervise(system=SAMPLES), ranks=ranks)
    assert "0,4-7" in str(caught.value)


def test_a_job_that_has_measured_nothing_has_empty_columns(service: Any, supervise: Callable[..., str]) -> None:
    assert service.client.system(supervise()).at == ()
