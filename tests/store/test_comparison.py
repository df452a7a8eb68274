import math
from collections.abc import Callable
from typing import Any

import pytest

from shoal_service.store import Store, histories, submissions
from shoal_workers.contract.checks.spec_errors import parse_spec

Submit = Callable[..., str]
Begin = Callable[..., Any]
Points = Callable[[dict[int, float]], Any]


@pytest.fixture
def trained(submit: Submit, begin: Begin, points: Points) -> Callable[..., str]:
    def train(losses: dict[int, float], **changes: Any) -> str:
        attempt = begin(submit(**changes))
        attempt.report(series=points(losses))
        return str(attempt.job_id)

    return train


def test_stored_losses_are_compared_as_exact_doubles(store: Store, trained: Callable[..., str]) -> None:
    losses = {step: math.exp(-step / 1000) * 5.5 for step in range(1, 2001)}
    first, second = trained(losses), trained(losses)
    assert store.reading(histories.compare_losses)(first, second).bit_identical
    third = trained(losses | {777: math.nextafter(losses[777], 0)})
    report = store.reading(histories.compare_losses)(first, third, max_points=100)
    assert (report.first_step_different, report.within_tolerance, report.steps_compared) == (777, True, 2000)
    assert any(point.step == 777 for point in report.points) and len(report.points) <= 100


def test_a_repeated_step_counts_with_its_last_values(
    store: Store, submit: Submit, begin: Begin, trained: Callable[..., str], points: Points
) -> None:
    attempt = begin(submit())
    attempt.report(series=points({1: 5.0, 2: 9.0}))
    attempt.report(series=points({2: 4.0}))
    assert store.reading(histories.compare_losses)(attempt.job_id, trained({1: 5.0, 2: 4.0})).bit_identical


def test_a_loss_that_was_not_a_number_is_one_still(store: Store, trained: Callable[..., str]) -> None:
    assert store.reading(histories.compare_losses)(trained({1: math.nan}), trained({1: math.nan})).bit_identical
    assert not store.reading(histories.compare_losses)(trained({1: math.nan}), trained({1: 1.0})).within_tolerance


def test_scripts_are_compared_in_the_steps_whose_losses_they_have_reported(
    store: Store, begin: Begin, points: Points
) -> None:
    spec = parse_spec({"script": {"file": "train.py"}})
    ids = [store.writing(submissions.create)(spec, idempotency_key=None, now=1.0)[0].id for _ in range(2)]
    for job_id in ids:
        begin(job_id).report(series=points({1: math.nan, 2: 0.5}))
    report = store.reading(histories.compare_losses)(*ids)
    assert (report.bit_identical, report.steps_compared, report.differs_in) == (True, 1, ())
