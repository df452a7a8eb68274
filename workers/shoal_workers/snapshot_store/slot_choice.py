"""Which of a process's own slots may be written over. Pure: a decision about headers.

    generation 3, no snapshot of its own yet, restored from (2, step 10)     keeps (2, 10): the group may need it again
    generation 3, no snapshot of its own yet, restored from elsewhere        keeps the newest of all
    generation 3 with snapshots of its own                                   keeps its newest

That is enough for process losses: a rank writes step k + 1 only after a vote of step k + 1, which every rank enters
with its snapshot of step k complete.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal_workers.snapshot_store.slot import PartHeader


def kept(
    headers: Sequence[PartHeader | None], *, generation: int, restored: tuple[int, int] | None
) -> PartHeader | None:
    """The one that must not be written over; None: nothing is complete. `restored`: (generation, step) of a source."""
    complete = [header for header in headers if header is not None]
    for desired in (
        [header for header in complete if header.generation == generation],
        [header for header in complete if (header.generation, header.step) == restored],
        complete,
    ):
        if desired:
            return max(desired, key=lambda header: (header.generation, header.step, header.sequence))
    return None


def oldest_first(header: PartHeader | None) -> tuple[int, int]:
    """Sort key of what may be written over; what is not complete goes first."""
    return (-1, -1) if header is None else (header.generation, header.step)
