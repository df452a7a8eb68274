"""What is counted against a limit, and the back-off times that follow from it."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    recoveries: int = 0
    fruitless: int = 0
    """Re-formations since the last step that no group had completed before; while steps are done again, since a group
    began at a later one than the group before."""
    setbacks: int = 0
    """Groups that began at an earlier step than the one before, since the last step that none had completed before: so
    a job that only goes back and forth ends as well."""
    start_step: int = 0
    """The step at which the newest group that formed began."""
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

    def formed(self, start_step: int, furthest_step: int) -> Budgets:
        """A group has formed and restored the state of this step."""
        return replace(
            self,
            fruitless=0 if self.start_step < start_step < furthest_step else self.fruitless,
            setbacks=self.setbacks + (start_step < self.start_step),
            start_step=start_step,
        )

    def advanced(self) -> Budgets:
        """A step is done that no group had completed before."""
        return replace(self, fruitless=0, setbacks=0)
