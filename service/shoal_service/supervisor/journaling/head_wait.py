"""How long a supervisor waits for the head to store a record of its journal. Pure; called by `supervisor/journal.py`.

The head answers within a millisecond, so one that has not answered for a quarter of a second is away, and the commands
go ahead without it. Two things look the same and are not the head's: a record of a large group takes time to send, and
a supervisor that has no CPU sees an answer late. So the wait has slices, and each counts as one slice at most, however
late the supervisor wakes from it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

SLICE_S = 0.05
_ANSWER_S = 0.25
_BYTES_PER_S = 20e6
"""Sent to the head, at least."""


@dataclass(frozen=True, slots=True)
class HeadWait:
    asked_mono: float
    """Since when the head has been asked to store this record or to delete older ones."""
    num_bytes: int
    """Of the record."""
    waited_s: float = 0.0

    @property
    def is_over(self) -> bool:
        return self.waited_s >= _ANSWER_S + self.num_bytes / _BYTES_PER_S

    def after(self, began_mono: float, ended_mono: float) -> HeadWait:
        """After one slice."""
        waited_s = ended_mono - max(began_mono, self.asked_mono)
        return replace(self, waited_s=self.waited_s + min(SLICE_S, max(0.0, waited_s)))
