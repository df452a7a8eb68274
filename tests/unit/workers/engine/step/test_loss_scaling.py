from __future__ import annotations

import pytest

from shoal_workers.contract.spec import JobSpec
from shoal_workers.engine.step.loss_scale import ScalePolicy
from shoal_workers.engine.step.loss_scaling import Scaling


def _spec(**settings: str) -> JobSpec:
    return JobSpec.model_validate({"stop": {"steps": 1}, **settings})


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16"}, {"reduce_precision": "bf16"}])
def test_without_fp16_there_is_no_scale(settings: dict[str, str]) -> None:
    scaling = Scaling(_spec(**settings), {"scale": 8.0, "num_finite": 1})
    assert scaling.scale == 1.0
    assert scaling.update(is_finite=False) is None
    assert scaling.to_json() is None


@pytest.mark.parametrize("settings", [{"precision": "fp16"}, {"reduce_precision": "fp16"}])
def test_fp16_anywhere_brings_the_scale(settings: dict[str, str]) -> None:
    scaling = Scaling(_spec(**settings), None)
    assert scaling.scale == ScalePolicy().initial
    verdict = scaling.update(is_finite=False)
    assert verdict is not None and not verdict.updates
    assert scaling.scale == ScalePolicy().initial / 2


def test_what_was_saved_goes_on() -> None:
    first = Scaling(_spec(precision="fp16"), None, ScalePolicy(growth_interval=2))
    first.update(is_finite=False)
    first.update(is_finite=True)
    second = Scaling(_spec(precision="fp16"), first.to_json(), ScalePolicy(growth_interval=2))
    for scaling in (first, second):
        scaling.update(is_finite=True)
    assert first.to_json() == second.to_json() == {"scale": ScalePolicy().initial, "num_finite": 0}
