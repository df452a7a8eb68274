"""What a job that is not submitted would get: the real policy, asked about the present market and one job more."""

from dataclasses import replace

from kit.market import NOW, job, market, nodes
from shoal_service.control.market.outlook import forecast_start
from shoal_service.core.scheduling.decide import decide
from shoal_service.core.scheduling.market import Project
from shoal_workers.contract.checks.spec_errors import parse_spec

SPEC = parse_spec(
    {
        "data": {"corpus": "python-stdlib"},
        "stop": {"steps": 100},
        "batch": {"global_size": 8, "micro_size": 1},
        "elasticity": {"min_workers": 2, "max_workers": 4},
    }
)


def test_a_job_with_room_starts_at_once() -> None:
    start = forecast_start(market([], nodes(4.0)), SPEC, (), decide, NOW)
    assert start.workers is not None and 2 <= start.workers <= 4
    assert (start.position, start.expected_at) == (None, NOW)
    assert start.reason == "Starting with 4 workers of 2 to 4 (1 CPU each)."


def test_a_job_without_room_waits_behind_the_queue_for_those_that_hold_it() -> None:
    running, first = (
        job("job-old", 4, 4, granted=4, left=340.0, priority=5),
        job("job-first", 4, priority=5, left=340.0),
    )
    state = market([replace(running, held=4), first], nodes(4.0))
    start = forecast_start(state, SPEC, (), decide, NOW)
    assert (start.workers, start.position) == (None, 2)
    assert "Needs 2 workers" in start.reason
    assert start.expected_at is None or start.expected_at > NOW


def test_a_limit_of_the_project_is_named() -> None:
    start = forecast_start(market([], nodes(4.0), Project(name="default", limit=1)), SPEC, (), decide, NOW)
    assert start.workers is None and "its limit" in start.reason
