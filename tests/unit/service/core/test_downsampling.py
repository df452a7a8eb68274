"""Means of series, samples of what ranks measure, and quantities in text."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.views import series_point
from shoal_service.core.downsampling import SeriesPoint, bucket_steps, downsample
from shoal_service.core.quantities import count_text, duration_text, size_text
from shoal_service.core.system_metrics import (
    LEVELS,
    MAX_BUCKETS,
    VALUES,
    SystemMetric,
    level_for,
    make_sample,
    pace_s,
)
from shoal_workers.contract.messages import StepPart, WorkerUse


def _point(step: int, loss: float = 1.0, val_loss: float | None = None) -> SeriesPoint:
    return series_point(step, loss=loss, tokens_per_s=5.0, step_s=0.1, val_loss=val_loss)


def test_a_bucket_holds_means_and_the_last_step() -> None:
    points = [_point(step, float(step)) for step in range(1, 7)]
    made = downsample(points, first_step=1, width=3)
    assert [(point.step, point.at, point.loss) for point in made] == [(3, 3.0, 2.0), (6, 6.0, 5.0)]


def test_validation_losses_are_averaged_over_those_that_there_are() -> None:
    points = [_point(1), _point(2, val_loss=3.0), _point(3, val_loss=5.0), _point(4)]
    assert [point.val_loss for point in downsample(points, first_step=1, width=4)] == [4.0]
    assert [point.val_loss for point in downsample(points[:1], first_step=1, width=4)] == [None]


def test_metrics_are_averaged_by_name_over_the_points_that_have_them() -> None:
    points = [
        _point(1).model_copy(update={"metrics": {"a": 1.0}}),
        _point(2).model_copy(update={"metrics": {"a": 3.0, "b": 5.0}, "val_metrics": {"a": 7.0}}),
        _point(3),
    ]
    [made] = downsample(points, first_step=1, width=3)
    assert made.metrics == {"a": 2.0, "b": 5.0}
    assert made.val_metrics == {"a": 7.0}


def test_a_gap_in_the_series_makes_no_point() -> None:
    made = downsample([_point(1), _point(100)], first_step=1, width=10)
    assert [point.step for point in made] == [1, 100]


@given(st.sets(st.integers(1, 10_000), min_size=1, max_size=200), st.integers(1, 50))
def test_there_are_at_most_the_requested_points_and_the_newest_is_among_them(steps: set[int], max_points: int) -> None:
    ordered = sorted(steps)
    width = bucket_steps(ordered[0], ordered[-1], max_points)
    made = downsample([_point(step) for step in ordered], first_step=ordered[0], width=width)
    assert 1 <= len(made) <= max_points
    assert made[-1].step == ordered[-1]
    assert [point.step for point in made] == sorted({point.step for point in made})


def test_what_a_script_reports_rarely_is_averaged_over_the_steps_that_have_it() -> None:
    unreported = {"lr": math.nan, "tokens_per_s": math.nan}
    points = [_point(1), _point(2).model_copy(update=unreported), _point(3).model_copy(update=unreported)]
    [mean] = downsample(points, first_step=1, width=3)
    assert (mean.lr, mean.tokens_per_s) == (0.1, 5.0)
    [none] = downsample(points[1:], first_step=1, width=3)
    assert math.isnan(none.lr) and math.isnan(none.tokens_per_s)


def test_a_number_that_is_not_reported_survives_json() -> None:
    """The journal of a supervisor is JSON, and keeps points that were not stored yet."""
    point = _point(1, math.nan).model_copy(update={"lr": math.nan})
    again = SeriesPoint.model_validate_json(point.model_dump_json())
    assert math.isnan(again.loss) and math.isnan(again.lr) and again.grad_norm == 1.0


WAITS = {StepPart.COMMUNICATION: 0.75, StepPart.FORWARD: 0.25}


def test_every_metric_has_a_value_and_every_part_of_a_step_is_a_metric() -> None:
    assert set(VALUES) == set(SystemMetric)
    assert {part.value for part in StepPart} <= {metric.value for metric in SystemMetric}


def test_a_sample_is_the_mean_of_each_ranks_measurements() -> None:
    uses = {
        0: [WorkerUse(at=1.0, cpu_cores=1.0, phases=WAITS), WorkerUse(at=2.0, cpu_cores=2.0)],
        2: [WorkerUse(at=1.0, cpu_cores=None, resident_bytes=1 << 30)],
    }
    sample = make_sample(uses, num_ranks=3, generation=4, at=9.0)
    assert (sample.at, sample.generation) == (9.0, 4)
    assert sample.values["cpu_cores"] == (1.5, None, None)
    assert sample.values["busy"] == (0.25, None, None) and sample.values["communication"] == (0.75, None, None)
    assert sample.values["memory_bytes"] == (None, None, pytest.approx(1 << 30, rel=1e-4))
    assert "gpu_watts" not in sample.values, "no rank has it"


def test_a_rank_on_a_gpu_has_no_busy_share_of_its_thread() -> None:
    use = WorkerUse(at=1.0, phases=WAITS, gpu_bytes=100, gpu_free_bytes=40, gpu_busy=0.5, gpu_watts=300.0)
    sample = make_sample({0: [use]}, num_ranks=1, generation=1, at=1.0).values
    assert "busy" not in sample and sample["gpu_memory_bytes"] == (60,) and sample["gpu_watts"] == (300.0,)


def test_the_finest_level_that_has_the_whole_range_is_read() -> None:
    assert level_for(0.0, 10.0 * (MAX_BUCKETS - 1)) == 10.0
    assert level_for(0.0, 10.0 * MAX_BUCKETS) == 40.0
    assert level_for(0.0, 1e12) == LEVELS[-1]


def test_more_ranks_are_sampled_less_often() -> None:
    assert (pace_s(1), pace_s(128), pace_s(1024)) == (10.0, 10.0, 80.0)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "?"), (-1, "?"), (0.03, "30 ms"), (1.26, "1.3 s"), (42, "42 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")],
)
def test_durations_are_rounded_for_people(value: float | None, text: str) -> None:
    assert duration_text(value) == text


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_not_a_duration(value: float) -> None:
    assert duration_text(value) == "?"


def test_sizes_have_binary_units() -> None:
    assert [size_text(n) for n in (10, 2048, 5 * 2**20)] == ["10 B", "2.0 KiB", "5.0 MiB"]


def test_one_of_a_kind_has_no_plural() -> None:
    assert [count_text(n, "step") for n in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
