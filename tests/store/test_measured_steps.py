"""The newest steps of jobs, from which predictions for the same hardware are corrected."""

from typing import Any

from kit.views import series_point
from shoal_service.store import Store
from shoal_service.store.curves import JobSteps, newest_steps


def _points(first: int, last: int, step_s: float, **parts: Any) -> tuple[Any, ...]:
    return tuple(series_point(step, step_s=step_s, **parts) for step in range(first, last + 1))


def _read(store: Store) -> list[JobSteps]:
    with store.read() as tx:
        return newest_steps(tx)


def test_a_job_counts_once_it_has_33_steps_of_one_group(store: Store, attempt: Any, spec: Any) -> None:
    attempt.report(series=_points(1, 32, 1.5))
    assert _read(store) == []
    attempt.report(series=_points(33, 34, 9.0))
    [found] = _read(store)
    assert (found.workers, found.step_s) == (2, 1.5)
    assert found.spec.model == spec.model
    attempt.report(series=_points(35, 36, 1.5, generation=2))
    assert _read(store) == [], "the newest steps are of two groups"
