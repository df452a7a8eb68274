"""The best value of a sweep so far, and how much its parameters matter."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_service.core.sweep_results import best_so_far, influences


def test_the_best_so_far_is_what_is_lower_than_everything_before() -> None:
    points = [(3.0, 1.0, "c"), (1.0, 5.0, "a"), (2.0, 6.0, "b"), (4.0, 1.0, "d"), (0.0, math.nan, "e")]
    assert best_so_far(points) == [(1.0, 5.0, "a"), (3.0, 1.0, "c")]


def test_what_decides_the_loss_is_first_and_what_does_not_has_no_share() -> None:
    draws = random.Random(4)
    labels = {f"job-{n}": {"lr": f"{10 ** draws.uniform(-5, -1):.4g}", "seed": str(n % 4)} for n in range(64)}
    losses = {job: abs(math.log10(float(own["lr"])) + 3) for job, own in labels.items()}
    first, second = influences(labels, losses)
    assert (first.label, second.label) == ("lr", "seed")
    assert first.share > 0.7 and second.share < 0.1
    assert first.direction is not None and abs(first.direction) < 0.4, "the best rate is in the middle"
    assert (first.num_values, first.num_jobs, second.num_values) == (64, 64, 4)


def test_the_direction_is_that_of_numbers_and_words_have_none() -> None:
    labels = {str(n): {"layers": str(n // 2), "name": "ab"[n % 2]} for n in range(8)}
    found = {one.label: one for one in influences(labels, {str(n): -float(n // 2) for n in range(8)})}
    assert found["layers"].direction == pytest.approx(-1)
    assert found["name"].direction is None and found["name"].share == 0


def test_a_diverged_job_counts_as_the_worst() -> None:
    labels = {str(n): {"lr": "high" if n < 2 else "low"} for n in range(4)}
    [found] = influences(labels, {"0": math.nan, "1": math.nan, "2": 1.0, "3": 1.0})
    assert found.share == 1


@pytest.mark.parametrize(
    "labels",
    [
        {"a": {"lr": "1"}, "b": {"lr": "2"}, "c": {"lr": "1"}},  # too few jobs
        {name: {"lr": "1"} for name in "abcde"},  # one value
        {name: {"name": name} for name in "abcde"},  # as many values as jobs
    ],
)
def test_what_cannot_be_judged_is_left_out(labels: dict[str, dict[str, str]]) -> None:
    assert influences(labels, {name: float(ord(name)) for name in labels}) == []


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(-10, 10)), min_size=4, max_size=40))
def test_shares_and_directions_are_within_their_bounds(jobs: list[tuple[int, float]]) -> None:
    labels = {str(n): {"x": str(value)} for n, (value, _) in enumerate(jobs)}
    for found in influences(labels, {str(n): loss for n, (_, loss) in enumerate(jobs)}):
        assert 0 <= found.share <= 1 and (found.direction is None or -1.000001 <= found.direction <= 1.000001)
