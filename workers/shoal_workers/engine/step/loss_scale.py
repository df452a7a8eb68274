"""Dynamic loss scaling for fp16: which factor the next step's losses are multiplied with. Pure; the engine obeys.

    losses x scale -> backward -> gradients x scale, reduced -> the vote says whether all are finite
       finite        divide norm and gradients by the scale, update        after `growth_interval` such steps: scale x 2
       not finite    nothing is updated, the step's samples are used up    scale / 2

The smallest fp16 number is 6e-8, and many gradients are smaller; the largest is 65504, and a scale that is too large
shows at once. The policy is that of torch.amp.GradScaler (Micikevicius et al. 2018, section 3.2). All factors are
powers of two, so scaling loses nothing. The state is a function of the verdicts alone, hence equal on every rank; it is
part of the checkpoint.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class ScalePolicy:
    """How fast the scale moves, and between what."""

    initial: float = 2.0**16
    growth_interval: int = 2000
    """Finite steps in a row after which the scale is doubled."""
    smallest: float = 1.0
    """A step that is not finite even so has not left the range of fp16: see `ScaleVerdict.is_hopeless`."""
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

    @classmethod
    def first(cls, policy: ScalePolicy) -> Self:
        return cls(policy.initial)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        return cls(scale=float(value["scale"]), num_finite=int(value["num_finite"]))

    def to_json(self) -> dict[str, Any]:
        """For the checkpoint's `extra`; exact, as a power of two is."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ScaleVerdict:
    """What one step's outcome means."""

    state: LossScale
    """For the next step."""
    updates: bool
    """The optimizer may step, with gradients and norm divided by the scale that this step had."""
    is_hopeless: bool
    """Not finite at the smallest scale: no overflow of fp16, so the job's rule for non-finite steps applies."""
    reason: str


def after_step(state: LossScale, *, is_finite: bool, policy: ScalePolicy) -> ScaleVerdict:
    """The verdict on a step that ran with `state.scale`; `is_finite`: loss and gradient norm of all ranks were."""
    if not is_finite:
        if state.scale <= policy.smallest:
            reason = f"not finite at the smallest loss scale {policy.smallest:g}"
            return ScaleVerdict(LossScale(policy.smallest), updates=False, is_hopeless=True, reason=reason)
        lower = max(state.scale / 2, policy.smallest)
        reason = f"not finite: loss scale {state.scale:g} -> {lower:g}"
        return ScaleVerdict(LossScale(lower), updates=False, is_hopeless=False, reason=reason)
    num_finite = state.num_finite + 1
    if num_finite < policy.growth_interval:
        kept = LossScale(state.scale, num_finite)
        return ScaleVerdict(kept, updates=True, is_hopeless=False, reason=f"finite: loss scale {state.scale:g}")
    higher = min(state.scale * 2, policy.largest)
    reason = f"{num_finite} finite steps: loss scale {state.scale:g} -> {higher:g}"
    return ScaleVerdict(LossScale(higher), updates=True, is_hopeless=False, reason=reason)
