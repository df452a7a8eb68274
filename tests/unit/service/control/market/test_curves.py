"""Throughput curves of jobs: predicted by the planner, corrected by measurements."""

from typing import Any

import pytest

from shoal_service.control.market.build import CurveBook, choose_sizes, corrected, predict, rising
from shoal_service.core.scheduling.market import ThroughputCurve
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.spec import JobSpec


def spec(max_workers: int = 4, **changes: Any) -> JobSpec:
    return parse_spec(
        {
            "data": {"corpus": "python-stdlib"},
            "stop": {"steps": 4},
            "batch": {"global_size": 32, "micro_size": 4},
            "elasticity": {"min_workers": 1, "max_workers": max_workers},
            **changes,
        }
    )


def test_the_planner_predicts_more_samples_per_second_with_more_workers() -> None:
    curve = predict(spec())
    assert curve.sizes == (1, 2, 3, 4)
    assert list(curve.rates) == sorted(curve.rates) and curve.rates[-1] < 4 * curve.rates[0]


def test_of_a_user_task_the_partition_of_the_batch_decides() -> None:
    user = spec(task="my_module:MyTask", data={})
    curve = predict(user)  # 8 micro-batches: 3 workers need as long as the one with 3, 4 workers 2 each
    assert curve.rate(3) / curve.rate(1) == pytest.approx(8 / 3 * 0.95**1.585, rel=1e-3)
    assert curve.rate(4) > curve.rate(3)


def test_a_predicted_curve_rises_everywhere_so_that_an_idle_cluster_is_used() -> None:
    assert rising({1: 10.0, 2: 9.0, 4: 30.0}) == {1: 10.0, 2: pytest.approx(10.1), 4: 30.0}
    assert rising({4: 10.0, 6: 8.0})[6] == pytest.approx(10.201)


def test_a_measured_size_keeps_its_rate_and_the_others_are_scaled_like_the_nearest_one() -> None:
    curve = corrected(ThroughputCurve((1, 2, 4, 8), (10.0, 18.0, 30.0, 40.0)), {1: 5.0, 8: 80.0})
    assert curve.rates == (5.0, 9.0, 60.0, 80.0)


def test_a_measurement_between_two_predicted_sizes_becomes_a_point_of_the_curve() -> None:
    assert corrected(ThroughputCurve((1, 4), (1.0, 4.0)), {3: 3.0}).sizes == (1, 3, 4)


def test_without_measurements_the_prediction_stays() -> None:
    curve = ThroughputCurve.linear()
    assert corrected(curve, {}) is curve


def test_jobs_of_equal_specs_share_one_prediction() -> None:
    book = CurveBook(())
    assert book.predicted(spec(), may_compute=False) is None
    first = book.predicted(spec(name="a"), may_compute=True)
    assert first is not None and book.predicted(spec(name="b", priority=5), may_compute=False) is first
    assert book.predicted(spec(max_workers=8), may_compute=False) is None


def test_few_sizes_of_a_large_job_are_predicted() -> None:
    assert choose_sizes(3) == [1, 2, 3]
    assert choose_sizes(100) == [1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 100]


def test_a_script_is_expected_to_gain_from_every_worker_and_shares_no_prediction_with_a_task() -> None:
    script = parse_spec({"script": {"file": "train.py"}, "elasticity": {"min_workers": 1, "max_workers": 4}})
    curve = predict(script)
    assert curve.rates == (1.0, pytest.approx(1.9), pytest.approx(3 * 0.95**1.585, rel=1e-3), pytest.approx(3.61))
    book = CurveBook(())
    task = parse_spec({"stop": {"steps": 4}, "data": {"corpus": "python-stdlib"}, "elasticity": {"max_workers": 4}})
    assert book.predicted(task.model_copy(update={"data": {}}), may_compute=True) != curve
    assert book.predicted(script, may_compute=True) == curve
