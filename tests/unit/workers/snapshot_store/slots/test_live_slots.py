"""Live slots of a model's state: readable while complete, kept while a restore may need them, reused afterwards."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shoal_workers.checkpoint.index import ShardIndex
from shoal_workers.checkpoint.save_plan import SavePlan, plan_save
from shoal_workers.snapshot_store.slots.live_slots import LiveSlot, LiveSlots
from shoal_workers.snapshot_store.slots.own_slots import with_rooms
from shoal_workers.snapshot_store.slots.slot_files import PartHeader, Stamp, read_header

STATE = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(5, dtype=torch.int64)}


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[LiveSlots]:
    slots = LiveSlots(tmp_path)
    yield slots
    slots.close()
    assert not list(tmp_path.iterdir())


def _plan(**rooms: int) -> SavePlan:
    return with_rooms(plan_save(STATE, owns_replicated=True), rooms)


def _make(slots: LiveSlots, generation: int, step: int) -> tuple[LiveSlot, ...]:
    """The slots of a model that was moved in and has reached the step, in the first of its two."""
    pair = _pair(slots)
    assert pair[0].finish(Stamp(generation, 0, 1, step), b"{}")
    return pair


def _pair(slots: LiveSlots, plan: SavePlan | None = None) -> tuple[LiveSlot, LiveSlot]:
    return slots.make(plan or _plan(), extra_bytes=0), slots.make_second(keep_restored=True)


def _restore(slots: LiveSlots, generation: int, step: int, num_rows: int = 2) -> LiveSlot:
    """The slot into which the state of the generation after this one was read."""
    plan = plan_save({**STATE, "a": torch.zeros(num_rows, 3)}, owns_replicated=True)
    slot = slots.make(plan, extra_bytes=0, restoring=(generation, step))
    slots.keep_restored(generation, step)
    assert slot.finish(Stamp(generation + 1, 0, 1, step), b"{}")
    return slot


def _sizes(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in directory.iterdir()}


def _headers(directory: Path) -> dict[str, PartHeader | None]:
    found = {}
    for path in directory.iterdir():
        fd = os.open(path, os.O_RDONLY)
        found[path.name] = read_header(fd)
        os.close(fd)
    return found


def _found(directory: Path) -> list[tuple[int, int]]:
    """(generation, step) of every readable part."""
    return sorted((h.generation, h.step) for h in _headers(directory).values() if h is not None)


def test_a_slot_is_a_part_only_from_finish_to_begin(slots: LiveSlots, tmp_path: Path) -> None:
    slot, _ = _pair(slots)
    assert _found(tmp_path) == []
    for step in (1, 2):
        assert slot.finish(Stamp(4, 0, 1, step), b"{}")
        assert _found(tmp_path) == [(4, step)]
        assert slot.is_of(4, step) and not slot.is_of(3, step) and not slot.is_of(4, step + 1)
        slot.begin()
        assert _found(tmp_path) == []
        assert not slot.is_of(4, step)


def test_tensors_have_their_offsets_and_the_requested_sizes(slots: LiveSlots) -> None:
    slot, _ = _pair(slots, _plan(a=100))
    room, b = slot.room("a", 100), slot.view("b")
    assert (slot.view("a").shape, slot.view("a").dtype, b.shape, b.dtype) == ((2, 3), torch.float32, (5,), torch.int64)
    b.copy_(STATE["b"])
    room.fill_(255)
    assert torch.equal(slot.view("b"), STATE["b"])
    assert slot.view("a").data_ptr() == room.data_ptr()
    assert all(tensor.data_ptr() % 64 == 0 for tensor in (room, b))


def test_while_one_slot_is_written_the_other_is_complete(slots: LiveSlots, tmp_path: Path) -> None:
    pair = _pair(slots)
    for step in range(1, 6):
        slot = pair[step % 2]
        slot.begin()
        assert _found(tmp_path) == ([(1, step - 1)] if step > 1 else [])
        assert slot.finish(Stamp(1, 0, 1, step), b"{}")
        assert _found(tmp_path)[-1] == (1, step)


def test_plain_values_that_do_not_fit_leave_the_part_incomplete(slots: LiveSlots, tmp_path: Path) -> None:
    slot, _ = _make(slots, 1, 1)
    slot.begin()
    assert not slot.finish(Stamp(1, 0, 1, 2), b" " * (1 << 20))
    assert _found(tmp_path) == []


def test_the_restored_snapshot_is_kept_until_older_generations_are_dropped(slots: LiveSlots, tmp_path: Path) -> None:
    _make(slots, 1, 10)
    slots.keep_restored(1, 10)
    _make(slots, 2, 11)
    assert _found(tmp_path) == [(1, 10), (2, 11)]
    slots.drop_older(2)
    assert _found(tmp_path) == [(2, 11)]


def test_a_slot_that_no_restore_used_is_reused(slots: LiveSlots, tmp_path: Path) -> None:
    _make(slots, 1, 10)
    slots.keep_restored(1, 8)  # a copy in other memory
    _make(slots, 2, 9)
    assert _found(tmp_path) == [(2, 9)]
    assert len(list(tmp_path.iterdir())) == 2


def test_memory_does_not_grow_with_generations(slots: LiveSlots, tmp_path: Path) -> None:
    for generation in range(1, 20):
        _make(slots, generation, generation)
        slots.keep_restored(generation, generation)
    assert len(list(tmp_path.iterdir())) <= 3


def test_the_current_slots_are_not_dropped_during_an_update(slots: LiveSlots) -> None:
    slot, _ = _make(slots, 1, 10)
    slot.begin()
    slots.drop_older(2)
    assert slot.finish(Stamp(2, 0, 1, 11), b"{}")
    assert slot.is_of(2, 11)


def test_a_change_of_layout_takes_both_slots_over(slots: LiveSlots, tmp_path: Path) -> None:
    _make(slots, 1, 10)
    before = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    for generation, step in ((1, 10), (2, 11), (3, 12)):
        _restore(slots, generation, step)
        assert _found(tmp_path) == [(generation, step), (generation + 1, step)]
        second = slots.make_second(keep_restored=False)
        assert _found(tmp_path) == [(generation + 1, step)]
        assert second.finish(Stamp(generation + 1, 0, 1, step + 1), b"{}")
        slots.drop_older(generation + 1)
    assert {path.name: path.stat().st_ino for path in tmp_path.iterdir()} == before


def test_a_slot_that_others_read_grows_without_losing_its_part(slots: LiveSlots, tmp_path: Path) -> None:
    _make(slots, 1, 10)
    old = max(_sizes(tmp_path).values())
    _restore(slots, 1, 10, num_rows=100_000)
    assert _found(tmp_path) == [(1, 10), (2, 10)]
    assert min(_sizes(tmp_path).values()) > old + 1_000_000
    second = slots.make_second(keep_restored=False)
    second.view("a").fill_(1)
    assert second.finish(Stamp(2, 0, 1, 11), b"{}")
    assert _found(tmp_path) == [(2, 10), (2, 11)]


def test_what_was_restored_stays_in_a_third_slot_if_it_may_be_needed_and_the_third_is_used_again(
    slots: LiveSlots, tmp_path: Path
) -> None:
    _make(slots, 1, 10)
    for generation in range(1, 5):
        _restore(slots, generation, 10 * generation)
        second = slots.make_second(keep_restored=True)
        assert second.finish(Stamp(generation + 1, 0, 1, 10 * (generation + 1)), b"{}")
        assert _found(tmp_path) == [
            (generation, 10 * generation),
            (generation + 1, 10 * generation),
            (generation + 1, 10 * (generation + 1)),
        ]
        slots.drop_older(generation + 1)
        assert _found(tmp_path) == [(generation + 1, 10 * generation), (generation + 1, 10 * (generation + 1))]
        assert len(list(tmp_path.iterdir())) == 3


def test_a_part_has_only_the_items_that_its_slot_holds(slots: LiveSlots) -> None:
    first, second = _pair(slots)
    assert first.held == {"a", "b"}
    first.hold(frozenset({"b", "unknown"}))
    assert first.finish(Stamp(1, 0, 1, 1), b"{}") and first.held == {"b"}
    assert [item.fqn for item in _index(first).items] == ["b"]
    first.hold(frozenset({"a", "b"}))
    assert [item.fqn for item in _index(first).items] == ["b"], "the complete part stays as it is"
    assert first.finish(Stamp(1, 0, 1, 3), b"{}")
    assert [item.fqn for item in _index(first).items] == ["a", "b"]
    assert second.held == {"a", "b"}


def test_a_slot_gets_another_layout_while_the_other_one_stays_complete(slots: LiveSlots) -> None:
    first, second = _pair(slots)
    first.view("a").copy_(STATE["a"])
    assert first.finish(Stamp(1, 0, 1, 4), b"{}")
    more = {**STATE, "c": torch.full((3000,), 2.5)}
    plan = plan_save(more, owns_replicated=True)
    anew = slots.make_anew(second, plan, extra_bytes=0)
    for name, value in more.items():
        anew.view(name).copy_(value)
    assert first.is_of(1, 4) and [item.fqn for item in _index(first).items] == ["a", "b"]
    assert torch.equal(first.view("a"), STATE["a"])
    assert anew.finish(Stamp(1, 0, 1, 5), b"{}")
    assert [item.fqn for item in _index(anew).items] == ["a", "b", "c"]
    other = slots.make_second(keep_restored=True)
    assert other.file is first.file and other.held == {"a", "b", "c"}
    other.view("c").copy_(more["c"])
    assert anew.is_of(1, 5)


def _index(slot: LiveSlot) -> ShardIndex:
    """As a reader reads it."""
    fd = os.open(slot.file.path, os.O_RDONLY)
    try:
        header = read_header(fd)
        assert header is not None
        return ShardIndex.from_json(os.pread(fd, header.index_bytes, header.index_offset))
    finally:
        os.close(fd)
