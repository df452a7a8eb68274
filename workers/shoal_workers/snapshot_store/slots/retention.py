"""Retention: which slots may be overwritten, which must stay, and which may be removed. Pure decisions.

A decision gets slots of a process, of which it reads only the headers, and returns some of them. Called by the classes
of each kind of slots and by the registry.

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

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol, TypeVar

from shoal_workers.snapshot_store.slots.slot_files import PartHeader

NUM_OWN_SLOTS = 2
"""The newest complete snapshot, and the one that is being written. With a buddy there are more."""
NUM_LIVE_SLOTS = 2
_COPIES = 2
_SPARE_BUDDY_SLOTS = 2
"""Slots without a part that stay allocated for the senders of the next generation."""


class Slot(Protocol):
    """What a decision reads of a slot."""

    @property
    def header(self) -> PartHeader | None:
        """Header of the complete part in it; None if there is none."""


S = TypeVar("S", bound=Slot)


def kept(slots: Iterable[S], *, generation: int, restored: tuple[int, int] | None) -> S | None:
    """Own slots: the one that must not be overwritten; None if no part is complete.

    `restored`: (generation, step) of the snapshot that the group was restored from.
    """

    def priority(header: PartHeader) -> tuple[int, ...]:
        is_restored = (header.generation, header.step) == restored
        group = 2 if header.generation == generation else int(is_restored)
        return group, header.generation, header.step, header.sequence

    complete = [(slot, priority(slot.header)) for slot in slots if slot.header is not None]
    slot, _ = max(complete, key=lambda ranked: ranked[1], default=(None, ()))
    return slot


def overwritable(
    slots: Sequence[S], *, generation: int, restored: tuple[int, int] | None, held: Collection[S | None]
) -> list[S]:
    """Own slots: those that may be overwritten, empty ones first, then the oldest; `held`: slots that are sent or
    retained."""
    stays = kept(slots, generation=generation, restored=restored)
    free = (slot for slot in slots if slot is not stays and slot not in held)
    return sorted(free, key=lambda slot: (slot.header.generation, slot.header.step) if slot.header else (-1, -1))


def num_own_slots(*, has_copy: bool, num_since_sent: int) -> int:
    """Own slots with a buddy: how many are needed while a snapshot is sent.

    Retained: the one that is sent and, if `has_copy`, the last one that the buddy has. Being written: one more. If
    more than one snapshot was taken since the last was sent (`num_since_sent`), the newest is not one of the retained.
    """
    return 3 if not has_copy or num_since_sent <= 1 else 4


def reusable_live(slots: Iterable[S], *, restored: tuple[int, int] | None) -> list[S]:
    """Live slots that a new model may use: all but the one that the group was restored from."""
    return [slot for slot in slots if not slot.header or (slot.header.generation, slot.header.step) != restored]


def reusable_for_copy(slots: Sequence[S], *, generation: int, rank: int, keep_step: int | None = None) -> list[S]:
    """Buddy slots in which the next copy of this rank may be received: its own older copies first, then empty slots."""
    copies = [
        (header.step == keep_step, header.step, number)
        for number, slot in enumerate(slots)
        if (header := slot.header) is not None and (header.generation, header.rank) == (generation, rank)
    ]
    older = [slots[number] for _, _, number in sorted(copies)[: len(copies) + 1 - _COPIES]]
    return older + [slot for slot in slots if slot.header is None]


def surplus_empty(slots: Iterable[S]) -> list[S]:
    """Buddy slots without a part, beyond those that stay allocated for the next senders."""
    return [slot for slot in slots if slot.header is None][_SPARE_BUDDY_SLOTS:]


def is_outdated(header: PartHeader | None, *, before: int) -> bool:
    """Return whether there is no complete part, or one of a generation earlier than `before`."""
    return header is None or header.generation < before
