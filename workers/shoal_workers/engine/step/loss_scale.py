"""Dynamic loss scaling for fp16: the factor that the next step's losses are multiplied by.

    losses x scale -> backward -> gradients x scale, reduced -> the vote tells whether all of them are finite
       finite        divide norm and gradients by the scale, update        after `growth_interval` such steps: scale x 2
       not finite    nothing is updated, the step's samples are used up    scale / 2

The smallest fp16 number is 6e-8, and many gradients are smaller. The largest is 65504, so a scale that is too large
shows in the same step. The policy is that of torch.amp.GradScaler (Micikevicius et al. 2018, section 3.2). All factors
are powers of two, so scaling is exact.

Gradients of sums with weights are larger than those of means. So the scale is divided by a power of two near the mean
weight of the micro-batches in the first step, which is computed twice for this.

A scale is needed if gradients pass through fp16, in the backward pass or between ranks. Otherwise it is 1 and has no
state. The state is a function of the verdicts alone, so it is equal on every rank. It is part of `extra` in snapshots
and checkpoints, so a group that re-forms continues with the scale of the group before. Called by the trainer.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from shoal_workers.contract.spec import JobSpec, Precision


@dataclass(frozen=True, slots=True)
class ScalePolicy:
    """How fast the scale changes, and its limits."""

    initial: float = 2.0**16
    growth_interval: int = 2000
    """Finite steps in a row after which the scale is doubled."""
    smallest: float = 1.0
    """A step that is not finite even at this scale did not overflow fp16."""
    largest: float = 2.0**24
    """fp32 losses times the scale stay far from fp32's own limit."""


@dataclass(frozen=True, slots=True)
class LossScale:
    """The state between two steps."""

    scale: float
    num_finite: int = 0
    """Finite steps since the scale last changed."""
    weight: float | None = None
    """A power of two near the mean weight of a micro-batch; 1: losses are means; None means not known yet."""


def after_step(state: LossScale, *, is_finite: bool, policy: ScalePolicy) -> LossScale:
    """The scale for the next step, after one that ran with `state.scale`. `is_finite`: loss and gradient norm of all
    ranks were."""
    if not is_finite:
        return replace(state, scale=max(state.scale / 2, policy.smallest), num_finite=0)
    num_finite = state.num_finite + 1
    if num_finite < policy.growth_interval:
        return replace(state, num_finite=num_finite)
    return replace(state, scale=min(state.scale * 2, policy.largest), num_finite=0)


class Scaling:
    """The loss scale of one generation, equal on all its ranks. Training thread only."""

    def __init__(self, spec: JobSpec, policy: ScalePolicy | None = None) -> None:
        self._policy = policy or ScalePolicy()
        self._state: LossScale | None = None
        if Precision.FP16 in (spec.precision, spec.reduce_precision, *spec.module_precision.values()):
            self._state = LossScale(self._policy.initial)

    @property
    def scale(self) -> float:
        """The factor of the next step's losses: a power of two."""
        return 1.0 if self._state is None else self._state.scale / (self._state.weight or 1.0)

    def restore(self, saved: dict[str, Any] | None) -> None:
        """Continue with what `to_json` returned. None if the state was saved by a run that needed no scale."""
        if self._state is not None and saved is not None:
            self._state = LossScale(**saved)

    def learn(self, weight: float) -> bool:
        """Called after each vote with the mean weight of the step's micro-batches. Returns whether this has changed the
        scale, also of the step that has run: once in a run at most, and never if losses are means."""
        if self._state is None or self._state.weight is not None or not weight:
            return False
        self._state = replace(self._state, weight=2.0 ** round(math.log2(weight)))
        return self._state.weight != 1

    def update(self, *, is_finite: bool) -> bool:
        """Called after each step whose loss is finite; `is_finite`: its gradients are finite as well. Returns whether
        fp16 may have overflowed, so that the step is skipped. Otherwise the job's rule for non-finite steps applies:
        there is no scale, or it was the smallest one."""
        if self._state is None:
            return False
        before, self._state = self._state, after_step(self._state, is_finite=is_finite, policy=self._policy)
        return not is_finite and before.scale > self._policy.smallest

    def to_json(self) -> dict[str, Any] | None:
        """The state as a snapshot keeps it in `extra`: exact, because the scale is a power of two."""
        return None if self._state is None else asdict(self._state)
