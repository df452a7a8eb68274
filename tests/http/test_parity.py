import math
from collections.abc import Callable
from typing import Any

from shoal_service.store import histories

Supervise = Callable[..., str]
Points = Callable[[dict[int, float]], Any]


def test_two_jobs_are_compared_and_the_client_reads_the_very_numbers(
    service: Any, supervise: Supervise, points: Points
) -> None:
    a, b = supervise(series=points({1: 1.0, 2: 0.1, 3: 3.0})), supervise(series=points({1: 1.0, 2: 0.2}))
    report = service.client.parity(a, b, max_points=10)
    assert report == service.store.reading(histories.parity)(a, b, max_points=10)
    assert (report.max_rel_diff, report.max_rel_diff_step, report.steps_only_in_job) == (0.5, 2, 1)
    assert [point.step for point in report.points] == [1, 2]
    assert not service.client.parity(a, b, tolerance=0.6).within_tolerance, "one has a step that the other has not"
    c = supervise(series=points({1: 1.0, 2: 0.1}))
    assert service.client.parity(c, b, tolerance=0.6).within_tolerance
    assert service.client.parity(a, a).bit_identical


def test_losses_that_are_not_finite_survive_the_wire(service: Any, supervise: Supervise, points: Points) -> None:
    a, b = supervise(series=points({1: math.nan, 2: 1.0})), supervise(series=points({1: 1.0, 2: 1.0}))
    answer = service.http.get(f"/v1/jobs/{a}/parity", params={"against": b, "max_points": 10})
    assert answer.json()["max_rel_diff"] is None and answer.json()["points"][0]["loss"] is None
    report = service.client.parity(a, b, max_points=10)
    assert report.max_rel_diff == math.inf and report.points[0].rel_diff == math.inf
    assert math.isnan(report.points[0].loss) and report.points[0].against == 1.0
    assert service.client.parity(a, supervise()).max_rel_diff is None


def test_the_other_job_must_be_named_and_exist(service: Any, supervise: Supervise) -> None:
    a = supervise()
    assert service.http.get(f"/v1/jobs/{a}/parity").status_code == 422
    missing = service.http.get(f"/v1/jobs/{a}/parity", params={"against": "job-nobody"})
    assert missing.status_code == 404 and "job-nobody" in missing.json()["detail"]
    assert service.http.get(f"/v1/jobs/{a}/parity", params={"against": a, "tolerance": "nan"}).status_code == 422
