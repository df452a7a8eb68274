"""When a round of islands closes, and with which of them. Pure.

    an island's difference is whole in the storage ......... it has arrived
    all islands of the round that train have arrived ....... the round closes
    3/4 of `grace_s` after the first, `quorum` are there .... it closes without the others; a pair with one of them
    fewer have ............................................. it stays open; the islands train on

A difference that arrives after its round was closed is late: its island takes the round without being a member, and
sends its samples again with the next one, so nothing is lost. A decision is never changed: it is stored before it is
written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from shoal_workers.contract import Frozen
from shoal_workers.contract.islands import Announcement, IslandsSpec, Member, RoundDecision

_SHARE_OF_GRACE = 0.75
"""The islands wait for the whole of it: the decision must have come by then."""


class Contribution(Frozen):
    """The difference of an island, whole in the storage."""

    island: int
    islands: tuple[int, ...]
    """All that merge in this round."""
    from_step: int
    """Its steps whose samples earlier rounds have."""
    step: int
    """Its steps when it was written."""
    tokens: int
    loss: float | None
    """Mean training loss of these tokens; null: all these steps were skipped."""
    num_bytes: int
    waited_s: float
    """Seconds that the island had waited for rounds, since its group formed."""
    directory: str
    """In that of the round."""


def merge_announcements(directory: str, announced: Iterable[Announcement]) -> Contribution | None:
    """Return the contribution that the announcements of its ranks make; None if a rank's is missing."""
    parts = {announcement.part.rank: announcement for announcement in announced}
    first = parts.get(0)
    if first is None or len(parts) < first.part.world_size:
        return None
    return Contribution(
        island=first.island,
        islands=first.islands,
        from_step=first.from_step,
        step=first.part.step,
        tokens=first.tokens,
        loss=first.loss,
        num_bytes=sum(file.bytes for announcement in parts.values() for file in announcement.part.files),
        waited_s=first.waited_s,
        directory=directory,
    )


def close_round(
    number: int,
    spec: IslandsSpec,
    arrived: Mapping[Contribution, float],
    training: Collection[int],
    now: float,
) -> RoundDecision | None:
    """Decide if a round closes.

    Args:
        number: of the round.
        arrived: contributions to it, at most one of each island, with the time at which each was first seen.
        training: islands whose jobs have not ended.
        now: seconds since 1970.
    """
    if not arrived:
        return None
    islands = max(sorted(contribution.islands for contribution in arrived), key=len)  # `stop.steps` may have changed
    absent = {*islands} - {contribution.island for contribution in arrived}
    is_complete = not absent & {*training}
    waited_s = now - min(arrived.values())
    least = spec.least_members if len(islands) == spec.num else 1
    is_over = len(arrived) >= least and waited_s >= _SHARE_OF_GRACE * spec.grace_s
    if not is_complete and not is_over:
        return None
    total = sum(contribution.tokens for contribution in arrived)
    members = tuple(
        Member(
            island=contribution.island,
            weight=contribution.tokens / total,
            step=contribution.step,
            directory=contribution.directory,
        )
        for contribution in sorted(arrived, key=lambda contribution: contribution.island)
    )
    return RoundDecision(round=number, members=members, absent=tuple(sorted(absent)))
