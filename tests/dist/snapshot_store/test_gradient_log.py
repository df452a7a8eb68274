"""The gradient log from store to store: whatever step the buddy has listed, it replays bit for bit."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from kit.worlds.log_partner import LogPartner, nothing
from shoal_workers.contract.snapshots import SnapshotServer, SnapshotSource
from shoal_workers.snapshot_store.slots.buddy_slots import MAX_ENTRIES
from shoal_workers.snapshot_store.snapshot_errors import SnapshotLost
from shoal_workers.snapshot_store.store import SnapshotStore


@pytest.fixture
def pair(nodes: Any) -> tuple[LogPartner, SnapshotStore]:
    """A rank on node a, and its buddy on node b."""
    return LogPartner(nodes.start("a")), nodes.start("b")


def _steps(store: SnapshotStore, rank: int = 0) -> list[int]:
    return [part.step for part in store.snapshot_parts() if part.rank == rank]


def _load(reader: SnapshotStore, server: SnapshotServer, partner: LogPartner, step: int) -> dict[str, Tensor]:
    """The part of that step as `reader` reads it from `server`."""
    return _loaded(reader, server, partner, step)[0]


def _loaded(
    reader: SnapshotStore, server: SnapshotServer, partner: LogPartner, step: int
) -> tuple[dict[str, Tensor], Any]:
    state = {name: torch.full_like(tensor, -1) for name, tensor in partner.states[step].items()}
    own = SnapshotSource(generation=1, world_size=1, step=step, parts=(server,))
    loaded = reader.load(state, own, check=nothing)
    return state, loaded


def _assert_same(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize("is_bf16", [False, True])
def test_every_logged_step_is_replayed_bit_for_bit(nodes: Any, pair: Any, is_bf16: bool) -> None:
    """Clipping, loss scale, groups, a schedule, missing gradients, and a buffer that changes in every step."""
    partner, buddy = pair
    partner.open(nodes.server(buddy))
    for _ in range(20):
        partner.step(is_bf16=is_bf16)
    partner.wait()
    assert _steps(buddy) == list(range(1, 22))
    reader = nodes.start("c")
    for step in (21, 2, 13, 1, 20):
        state, loaded = _loaded(reader, nodes.server(buddy), partner, step)
        _assert_same(state, partner.states[step])
        assert loaded.extra == {"step": step}
    assert not partner.log.failure


@pytest.mark.parametrize("is_bf16", [False, True])
def test_zeros_of_a_parameter_that_no_rank_has_used_update_nothing(nodes: Any, pair: Any, is_bf16: bool) -> None:
    """No weight decay, no decay of its moments, no step of its counter; the parameters behind it get their own."""
    partner, buddy = pair
    partner.open(nodes.server(buddy))
    before = {name: value.clone() for name, value in partner.state().items() if ".up.weight" in name}
    assert len(before) == 4
    for _ in range(3):
        partner.step(is_bf16=is_bf16, unused=("up.weight", "odd"))
    _assert_same({name: partner.states[4][name] for name in before}, before)
    partner.step(is_bf16=is_bf16)
    partner.wait()
    for step in (4, 5):
        _assert_same(_load(nodes.start("c"), nodes.server(buddy), partner, step), partner.states[step])


def test_a_step_without_its_commit_is_not_listed(nodes: Any, pair: Any) -> None:
    partner, buddy = pair
    partner.open(nodes.server(buddy))
    partner.step()
    partner.wait()
    partner.append()
    partner.log.close()
    partner.log.break_off()
    assert _steps(buddy) == [1, 2]
    _assert_same(_load(nodes.start("c"), nodes.server(buddy), partner, 2), partner.states[2])


def test_entries_without_a_whole_copy_are_worth_nothing_until_it_arrives(nodes: Any, pair: Any) -> None:
    partner, buddy = pair
    partner.open(nodes.server(buddy), copies=False)
    partner.step()
    partner.wait()
    assert _steps(buddy) == []
    partner.copy(nodes.server(buddy))
    partner.step()
    partner.wait()
    assert _steps(buddy) == [2, 3]
    _assert_same(_load(nodes.start("c"), nodes.server(buddy), partner, 3), partner.states[3])


def test_a_new_whole_copy_makes_room_for_new_entries(nodes: Any, pair: Any) -> None:
    partner, buddy = pair
    partner.open(nodes.server(buddy))
    for number in range(3 * MAX_ENTRIES):
        if number % 16 == 15:
            partner.copy(nodes.server(buddy))
        partner.step()
    partner.wait()
    assert len(list(nodes.root.rglob("log-*"))) <= MAX_ENTRIES
    newest = partner.number
    assert {newest - 1, newest} <= set(_steps(buddy))
    for step in (newest - 1, newest):
        _assert_same(_load(nodes.start("c"), nodes.server(buddy), partner, step), partner.states[step])


def test_without_new_copies_the_oldest_entries_are_replayed_to_make_room(nodes: Any, pair: Any) -> None:
    partner, buddy = pair
    partner.open(nodes.server(buddy))
    for _ in range(2 * MAX_ENTRIES + 5):
        partner.step()
    partner.wait()
    assert len(list(nodes.root.rglob("log-*"))) <= MAX_ENTRIES
    newest = partner.number
    for step in (newest - 1, newest):
        _assert_same(_load(nodes.start("c"), nodes.server(buddy), partner, step), partner.states[step])


def test_a_reader_on_the_buddys_node_reads_the_replayed_part_locally(nodes: Any, pair: Any) -> None:
    partner, buddy = pair
    partner.open(nodes.server(buddy))
    partner.step()
    partner.wait()
    neighbour = nodes.start("b")
    state, loaded = _loaded(neighbour, nodes.server(buddy), partner, 2)
    _assert_same(state, partner.states[2])
    assert loaded.remote_bytes == 0


def test_another_process_of_the_buddys_node_replays_what_the_buddy_received(nodes: Any, pair: Any) -> None:
    """The supervisor may name any worker of the node; the buddy's own process may be dead."""
    partner, buddy = pair
    partner.open(nodes.server(buddy))
    for _ in range(3):
        partner.step()
    partner.wait()
    neighbour = nodes.start("b")
    assert _steps(neighbour) == [1, 2, 3, 4]
    _assert_same(_load(nodes.start("c"), nodes.server(neighbour), partner, 4), partner.states[4])


