"""Whether a job needs a loss scale, and the scale of one generation: `loss_scale` decides, this holds its state.

The scale is needed where gradients pass through fp16, be it in the backward pass or between ranks. Everywhere else it
is 1 and has no state. The training loop asks for the scale before each step and says how the step went; the state
travels in `extra` of snapshots and checkpoints, so a group that re-forms goes on with the scale that the lost one had.
"""

from __future__ import annotations

from typing import Any

from shoal_workers.contract.spec import JobSpec
from shoal_workers.engine.parallel.compression import needs_loss_scale
from shoal_workers.engine.step.loss_scale import LossScale, ScalePolicy, ScaleVerdict, after_step


class Scaling:
    """Of one generation, equal on all its ranks. Training thread only."""

    def __init__(self, spec: JobSpec, saved: dict[str, Any] | None, policy: ScalePolicy | None = None) -> None:
        """`saved`: what `to_json` gave for the state that was restored; None: the run starts from its seed, or what it
        goes on from was made in another precision."""
        self._policy = policy or ScalePolicy()
        self._state: LossScale | None = None
        if needs_loss_scale(spec.precision, spec.reduce_precision):
            self._state = LossScale.from_json(saved) if saved is not None else LossScale.first(self._policy)

    @property
    def scale(self) -> float:
        """What the next step's losses are multiplied with: a power of two."""
        return 1.0 if self._state is None else self._state.scale

    def update(self, *, is_finite: bool) -> ScaleVerdict | None:
        """After each step whose loss is finite; `is_finite`: so are its gradients. None: there is no scale."""
        if self._state is None:
            return None
        verdict = after_step(self._state, is_finite=is_finite, policy=self._policy)
        self._state = verdict.state
        return verdict

    def to_json(self) -> dict[str, Any] | None:
        """For `extra`."""
        return None if self._state is None else self._state.to_json()
