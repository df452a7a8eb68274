"""Retention: which slots may be overwritten, which must stay, and which may be removed. Pure decisions about headers.

A decision gets the headers of a process's slots (None if the slot holds no complete part) and returns positions in that
sequence. Called by the classes of each kind of slots and by the registry.

Own slots. One of them must stay (`kept`):

    generation 3 has snapshots of its own                          its newest
    generation 3 has none, was restored from (generation 2, step 10)
                                                                   (2, 10): the group may need it again
    generation 3 has none, was restored from something else        the newest of all

One is enough when processes die: a rank writes step k + 1 only after the vote of step k + 1, and every rank enters that
vote with its snapshot of step k complete. When a node is lost, the group goes back to the last step of which every lost
part has a copy and every surviving part a slot; for that, `retained` slots stay too.

Live slots. Two belong to the current model. A third stays if the group was restored from it.

Buddy slots. For each rank of each generation, the two newest copies: the older one is overwritten, so a sender that
dies in the middle leaves the newer one complete. If the older one belongs to the newest step of which every rank has a
copy (`keep_step`), the newer one is overwritten instead. Copies of earlier generations stay until the group no longer
needs them, since it may be restoring from them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shoal_workers.snapshot_store.slots.slot_files import PartHeader

Headers = Sequence[PartHeader | None]

NUM_OWN_SLOTS = 2
"""The newest complete snapshot, and the one that is being written. With a buddy there are more."""
NUM_LIVE_SLOTS = 2
_COPIES = 2
_SPARE_BUDDY_SLOTS = 2
"""Slots without a part that stay allocated for the senders of the next generation."""


def kept(headers: Headers, *, generation: int, restored: tuple[int, int] | None) -> int | None:
    """Own slots: the position that must not be overwritten; None if no part is complete.

    `restored`: (generation, step) of the snapshot that the group was restored from.
    """
    complete = {position: header for position, header in enumerate(headers) if header is not None}
    for candidates in (
        {p: header for p, header in complete.items() if header.generation == generation},
        {p: header for p, header in complete.items() if (header.generation, header.step) == restored},
        complete,
    ):
        if candidates:
            return max(candidates, key=lambda p: (candidates[p].generation, candidates[p].step, candidates[p].sequence))
    return None


def overwritable(
    headers: Headers, *, generation: int, restored: tuple[int, int] | None, held: Collection[int]
) -> list[int]:
    """Own slots: the positions that may be overwritten, oldest first; `held`: positions that are sent or retained."""
    stays = kept(headers, generation=generation, restored=restored)
    free = (position for position in range(len(headers)) if position != stays and position not in held)
    ages = [(-1, -1) if header is None else (header.generation, header.step) for header in headers]  # empty ones first
    return sorted(free, key=ages.__getitem__)


def num_own_slots(*, has_copy: bool, num_since_sent: int) -> int:
    """Own slots with a buddy: how many are needed while a snapshot is sent.

    Retained: the one that is sent and, if `has_copy`, the last one that the buddy has. Being written: one more. If
    more than one snapshot was taken since the last was sent (`num_since_sent`), the newest is not one of the retained.
    """
    return 3 if not has_copy or num_since_sent <= 1 else 4


def reusable_live(headers: Headers, *, restored: tuple[int, int] | None) -> list[int]:
    """Live slots that a new model may use: all but the one that the group was restored from."""
    return [
        position
        for position, header in enumerate(headers)
        if header is None or (header.generation, header.step) != restored
    ]


def reusable_for_copy(headers: Headers, *, generation: int, rank: int, keep_step: int | None = None) -> list[int]:
    """Buddy slots in which the next copy of this rank may be received: its own older copies first, then empty slots."""
    copies = [
        (header.step, position)
        for position, header in enumerate(headers)
        if header is not None and (header.generation, header.rank) == (generation, rank)
    ]
    copies.sort(key=lambda copy: (copy[0] == keep_step, copy[0]))
    older = [position for _, position in copies[: len(copies) + 1 - _COPIES]]
    return older + [position for position, header in enumerate(headers) if header is None]


def surplus_empty(headers: Headers) -> list[int]:
    """Buddy slots without a part, beyond those that stay allocated for the next senders."""
    return [position for position, header in enumerate(headers) if header is None][_SPARE_BUDDY_SLOTS:]


def is_outdated(header: PartHeader | None, *, before: int) -> bool:
    """Return whether there is no complete part, or one of a generation earlier than `before`."""
    return header is None or header.generation < before
