"""Correct predicted step times by the measured steps of jobs on the same hardware, and estimate an error bar. Pure.

The factor is the median ratio of measured and predicted steps; the fewer jobs there are, the nearer it is to 1. 80 % of
runs stay within the error bar. Without any job it is that of published runs on other machines (bench/published_runs.py,
leave one source out); with more jobs it approaches their spread. If any jobs train the same model with the same batch,
only those are used.
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
"""Weight of the uncorrected prediction, in jobs."""
_WITHIN_80_PERCENT = 1.28
"""Standard deviations of a normal distribution to each side."""


@dataclass(frozen=True, slots=True)
class Observation:
    """Predicted and measured time of a step of one job."""

    predicted_s: float
    measured_s: float
    is_same_model: bool = False
    """True if the job trains the model that the prediction is for, with the same batch."""


def estimate_correction(observations: Sequence[Observation], kind: DeviceKind) -> StepCorrection:
    """Return the factor for predicted step times and its error bar."""
    jobs = [job for job in observations if job.is_same_model] or observations
    ratios = [math.log(job.measured_s / job.predicted_s) for job in jobs]
    prior = math.log1p(_PUBLISHED_ERROR[kind]) / _WITHIN_80_PERCENT
    weight = len(ratios) / (len(ratios) + _PRIOR_JOBS)
    center = weight * median(ratios) if ratios else 0.0
    variance = (_PRIOR_JOBS * prior**2 + sum((ratio - center) ** 2 for ratio in ratios)) / (_PRIOR_JOBS + len(ratios))
    error = math.expm1(_WITHIN_80_PERCENT * math.sqrt(variance))
    return StepCorrection(factor=math.exp(center), error=error, num_jobs=len(ratios))


def apply_correction(correction: StepCorrection, ranking: Ranking) -> Ranking:
    """Return the ranking with corrected step times, in the same order."""
    compared = ranking.compared

    def correct(prediction: Prediction) -> Prediction:
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
            "predictions": tuple(map(correct, ranking.predictions)),
            "compared": None if compared is None else correct(compared),
            "correction": correction,
        }
    )
