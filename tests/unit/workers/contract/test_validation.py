"""How validations are judged: the best ones, and when a job stops early."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal_workers.contract.spec import ValidationSpec
from shoal_workers.contract.validation import Standing, is_exhausted, judge, why_exhausted


def _fold(rule: ValidationSpec, values: list[float], keep: int = 0) -> Standing:
    standing = None
    for number, value in enumerate(values, 1):
        standing = judge(standing, rule, keep, step=10 * number, loss=value, metrics={})
    assert standing is not None
    return standing


def test_a_job_stops_after_patience_validations_without_an_improvement() -> None:
    rule = ValidationSpec(patience=3, min_delta=0.1)
    assert not is_exhausted(_fold(rule, [3.1, 2.7, 2.8, 2.65]), rule)
    standing = _fold(rule, [3.1, 2.7, 2.8, 2.65, 2.68])
    assert is_exhausted(standing, rule)
    assert standing.best[0].step == 40, "an improvement that is too small for patience is one all the same"
    assert "did not improve by 0.1 on 2.7 in 3 validations" in why_exhausted(standing, rule)
    assert not is_exhausted(standing, ValidationSpec())


def test_a_larger_metric_of_the_tasks_own_is_better_if_the_spec_says_so() -> None:
    rule = ValidationSpec(metric="accuracy", mode="max")
    standing = judge(None, rule, 2, step=1, loss=1.0, metrics={"accuracy": 0.5})
    standing = judge(standing, rule, 2, step=2, loss=0.5, metrics={"accuracy": 0.4})
    standing = judge(standing, rule, 2, step=3, loss=0.4, metrics={"accuracy": 0.7})
    assert standing.kept_steps == (3, 1)
    assert judge(standing, rule, 2, step=4, loss=0.1, metrics={}) == standing, "it does not have the metric"


def test_another_metric_begins_anew() -> None:
    standing = _fold(ValidationSpec(), [3.0, 2.0])
    other = judge(standing, ValidationSpec(metric="f1", mode="max"), 0, step=30, loss=1.0, metrics={"f1": 0.1})
    assert [score.step for score in other.best] == [30] and other.num_since == 0


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), st.integers(0, 5))
def test_the_best_are_the_best_of_all_and_a_repeated_validation_changes_nothing(values: list[float], keep: int) -> None:
    standing = _fold(ValidationSpec(), values, keep)
    expected = sorted(zip(values, range(10, 10 * len(values) + 10, 10), strict=True))[: max(1, keep)]
    assert [(score.value, score.step) for score in standing.best] == expected
    again = judge(standing, ValidationSpec(), keep, step=10 * len(values), loss=-1e9, metrics={})
    assert again == standing
