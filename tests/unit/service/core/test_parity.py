import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_service.core.parity import Parity, compare, differences
from shoal_workers.contract.checks.spec_errors import parse_spec

NAN, INF = math.nan, math.inf


def report(job: dict[int, float], against: dict[int, float], tolerance: float = 1e-5, points: int = 0) -> Parity:
    return compare(job.items(), against.items(), tolerance=tolerance, max_points=points)


def test_equal_losses_are_bit_identical() -> None:
    found = report({1: 2.5, 2: 2.25}, {1: 2.5, 2: 2.25})
    assert found.bit_identical and found.within_tolerance
    assert (found.steps_compared, found.max_abs_diff, found.max_rel_diff) == (2, 0.0, 0.0)
    assert found.first_step_different is None and found.max_rel_diff_step is None


def test_the_largest_difference_and_the_first_ones_are_named_with_their_step() -> None:
    found = report({1: 4.0, 2: 4.000001, 3: 2.5, 4: 0.1}, {1: 4.0, 2: 4.0, 3: 2.0, 4: 0.05})
    assert not found.bit_identical and not found.within_tolerance
    assert (found.max_abs_diff, found.max_abs_diff_step) == (0.5, 3)
    assert (found.max_rel_diff, found.max_rel_diff_step) == (0.5, 4)
    assert (found.first_step_different, found.first_step_over_tolerance) == (2, 3)
    assert found.steps_over_tolerance == 2


def test_a_difference_of_one_bit_is_within_tolerance_and_not_identical() -> None:
    found = report({1: 2.0}, {1: math.nextafter(2.0, 3.0)})
    assert found.within_tolerance and not found.bit_identical and found.first_step_different == 1


def test_steps_of_only_one_of_them_are_counted_and_not_compared() -> None:
    found = report({2: 1.0, 3: 1.0, 4: 1.0, 6: 1.0}, {1: 9.0, 3: 1.0, 4: 1.0, 5: 9.0})
    assert (found.steps_compared, found.steps_only_in_job, found.steps_only_in_against) == (2, 2, 2)
    assert not found.bit_identical and not found.within_tolerance and found.first_step_different is None


def test_a_job_that_trains_longer_is_not_the_same_and_one_that_begins_later_may_be() -> None:
    whole = dict.fromkeys(range(1, 65), 0.5)
    longer, later = report(whole | dict.fromkeys(range(65, 105), 0.5), whole), report({64: 0.5}, whole)
    assert (longer.bit_identical, longer.within_tolerance, longer.steps_only_in_job) == (False, False, 40)
    assert (later.bit_identical, later.within_tolerance, later.steps_only_in_against) == (True, True, 63)


def test_without_common_steps_there_is_no_parity() -> None:
    found = report({1: 1.0}, {2: 1.0})
    assert not found.within_tolerance and not found.bit_identical and found.max_rel_diff is None


@pytest.mark.parametrize(
    ("a", "b", "same"), [(NAN, NAN, True), (INF, INF, True), (NAN, 1.0, False), (INF, -INF, False)]
)
def test_a_loss_that_is_not_finite_equals_only_its_like(a: float, b: float, same: bool) -> None:
    found = report({1: a}, {1: b})
    assert found.bit_identical is same and found.within_tolerance is same
    assert "NaN" not in found.model_dump_json() and "Infinity" not in found.model_dump_json()


def test_of_a_long_series_the_worst_steps_are_shown() -> None:
    losses = dict.fromkeys(range(1, 1001), 1.0)
    found = report(losses | {700: 1.5}, losses, points=10)
    assert len(found.points) <= 10
    assert [p.step for p in found.points if p.rel_diff] == [700]
    assert len(report(losses, losses, points=1000).points) == 1000
    assert report(losses, losses).points == ()


@given(
    st.dictionaries(st.integers(0, 300), st.floats()),
    st.dictionaries(st.integers(0, 300), st.floats()),
    st.integers(1, 50),
)
def test_every_step_is_counted_once_and_the_comparison_is_symmetric(
    job: dict[int, float], against: dict[int, float], points: int
) -> None:
    job, against = dict(sorted(job.items())), dict(sorted(against.items()))
    found, other = report(job, against, points=points), report(against, job, points=points)
    assert found.steps_compared == len(job.keys() & against.keys())
    assert found.steps_only_in_job == len(job.keys() - against.keys()) == other.steps_only_in_against
    assert found.max_rel_diff == other.max_rel_diff and found.max_abs_diff == other.max_abs_diff
    assert found.max_rel_diff is None or found.max_rel_diff >= 0
    shown = found.points
    assert len(shown) <= points and [p.step for p in shown] == sorted({p.step for p in shown})
    assert max((p.rel_diff for p in shown), default=None) == found.max_rel_diff


def spec(**changes: Any) -> Any:
    return parse_spec({"data": {"corpus": "python-stdlib"}, "stop": {"steps": 10}, **changes})


def test_what_decides_about_the_losses_and_differs_is_listed() -> None:
    job = spec(seed=1, optimizer={"lr": 1e-3}, model={"dim": 64})
    found = differences(job, spec(model={"dim": 128}))
    assert {d.path: (d.value, d.against) for d in found} == {
        "seed": (1, 0),
        "optimizer.lr": (1e-3, 3e-4),
        "model.dim": (64, 128),
    }


def test_workers_names_and_checkpoints_make_no_difference() -> None:
    elastic = spec(name="other", elasticity={"max_workers": 4}, checkpoint={"every_steps": 1}, priority=3)
    assert differences(elastic, spec()) == ()
