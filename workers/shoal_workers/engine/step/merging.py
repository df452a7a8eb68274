"""The state of an island as optimizer state, and what a round changes in it. Each element is on its own.

    outer           the weights that all islands share, after the rounds that this island has taken
    outer_momentum  of the outer step
    outer_sent      own weights at the end of the last round, whose difference was written
    outer_residual  what compression has left out of the differences so far (error feedback)

    difference      outer - sent + residual
    outer step      momentum <- mu momentum + g;  outer <- outer - lr (g + mu momentum) with Nesterov, as torch's SGD,
                    where g is the weighted mean of the members' differences
    own weights     of a member: weight + (new outer - sent): what it has trained since then stays
                    of another island: weight + (new outer - old outer): its whole difference counts in a later round
                    of a member that went back: as of a member, with outer + residual - its difference as it was
                    written in place of sent; the weights keep what compression has left out

Pairs exchange sent, not differences, because their outer weights differ. An island takes its outer step alone, and the
pair then averages. Momentum in the average itself, as in NoLoCo (Kolehmainen et al. 2025), would need other settings
than DiLoCo's: with those of `OuterSpec` the outer weights of 8 islands diverge.

    of a member     outer step with g = outer - sent;  outer <- outer + mean of sent - sent
    of another one  outer <- (outer + mean of sent) / 2
    in a round of all islands: outer <- mean of sent

All of it changes within an update of the optimizer, because between two updates the state may be a snapshot that others
read. Made by `named_optimizer`; `Islands` says what an update does beside its step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal_workers.contract.islands import OuterSpec
from shoal_workers.contract.optimizers import OUTER, OUTER_MOMENTUM, RESIDUAL, SENT
from shoal_workers.engine.parallel.cutting import local
from shoal_workers.engine.step.added_state import AddedState

PROGRESS = "island_"
"""What the settings of the groups begin with that say how far the island is."""


@dataclass(frozen=True, slots=True)
class Landing:
    """A round that an update takes. Tensors by parameter of the optimizer; this rank's parts."""

    means: Mapping[Tensor, Tensor]
    """The weighted mean of the members' differences, or of their weights; empty: the round has no member."""
    sent: Mapping[Tensor, Tensor] | None
    """This island's own as it was written; None: the island is no member."""
    outer: OuterSpec
    weights: Literal["none", "pair", "all"] = "none"
    """Whose weights these are; none: they are differences."""
    is_repeated: bool = False
    """`sent` is not the difference that the state notes: the island was a member before it went back."""


class Merging(AddedState):
    """Another optimizer, whose updates end and take rounds."""

    def __init__(self, inner: Optimizer, *, keeps_residual: bool) -> None:
        """`keeps_residual`: differences are compressed."""
        super().__init__(inner)
        self._keeps_residual = keeps_residual
        self.landing: Landing | None = None
        """What the next update takes."""
        self.ends_round = False
        """The next update is the last one of a round: the weights after it are sent."""
        self.is_last = False
        """The next update is the last one of the job: the outer weights become its own."""

    def begin(self, parameter: Tensor) -> dict[str, Tensor]:
        values = parameter.detach()
        added = {OUTER: values.clone(), OUTER_MOMENTUM: torch.zeros_like(values), SENT: values.clone()}
        return {**added, RESIDUAL: torch.zeros_like(values)} if self._keeps_residual else added

    def follow(self, parameter: Tensor, added: dict[str, Tensor]) -> None:
        pass

    @property
    def has_begun(self) -> bool:
        """Whether there is state of all parameters: since the first update."""
        return all(OUTER in self.state.get(parameter, ()) for parameter in self._trained())

    def _trained(self) -> Iterator[Tensor]:
        return (parameter for group in self.param_groups for parameter in group["params"] if parameter.requires_grad)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        # Also of those without a gradient: another island may have used them.
        for parameter in self._trained():
            if OUTER not in self.state.get(parameter, ()):
                self.state[parameter].update(self.begin(parameter))
        # Some optimizers hand all settings of a group to another class.
        kept = [{key: group.pop(key) for key in [*group] if key.startswith(PROGRESS)} for group in self.param_groups]
        super().step(closure)
        for group, progress in zip(self.param_groups, kept, strict=True):
            group |= progress
        for parameter, state in self.state.items():
            if OUTER not in state:
                continue
            values = local(parameter)
            if self.landing is not None and parameter in self.landing.means:
                _land(values, {key: local(state[key]) for key in state if key in _KEYS}, parameter, self.landing)
            if self.ends_round:
                local(state[SENT]).copy_(values)
            if self.is_last:
                values.copy_(local(state[OUTER]))


_KEYS = (OUTER, OUTER_MOMENTUM, SENT, RESIDUAL)


def _land(values: Tensor, state: Mapping[str, Tensor], parameter: Tensor, landing: Landing) -> None:
    mean, outer = landing.means[parameter], state[OUTER]
    reference = outer.clone()
    if landing.weights != "none":
        sent = None if landing.sent is None else landing.sent[parameter]
        if landing.weights == "all":
            outer.copy_(mean)
        elif sent is None:
            outer.lerp_(mean, 0.5)
        else:
            _step(state, outer - sent, landing.outer)
            outer.add_(mean - sent)
        values.add_(outer - (reference if sent is None else sent))
        return
    if landing.sent is not None and landing.is_repeated:
        reference.sub_(landing.sent[parameter])
        if RESIDUAL in state:
            reference.add_(state[RESIDUAL])
            state[RESIDUAL].zero_()
    elif landing.sent is not None:
        reference = state[SENT]
        if RESIDUAL in state:
            state[RESIDUAL].add_(outer - reference).sub_(landing.sent[parameter])
    _step(state, mean, landing.outer)
    values.add_(outer - reference)


def _step(state: Mapping[str, Tensor], gradient: Tensor, settings: OuterSpec) -> None:
    momentum = state[OUTER_MOMENTUM].mul_(settings.momentum).add_(gradient)
    change = gradient.add(momentum, alpha=settings.momentum) if settings.nesterov else momentum
    state[OUTER].add_(change, alpha=-settings.lr)
