"""What is counted against a limit, and the back-off times that follow from it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    recoveries: int = 0
    fruitless: int = 0
    """Re-formations since the last completed step."""
    failed_starts: int = 0
    """Workers that died while starting: since the last one that became warm, or since the attempt began to wait."""
    rollbacks: int = 0
    """In a row, because of steps that were not finite: since a newer checkpoint than the last of them."""
    last_saves: int = 0
    """Failed tries to save the state after the last step."""
    form_not_before: float = 0.0
    """The next group forms no earlier."""
    grow_not_before: float = 0.0
    """The group grows no earlier: a save failed in a switch, or a worker could not be started."""
