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
from typing import Any, Self

from shoal_workers.contract.spec import JobSpec, Precision


@dataclass(frozen=True, slots=True)
class ScalePolicy:
    """How fast the scale changes, and its limits."""

    initial: float = 2.0**16
    growth_interval: int = 2000
    """Finite steps in a row after which the scale is doubled."""
    smallest: float = 1.0
    """A step that is not finite even at this scale did not overflow fp16: see `ScaleVerdict.is_hopeless`."""
    largest: float = 2.0**24
    """fp32 losses times the scale stay far from fp32's own limit."""

    def __post_init__(self) -> None:
        if not 0 < self.smallest <= self.initial <= self.largest:
            raise ValueError(
                f"a loss scale needs 0 < smallest {self.smallest:g} <= initial {self.initial:g} "
                f"<= largest {self.largest:g}."
            )
        if self.growth_interval < 1:
            raise ValueError(f"growth_interval {self.growth_interval} must be at least 1 step.")


@dataclass(frozen=True, slots=True)
class LossScale:
    """The state between two steps."""

    scale: float
    num_finite: int = 0
    """Finite steps since the scale last changed."""
    weight: float | None = None
    """A power of two near the mean weight of a micro-batch; 1: losses are means; None means not known yet."""

    @classmethod
    def first(cls, policy: ScalePolicy) -> Self:
        return cls(policy.initial)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        weight = value.get("weight")
        return cls(float(value["scale"]), int(value["num_finite"]), None if weight is None else float(weight))

    def to_json(self) -> dict[str, Any]:
        """Returns what the checkpoint's `extra` holds; it is exact, because the scale is a power of two."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ScaleVerdict:
    """What follows from one step's outcome."""

    state: LossScale
    """Scale for the next step."""
    updates: bool
    """The optimizer may step, with gradients and norm divided by the scale of this step."""
    is_hopeless: bool
    """The gradients are not finite at the smallest scale: fp16 did not overflow, so the job's rule for non-finite steps
    applies."""
    reason: str


def after_step(state: LossScale, *, is_finite: bool, policy: ScalePolicy) -> ScaleVerdict:
    """The verdict on a step that ran with `state.scale`; `is_finite`: loss and gradient norm of all ranks were."""
    if not is_finite:
        if state.scale <= policy.smallest:
            reason = f"not finite at the smallest loss scale {policy.smallest:g}"
            smallest = replace(state, scale=policy.smallest, num_finite=0)
            return ScaleVerdict(smallest, updates=False, is_hopeless=True, reason=reason)
        lower = max(state.scale / 2, policy.smallest)
        reason = f"not finite: loss scale {state.scale:g} -> {lower:g}"
        halved = replace(state, scale=lower, num_finite=0)
        return ScaleVerdict(halved, updates=False, is_hopeless=False, reason=reason)
    num_finite = state.num_finite + 1
    if num_finite < policy.growth_interval:
        same = replace(state, num_finite=num_finite)
        return ScaleVerdict(same, updates=True, is_hopeless=False, reason=f"finite: loss scale {state.scale:g}")
    higher = min(state.scale * 2, policy.largest)
    reason = f"{num_finite} finite steps: loss scale {state.scale:g} -> {higher:g}"
    doubled = replace(state, scale=higher, num_finite=0)
    return ScaleVerdict(doubled, updates=True, is_hopeless=False, reason=reason)


def needs_loss_scale(*precisions: Precision) -> bool:
    """Return whether gradients pass through fp16, if they pass through these."""
    return Precision.FP16 in precisions


class Scaling:
    """The loss scale of one generation, equal on all its ranks. Training thread only."""

    def __init__(self, spec: JobSpec, policy: ScalePolicy | None = None) -> None:
        self._policy = policy or ScalePolicy()
        self._state: LossScale | None = None
        if needs_loss_scale(spec.precision, spec.reduce_precision, *spec.module_precision.values()):
            self._state = LossScale.first(self._policy)

    @property
    def scale(self) -> float:
        """The factor of the next step's losses: a power of two."""
        return 1.0 if self._state is None else self._state.scale / (self._state.weight or 1.0)

    def restore(self, saved: dict[str, Any] | None) -> None:
        """Continue with what `to_json` returned. None if the state was saved by a run that needed no scale."""
        if self._state is not None and saved is not None:
            self._state = LossScale.from_json(saved)

    def learn(self, weight: float) -> bool:
        """Called after each vote with the mean weight of the step's micro-batches. Returns whether this has changed the
        scale, also of the step that has run: once in a run at most, and never if losses are means."""
        if self._state is None or self._state.weight is not None or not weight:
            return False
        self._state = replace(self._state, weight=2.0 ** round(math.log2(weight)))
        return self._state.weight != 1

    def update(self, *, is_finite: bool) -> ScaleVerdict | None:
        """Called after each step whose loss is finite; `is_finite`: its gradients are finite as well. None if there is
        no scale."""
        if self._state is None:
            return None
        verdict = after_step(self._state, is_finite=is_finite, policy=self._policy)
        self._state = verdict.state
        return verdict

    def to_json(self) -> dict[str, Any] | None:
        """The state as a snapshot keeps it in `extra`."""
        return None if self._state is None else self._state.to_json()
