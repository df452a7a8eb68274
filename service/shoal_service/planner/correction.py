"""Correction: predicted step times, by what jobs on the same hardware have measured, with an error bar.

The factor is the median ratio of measured and predicted steps, nearer to 1 the fewer jobs there are. The error bar is
what 80 % of runs stay within: without any job that of published runs on other people's machines (leave one source out,
bench/published_runs.py), then more and more the spread of the jobs themselves. Jobs that train the same model with the
same batch count alone, if there are any. `control/planning` calls it. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from shoal_service.core.hardware_profile import DeviceKind
from shoal_service.planner.ranking import Prediction, Ranking, StepCorrection

_PUBLISHED_ERROR = {DeviceKind.GPU: 0.15, DeviceKind.CPU: 2.7}
"""On a CPU steps take up to 3.7 times the prediction (docs/measured/layouts.md)."""
_PRIOR_JOBS = 1.0
"""The prediction weighs as much as so many jobs."""
_WITHIN_80_PERCENT = 1.28
"""Standard deviations of a normal distribution to each side."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The steps of one job."""

    predicted_s: float
    measured_s: float
    is_same_model: bool = False
    """It trains the model that the prediction is for, with the same batch."""


def correct(observations: Sequence[Observation], kind: DeviceKind) -> StepCorrection:
    """The factor for predicted step times and its error bar."""
    alike = [job for job in observations if job.is_same_model] or list(observations)
    ratios = [math.log(job.measured_s / job.predicted_s) for job in alike]
    prior = math.log1p(_PUBLISHED_ERROR[kind]) / _WITHIN_80_PERCENT
    weight = len(ratios) / (len(ratios) + _PRIOR_JOBS)
    center = weight * median(ratios) if ratios else 0.0
    variance = (_PRIOR_JOBS * prior**2 + sum((ratio - center) ** 2 for ratio in ratios)) / (_PRIOR_JOBS + len(ratios))
    error = math.expm1(_WITHIN_80_PERCENT * math.sqrt(variance))
    return StepCorrection(factor=math.exp(center), error=error, num_jobs=len(ratios))


def apply(correction: StepCorrection, ranking: Ranking) -> Ranking:
    """The ranking with corrected step times. The order stays."""
    compared = ranking.compared

    def corrected(prediction: Prediction) -> Prediction:
        factor = correction.factor
        return prediction.model_copy(
            update={
                "step_s": factor * prediction.step_s,
                "seconds": {part: factor * seconds for part, seconds in prediction.seconds.items()},
                "tokens_per_s": prediction.tokens_per_s / factor,
                "mfu": prediction.mfu / factor,
            }
        )

    return ranking.model_copy(
        update={
            "predictions": tuple(map(corrected, ranking.predictions)),
            "compared": None if compared is None else corrected(compared),
            "correction": correction,
        }
    )
