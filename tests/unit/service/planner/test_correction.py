"""Predictions corrected by measured jobs, and their error bars."""

from typing import Any

import pytest

from shoal_service.control.planning import MeasuredSteps, PlanRequest, answer
from shoal_service.core.hardware_profile import DeviceKind
from shoal_service.planner.correction import Observation, estimate_correction
from shoal_service.planner.gpus import PROFILES
from shoal_service.planner.report import predict_planned_step

SPEC: dict[str, Any] = {"stop": {"steps": 1}, "data": {"corpus": "python-stdlib"}}


def test_without_jobs_the_error_bar_is_that_of_published_runs() -> None:
    prior = estimate_correction((), DeviceKind.GPU)
    assert (prior.factor, prior.num_jobs) == (1.0, 0)
    assert prior.error == pytest.approx(0.15)


def test_more_jobs_that_agree_move_the_prediction_further_and_narrow_the_bar() -> None:
    found = [estimate_correction([Observation(1.0, 1.2)] * number, DeviceKind.GPU) for number in (0, 1, 3, 20)]
    assert [correction.factor for correction in found] == sorted(correction.factor for correction in found)
    assert found[-1].factor == pytest.approx(1.2, rel=0.02)
    errors = [correction.error for correction in found]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.05


def test_jobs_that_disagree_widen_the_bar() -> None:
    apart = [Observation(1.0, ratio) for ratio in (0.5, 0.9, 1.1, 2.0)]
    found = estimate_correction(apart, DeviceKind.GPU)
    assert found.error > 0.5 and 0.9 < found.factor < 1.1


def test_jobs_of_the_same_model_count_alone() -> None:
    found = estimate_correction([Observation(1.0, 3.0), Observation(1.0, 1.1, is_same_model=True)], DeviceKind.GPU)
    assert found.num_jobs == 1 and found.factor < 1.1


def test_an_answer_is_corrected_by_the_jobs_of_its_hardware(job: Any) -> None:
    sharded: dict[str, Any] = {"parallelism": {"dp_shard": "auto"}}
    request = PlanRequest(spec={**SPEC, **sharded}, workers=4)
    before = answer(request, PROFILES).ranking
    predicted_s = predict_planned_step(job(**sharded), 4, PROFILES["cpu"])
    assert predicted_s == pytest.approx(before.predictions[0].step_s)
    measured = [MeasuredSteps(spec=job(**sharded), workers=4, step_s=2 * predicted_s)]
    after = answer(request, PROFILES, measured).ranking
    assert after.correction is not None and after.correction.num_jobs == 1
    best, factor = after.predictions[0], after.correction.factor
    assert 1.3 < factor < 2 and best.step_s == pytest.approx(factor * before.predictions[0].step_s)
    assert sum(best.seconds.values()) == pytest.approx(best.step_s)
    assert best.tokens_per_s == pytest.approx(before.predictions[0].tokens_per_s / factor)
    on_gpus = answer(PlanRequest(spec=SPEC, gpus=4), PROFILES, measured).ranking
    assert on_gpus.correction is not None and on_gpus.correction.num_jobs == 0


def test_a_user_task_has_no_prediction_to_correct(job: Any) -> None:
    assert predict_planned_step(job(task="mine:Task", data={}), 2, PROFILES["cpu"]) is None
    own = PlanRequest(spec={"stop": {"steps": 1}, "task": "mine:Task"}, workers=2)
    assert answer(own, PROFILES).ranking.correction is None
