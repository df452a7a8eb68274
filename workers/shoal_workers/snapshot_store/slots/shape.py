"""The layout of one rank's part in a slot. It follows from the layout of the state, not from its values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch

from shoal_workers.checkpoint.index import ALIGNMENT_BYTES, IndexItem, ShardIndex
from shoal_workers.checkpoint.save_plan import PlannedItem, SavePlan
from shoal_workers.snapshot_store.slots.slot import Regions, SlotFile

_MIN_EXTRA_ROOM_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """Compared by identity: the same object means the same layout."""

    plan: SavePlan
    index: bytes
    regions: Regions

    @staticmethod
    def of(plan: SavePlan, *, extra_bytes: int) -> Shape:
        """Reserves twice `extra_bytes` for the plain values, since they grow."""
        return Shape._with_room(plan, _index_of(plan), extra_bytes)

    def with_room(self, extra_bytes: int) -> Shape:
        """The same layout with more room for the plain values."""
        return Shape._with_room(self.plan, self.index, extra_bytes)

    def index_of(self, names: Collection[str]) -> bytes:
        """The index of a part that has only these of the items; as long as the whole index."""
        items = tuple(item for item in self.plan.items if item.fqn in names)
        return _index_of(replace(self.plan, items=items)).ljust(len(self.index))

    @staticmethod
    def _with_room(plan: SavePlan, index: bytes, extra_bytes: int) -> Shape:
        room = max(_MIN_EXTRA_ROOM_BYTES, 2 * extra_bytes)
        return Shape(plan, index, Regions.of(index_bytes=len(index), extra_room=room, num_bytes=plan.total_bytes))

    def lay_out(self, file: SlotFile) -> torch.Tensor:
        """Writes the index; returns the payload as bytes, in the file's memory. The slot holds no complete part."""
        regions = self.regions
        file.map[regions.index_offset : regions.index_offset + regions.index_bytes] = self.index
        return torch.frombuffer(file.map, dtype=torch.uint8)[regions.payload_offset :]


def view_of(payload: torch.Tensor, item: PlannedItem) -> torch.Tensor:
    """An item's slice of the payload, with the item's dtype and sizes."""
    return payload[item.file_offset : item.file_offset + item.nbytes].view(item.dtype).view(item.sizes)


def with_rooms(plan: SavePlan, rooms: Mapping[str, int]) -> SavePlan:
    """The same items further apart: an item named in `rooms` gets at least that many bytes."""
    items: list[PlannedItem] = []
    end = 0
    for item in plan.items:
        item = replace(item, file_offset=-(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
        items.append(item)
        end = item.file_offset + max(item.nbytes, rooms.get(item.fqn, 0))
    return SavePlan(tuple(items), end)


def _index_of(plan: SavePlan) -> bytes:
    """Written once for many snapshots, so the fields that the slot's header carries (rank, step ...) are 0 in it."""
    items = tuple(
        IndexItem(
            fqn=item.fqn,
            dtype=str(item.dtype).removeprefix("torch."),
            shape=item.shape,
            offsets=item.offsets,
            sizes=item.sizes,
            file_offset=item.file_offset,
            nbytes=item.nbytes,
            crc32=0,
        )
        for item in plan.items
    )
    return ShardIndex(rank=0, world_size=0, generation=0, step=0, items=items, extra={}).to_json()
