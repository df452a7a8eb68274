"""What has happened to the attempt so far, across its groups."""

from __future__ import annotations

from dataclasses import dataclass

from shoal_workers.contract.course.best import Standing


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    has_formed: bool = False
    """A group has formed at least once."""
    total_steps: int | None = None
    """Of the whole training run; None until a group has formed."""
    skip_steps: tuple[int, ...] = ()
    """Steps that are left out, since a rollback was made because of them."""
    standing: Standing | None = None
    """What the validations of the job have shown; None: there was none."""
    num_incidents: int = 0
    steps_lost: int = 0
