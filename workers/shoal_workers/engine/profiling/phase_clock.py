"""Where the time of a step goes, from the phases that the training thread enters. Pure: the clocks are a parameter.

    boundary | forward | backward | forward | backward | optimizer | snapshot | boundary
             |<------- seconds of one step; each moment belongs to one category ------->|

Waiting for others and making batches happen inside of the phases. Both have counters, whose growth is taken out of the
phase in which it happened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoal_workers.contract.messages import Phase
from shoal_workers.contract.profiling.messages import Category, StepTimes

_CATEGORIES = {
    Phase.FORWARD: Category.COMPUTE,
    Phase.BACKWARD: Category.COMPUTE,
    Phase.OPTIMIZER: Category.OPTIMIZER,
    Phase.SNAPSHOT: Category.SNAPSHOT,
    Phase.SAVING: Category.CHECKPOINT,
    Phase.VALIDATING: Category.VALIDATION,
}
"""All other phases are OTHER."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The clocks of the training thread at one moment, in seconds."""

    at_s: float
    waited_s: float
    """Spent waiting in collectives since the thread began."""
    data_s: float
    """Spent making training batches since the generation began."""


@dataclass(frozen=True, slots=True)
class Span:
    """A part of the time line, by the clock of `Reading.at_s`."""

    name: str
    begin_s: float
    end_s: float


class PhaseClock:
    """Made at a step boundary. Training thread only."""

    def __init__(self, read: Callable[[], Reading]) -> None:
        self._read = read
        self._last = read()
        self._phase: Phase | None = None
        self._seconds = dict.fromkeys(Category, 0.0)
        self._step_began_s = self._last.at_s
        self.times: list[StepTimes] = []
        self.phases: list[Span] = []
        self.steps: list[Span] = []
        """Named by the number of the step."""

    def enter(self, phase: Phase) -> None:
        """What happens from now on belongs to this phase."""
        self._book()
        self._phase = phase

    def end_step(self, step: int) -> None:
        """A step boundary: `step` steps are completed, and the next one begins."""
        self._book()
        self._phase = None
        self.times.append(StepTimes(step=step, seconds=self._seconds))
        self.steps.append(Span(str(step), self._step_began_s, self._last.at_s))
        self._seconds = dict.fromkeys(Category, 0.0)
        self._step_began_s = self._last.at_s

    def _book(self) -> None:
        now, last = self._read(), self._last
        elapsed_s = now.at_s - last.at_s
        category = Category.OTHER if self._phase is None else _CATEGORIES.get(self._phase, Category.OTHER)
        if category is not Category.VALIDATION:
            waited_s, data_s = now.waited_s - last.waited_s, now.data_s - last.data_s
            self._seconds[Category.COMMUNICATION] += waited_s
            self._seconds[Category.DATA] += data_s
            elapsed_s = max(0.0, elapsed_s - waited_s - data_s)
        self._seconds[category] += elapsed_s
        if self._phase is not None:
            self.phases.append(Span(self._phase.value, last.at_s, now.at_s))
        self._last = now
