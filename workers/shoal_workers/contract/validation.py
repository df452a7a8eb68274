"""How validations of a job compare: the best ones so far, and whether it should stop early. Pure.

The engine and the supervisor fold the same reports with `judge`: the engine stops all ranks after the same validation
and saves what is among the best; the supervisor passes the standing on to the next group, and shows it.

    value  3.1   2.7   2.8   2.75  2.72        min_delta 0.1, patience 3
    since   0     0     1     2     3   -> the job stops
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from shoal_workers.contract.base import Frozen
from shoal_workers.contract.spec import ValidationSpec

LOSS = "loss"


class Score(Frozen):
    """The result of one validation."""

    step: int
    value: float


class Standing(Frozen):
    """What the validations of a job have shown so far."""

    metric: str = LOSS
    mode: str = "min"
    keep: int = 0
    """`checkpoint.keep_best`: how many of `best` have their checkpoints kept."""
    best: tuple[Score, ...] = ()
    """The best first; at least one once there was a validation."""
    reference: float | None = None
    """The value that the next one must improve by `validation.min_delta`."""
    judged_step: int = 0
    """Step of the newest validation in it."""
    num_since: int = 0
    """Validations since the last improvement."""

    @property
    def kept_steps(self) -> tuple[int, ...]:
        """Steps whose checkpoints retention keeps."""
        return tuple(score.step for score in self.best[: self.keep])


def judge(
    known: Standing | None, rule: ValidationSpec, keep: int, *, step: int, loss: float, metrics: Mapping[str, float]
) -> Standing:
    """Return the standing after a validation. A validation that was judged before, or has no finite value of the
    metric, does not count."""
    # values of another metric or mode cannot be compared: then the standing begins anew
    standing = Standing(metric=rule.metric, mode=rule.better, keep=keep)
    if known is not None and (known.metric, known.mode) == (rule.metric, rule.better):
        standing = known.model_copy(update={"keep": keep})
    value = loss if rule.metric == LOSS else metrics.get(rule.metric)
    if value is None or not math.isfinite(value) or step <= standing.judged_step:
        return standing
    sign = 1 if rule.better == "min" else -1
    is_improved = standing.reference is None or sign * value < sign * standing.reference - rule.min_delta
    ranked = sorted((*standing.best, Score(step=step, value=value)), key=lambda score: (sign * score.value, score.step))
    return standing.model_copy(
        update={
            "best": tuple(ranked[: max(1, keep)]),
            "reference": value if is_improved else standing.reference,
            "judged_step": step,
            "num_since": 0 if is_improved else standing.num_since + 1,
        }
    )


def is_exhausted(standing: Standing | None, rule: ValidationSpec) -> bool:
    """Return whether the job stops early: `validation.patience` validations in a row have improved nothing."""
    return standing is not None and rule.patience is not None and standing.num_since >= rule.patience


def why_exhausted(standing: Standing, rule: ValidationSpec) -> str:
    best = standing.best[0]
    delta = f" by {rule.min_delta:g}" if rule.min_delta else ""
    return (
        f"validation {standing.metric} did not improve{delta} on {standing.reference:.6g} in {standing.num_since} "
        f"validations (validation.patience {rule.patience}); best: {best.value:.6g} after step {best.step}"
    )