def test_a_step_that_the_buddy_does_not_have_is_lost(nodes: Any, pair: Any) -> None:
    partner, buddy = pair
    partner.open(nodes.server(buddy))
    partner.step()
    partner.wait()
    partner.states[9] = partner.states[2]
    for reader in (nodes.start("c"), nodes.start("b")):
        with pytest.raises(SnapshotLost, match="no longer exists"):
            _load(reader, nodes.server(buddy), partner, 9)


def test_a_dead_buddy_breaks_the_log_and_nothing_else(nodes: Any, pair: Any) -> None:
    partner, buddy = pair
    log = partner.open(nodes.server(buddy))
    partner.step()
    partner.wait()
    buddy.close()
    partner.step()
    log.wait(nothing, patience_s=60.0)
    assert log.failure
    partner.step()
    other = nodes.start("d")
    partner.open(nodes.server(other))
    partner.step()
    partner.wait()
    assert _steps(other) == [partner.number - 1, partner.number]


def test_a_silent_buddy_breaks_the_log_after_the_patience(nodes: Any) -> None:
    partner = LogPartner(nodes.start("a"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        mute = SnapshotServer(node_id="mute", host="127.0.0.1", port=server.getsockname()[1])
        log = partner.open(mute, copies=False)
        log.append(2, [memoryview(bytes(8))])
        log.wait(nothing, patience_s=0.3)
        assert log.failure == "mute did not answer within 0.3 s"


def test_a_fenced_generation_stops_waiting_for_the_buddy(nodes: Any) -> None:
    class Fenced(Exception):
        pass

    def check() -> None:
        raise Fenced

    partner = LogPartner(nodes.start("a"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        log = partner.open(SnapshotServer(node_id="mute", host="127.0.0.1", port=server.getsockname()[1]), copies=False)
        log.append(2, [memoryview(bytes(8))])
        with pytest.raises(Fenced):
            log.wait(check, patience_s=60.0)


def test_a_log_of_another_platform_is_refused_with_both_platforms(nodes: Any, pair: Any) -> None:
    partner, buddy = pair
    partner.open(nodes.server(buddy))
    head = partner.head.model_copy(update={"cpu_capability": "ABACUS"})
    log = partner.store.open_log(nodes.server(buddy), partner.stamp, head)
    partner.log = log
    partner.step()
    log.wait(nothing, patience_s=60.0)
    assert "ABACUS" in log.failure


def test_a_commit_that_is_too_long_breaks_the_log(nodes: Any, pair: Any) -> None:
    partner, buddy = pair
    log = partner.open(nodes.server(buddy))
    partner.append()
    log.commit(2, bytes(1 << 20))
    log.wait(nothing, patience_s=60.0)
    assert "more than were reserved" in log.failure
    assert _steps(buddy) == [1]


def test_without_shared_memory_the_log_is_refused_and_says_so(nodes: Any, pair: Any) -> None:
    partner, buddy = pair
    partner.open(nodes.server(buddy))
    head = partner.head.model_copy(update={"num_elements": 1 << 58})
    log = partner.store.open_log(nodes.server(buddy), partner.stamp, head)
    log.append(2, [memoryview(bytes(8))])
    log.wait(nothing, patience_s=60.0)
    assert "no shared memory" in log.failure


def test_a_copy_of_another_layout_is_refused(nodes: Any, pair: Any) -> None:
    partner, buddy = pair
    partner.open(nodes.server(buddy))
    partner.step()
    partner.wait()
    (copy,) = nodes.root.rglob("buddy-*")
    text = copy.read_bytes()
    assert b"model.up.bias" in text
    with copy.open("r+b") as file:
        file.seek(text.index(b"model.up.bias"))
        file.write(b"model.up.bia!")
    with pytest.raises(SnapshotLost, match=r"has no model\.up\.bias"):
        _load(nodes.start("c"), nodes.server(buddy), partner, 2)


def test_the_whole_node_of_the_rank_may_be_gone(nodes: Any, pair: Any) -> None:
    partner, buddy = pair
    partner.open(nodes.server(buddy))
    for _ in range(5):
        partner.step()
    partner.wait()
    shutil.rmtree(partner.store._registry.node)
    _assert_same(_load(nodes.start("c"), nodes.server(buddy), partner, 6), partner.states[6])


def _wait_for_difference(store: SnapshotStore, *, seconds: float) -> Any:
    """The first difference that the store finds within this time, or None."""
    deadline = time.monotonic() + seconds
    while (found := store.take_difference()) is None and time.monotonic() < deadline:
        threading.Event().wait(0.005)
    return found


def test_a_whole_copy_that_equals_the_replay_is_no_difference(nodes: Any, pair: Any) -> None:
    partner, buddy = pair
    partner.open(nodes.server(buddy))
    for _ in range(4):
        partner.step()
    partner.copy(nodes.server(buddy))
    assert buddy._replayer.differing(1, 0, 5, nothing) == ()
    assert buddy.take_difference() is None


def test_a_flipped_bit_is_found_when_the_next_copy_is_compared_with_the_replay(nodes: Any, pair: Any) -> None:
    partner, buddy = pair
    partner.open(nodes.server(buddy))
    for _ in range(4):
        partner.step()
    with torch.no_grad():
        partner.parameters["embed"].view(torch.int32)[3, 4] ^= 1
    partner.wait()
    partner.copy(nodes.server(buddy))
    found = _wait_for_difference(buddy, seconds=60.0)
    assert (found.generation, found.rank, found.step, found.names) == (1, 0, 5, ("model.embed",))
