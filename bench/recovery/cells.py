"""Which trials of the benchmark are still to be done: a cell is one event, model and place of the victim of one system.

Made by recovery/main.py from its options and from the trials of an earlier run; asked by the systems' own modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from measurements.trial import NODE_LOSSES, Event, Size, System, Trial, Victim


@dataclass(frozen=True, slots=True)
class Cells:
    """The trials that one run of one model is to do."""

    kills: int
    """Trials of each cell."""
    seed: int
    """Seed with which the ranks, steps and moments of the faults are drawn."""
    window_s: float
    """Seconds after each signal that are watched; 0: only until training has passed the old step."""
    params: Size
    victims: tuple[Victim, ...]
    """Where the victims of node losses run; the others have none."""
    done: Sequence[Trial] = ()
    """Trials of an earlier run that need not be repeated."""

    def victims_of(self, system: System, event: Event) -> tuple[Victim | None, ...]:
        """Only Shoal has a supervisor; a peer's victim is away from the head and from the controller."""
        if event not in NODE_LOSSES:
            return (None,)
        return self.victims if system is System.SHOAL else (Victim.AWAY,)

    def left(self, system: System, event: Event, victim: Victim | None = None) -> int:
        """How many trials of this cell are to be done. A trial that could not be finished does not count."""
        found = sum(
            (one.system, one.event, one.params, one.victim) == (system, event, self.params, victim) and not one.failed
            for one in self.done
        )
        return max(0, self.kills - found)

    def are_left(self, system: System, event: Event) -> bool:
        return any(self.left(system, event, victim) for victim in self.victims_of(system, event))
