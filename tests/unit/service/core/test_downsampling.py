import math

from hypothesis import given
from hypothesis import strategies as st

from shoal_service.core.downsampling import SeriesPoint, bucket_steps, downsample


def _point(step: int, loss: float = 1.0, val_loss: float | None = None) -> SeriesPoint:
    return SeriesPoint(
        step=step,
        at=float(step),
        loss=loss,
        grad_norm=1.0,
        lr=0.1,
        tokens_per_s=5.0,
        step_s=0.1,
        world_size=2,
        generation=1,
        val_loss=val_loss,
    )


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
