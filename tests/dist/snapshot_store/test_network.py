"""Between nodes: restores over TCP, the buddy's copy, and clients or peers that hang, send wrong data or disconnect."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from shoal_workers.contract.snapshots import SnapshotServer, SnapshotSource
from shoal_workers.snapshot_store.snapshot_errors import SnapshotLost
from shoal_workers.snapshot_store.store import SnapshotStore
from shoal_workers.snapshot_store.transfer.wire import (
    CHUNK_BYTES,
    Answer,
    Part,
    PeerRefused,
    Request,
    Verb,
    Wire,
    connect,
)

_PATIENCE_S = 60.0


def _state(value: float, numel: int = 1000) -> dict[str, torch.Tensor]:
    return {"w": torch.full((numel,), float(value)), "n": torch.tensor(int(value))}


def _snapshot(store: SnapshotStore, step: int, *, generation: int = 1, numel: int = 1000, **changes: Any) -> None:
    values: dict[str, Any] = {"rank": 0, "world_size": 1, "extra": {"step": step}, **changes}
    store.snapshot(_state(step, numel), generation=generation, step=step, **values)


def _nothing() -> None:
    pass


def _steps(store: SnapshotStore) -> list[tuple[int, int]]:
    return [(part.generation, part.step) for part in store.snapshot_parts()]


def _wait_until_sent(store: SnapshotStore) -> Any:
    deadline = time.monotonic() + _PATIENCE_S
    while (cost := store.sender.take_cost()) is None:
        assert time.monotonic() < deadline
        threading.Event().wait(0.001)
    return cost


def _wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        threading.Event().wait(0.001)


@pytest.fixture
def mute() -> Iterator[SnapshotServer]:
    """Accepts connections in the kernel and never sends a byte."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield SnapshotServer(node_id="mute", host="127.0.0.1", port=server.getsockname()[1])


@pytest.fixture
def connect_to(nodes: Any) -> Iterator[Callable[..., Wire]]:
    """`connect_to(store, key=)`: a connection that has proved that it knows the key."""
    wires: list[Wire] = []

    def make(store: SnapshotStore, key: str = "secret") -> Wire:
        wires.append(connect(nodes.server(store), key, check=_nothing, patience_s=60.0))
        return wires[-1]

    yield make
    for wire in wires:
        wire.__exit__()


def test_a_part_on_another_node_is_read_over_tcp(nodes: Any) -> None:
    writer, reader = nodes.start("a"), nodes.start("b")
    numel = 3 * CHUNK_BYTES // 4 + 17
    _snapshot(writer, 7, numel=numel)
    state = _state(-1, numel)
    loaded = reader.load(state, nodes.source(writer, step=7), check=_nothing)
    assert (loaded.local_bytes, loaded.remote_bytes) == (0, 4 * numel + 8)
    assert bool((state["w"] == 7).all()) and int(state["n"]) == 7


def test_tensors_that_are_not_requested_are_not_sent(nodes: Any) -> None:
    writer, reader = nodes.start("a"), nodes.start("b")
    state = {"used": torch.arange(1000.0), "unused": torch.zeros(100_000)}
    writer.snapshot(state, generation=1, rank=0, world_size=1, step=1, extra={})
    blank = {"used": torch.zeros(1000)}
    assert reader.load(blank, nodes.source(writer, step=1), check=_nothing).remote_bytes == 4000
    assert torch.equal(blank["used"], state["used"])


def test_the_parts_of_a_snapshot_may_be_on_several_nodes(nodes: Any) -> None:
    stores = [nodes.start(node) for node in "abc"]
    for rank, store in enumerate(stores):
        store.snapshot(
            {f"w{rank}": torch.full((100,), float(rank))},
            generation=1,
            rank=rank,
            world_size=3,
            step=4,
            extra={"of": rank},
            owns_replicated=True,
        )
    state = {f"w{rank}": torch.zeros(100) for rank in range(3)}
    loaded = stores[1].load(state, nodes.source(*stores, step=4), check=_nothing)
    assert (loaded.extra, loaded.local_bytes, loaded.remote_bytes) == ({"of": 0}, 400, 800)
    assert [float(tensor[0]) for tensor in state.values()] == [0, 1, 2]


def test_buddy_keeps_the_two_newest_copies(nodes: Any) -> None:
    writer, buddy = nodes.start("a"), nodes.start("b")
    for step in range(1, 5):
        _snapshot(writer, step)
        assert writer.replicate(nodes.server(buddy))
        cost = _wait_until_sent(writer)
        assert cost.num_bytes == writer.snapshot_parts()[0].num_bytes
        assert cost.cpu_s > 0
        assert cost.wall_s > 0
    assert _steps(buddy) == [(1, 3), (1, 4)]
    assert {part.node_id for part in buddy.snapshot_parts()} == {"b"}
    assert writer.sender.take_cost() is None


def test_the_step_of_which_every_rank_has_a_copy_outlives_later_copies_of_one_rank(nodes: Any) -> None:
    writer, buddy = nodes.start("a"), nodes.start("b")
    for step, keep in ((1, None), (2, 1), (3, 1), (4, 1)):
        _snapshot(writer, step)
        assert writer.replicate(nodes.server(buddy), keep_step=keep)
        cost = _wait_until_sent(writer)
        assert (cost.generation, cost.step) == (1, step)
        assert (1, 1) in _steps(writer) and (1, 1) in _steps(buddy)
    assert _steps(buddy) == [(1, 1), (1, 4)]


def test_a_local_copy_is_read_even_if_the_supervisor_named_another_node(nodes: Any) -> None:
    writer, buddy = nodes.start("a"), nodes.start("b")
    _snapshot(writer, 7)
    assert writer.replicate(nodes.server(buddy))
    _wait_until_sent(writer)
    assert buddy.load(_state(-1), nodes.source(writer, step=7), check=_nothing).remote_bytes == 0


def test_a_busy_sender_refuses_and_its_slot_is_not_overwritten(nodes: Any, mute: SnapshotServer) -> None:
    writer = nodes.start("a")
    _snapshot(writer, 1)
    assert writer.replicate(mute)
    assert not writer.replicate(mute)
    for step in range(2, 6):
        _snapshot(writer, step)
    assert _steps(writer) == [(1, 1), (1, 4), (1, 5)]


def test_the_step_that_the_buddy_has_is_kept_until_the_next_one_is_sent(nodes: Any) -> None:
    """After the buddy's node is lost, the restore needs the survivors' own parts and the copies of the lost parts."""
    writer, buddy = nodes.start("a"), nodes.start("b")
    for step in range(1, 10):
        _snapshot(writer, step)
        if step % 3 == 0:
            assert writer.replicate(nodes.server(buddy))
            _wait_until_sent(writer)
    assert {(1, 6), (1, 9)} <= set(_steps(writer))
    assert _steps(buddy) == [(1, 6), (1, 9)]
    assert len(_steps(writer)) <= 4


def test_a_dead_buddy_costs_only_the_copy(nodes: Any) -> None:
    writer, buddy, other = nodes.start("a"), nodes.start("b"), nodes.start("c")
    dead = nodes.server(buddy)
    buddy.close()
    _snapshot(writer, 1)
    assert writer.replicate(dead)
    _wait_until(lambda: writer.replicate(nodes.server(other)))
    _wait_until_sent(writer)
    assert _steps(other) == [(1, 1)]


def test_copies_of_earlier_generations_are_dropped_and_refused(nodes: Any) -> None:
    writer, buddy = nodes.start("a"), nodes.start("b")
    _snapshot(writer, 1)
    assert writer.replicate(nodes.server(buddy))
    _wait_until_sent(writer)
    buddy.drop_older(1)
    assert _steps(buddy) == [(1, 1)]
    buddy.drop_older(2)
    assert _steps(buddy) == []
    assert writer.replicate(nodes.server(buddy))
    _snapshot(writer, 2, generation=2)
    _wait_until(lambda: writer.replicate(nodes.server(buddy)))
    _wait_until_sent(writer)
    assert _steps(buddy) == [(2, 2)]


@pytest.mark.parametrize("cut_at", ["before anything", "in the index", "in the payload"])
def test_an_interrupted_copy_is_not_listed_and_the_previous_copy_stays(
    nodes: Any, connect_to: Callable[..., Wire], cut_at: str
) -> None:
    writer, buddy = nodes.start("a"), nodes.start("b")
    for step in (1, 2):
        _snapshot(writer, step)
        assert writer.replicate(nodes.server(buddy))
        _wait_until_sent(writer)
    sent = {"before anything": 0, "in the index": 50, "in the payload": 100 + 10 + 3000}[cut_at]
    with connect_to(buddy) as wire:
        part = Part(generation=1, rank=0, world_size=1, step=3, num_bytes=4000, index_bytes=100, extra_bytes=10)
        wire.send_message(Request(verb=Verb.PUT, part=part))
        assert wire.receive_message(Answer).ok
        wire.send(bytes(sent))
    assert (1, 3) not in _steps(buddy)
    assert (1, 2) in _steps(buddy)
    _snapshot(writer, 4)
    assert writer.replicate(nodes.server(buddy))
    _wait_until_sent(writer)
    assert _steps(buddy) == [(1, 2), (1, 4)]


def test_a_copy_is_refused_if_there_is_no_memory_for_it(nodes: Any, connect_to: Callable[..., Wire]) -> None:
    buddy = nodes.start("b")
    with connect_to(buddy) as wire:
        part = Part(generation=1, rank=0, world_size=1, step=3, num_bytes=1 << 60)
        wire.send_message(Request(verb=Verb.PUT, part=part))
        answer = wire.receive_message(Answer)
    assert not answer.ok
    assert "bytes of shared memory" in answer.why


def test_a_wrong_key_is_refused_by_both_sides(nodes: Any, connect_to: Callable[..., Wire]) -> None:
    writer = nodes.start("a")
    _snapshot(writer, 1)
    with pytest.raises(PeerRefused, match="does not accept this attempt's key"):
        connect_to(writer, key="wrong")
    stranger = nodes.start("b", key="wrong", attempt=2)
    with pytest.raises(SnapshotLost, match="does not accept this attempt's key"):
        stranger.load(_state(-1), nodes.source(writer, step=1), check=_nothing)


def test_a_server_that_does_not_know_the_key_is_refused(nodes: Any) -> None:
    reader = nodes.start("a")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pretend() -> None:
            client, _ = server.accept()
            with client:
                client.sendall(bytes(32))
                client.recv(64, socket.MSG_WAITALL)
                client.sendall(bytes(32))

        impostor = threading.Thread(target=pretend)
        impostor.start()
        source = SnapshotSource(
            generation=1,
            world_size=1,
            step=1,
            parts=(SnapshotServer(node_id="b", host="127.0.0.1", port=server.getsockname()[1]),),
        )
        with pytest.raises(SnapshotLost, match="does not know this attempt's key"):
            reader.load(_state(-1), source, check=_nothing)
        impostor.join()


@pytest.mark.parametrize(
    "message",
    [
        b"\0\0\0\0",
        b"\xff\xff\xff\xff",
        b"\5\0\0\0hello",
        *(
            len(text).to_bytes(4, "little") + text
            for text in (
                json.dumps(document).encode()
                for document in (
                    [],
                    {"verb": "nosuch"},
                    {"verb": "find"},
                    {"verb": "read", "part": {"generation": -1, "rank": 0, "step": 0}},
                    {"verb": "put", "part": {"generation": 1, "rank": 0, "step": 0, "num_bytes": -5}},
                    {"verb": "put", "part": {"generation": 1, "rank": 0, "step": 0, "num_bytes": 1 << 62}},
                    {"verb": "read", "part": {"generation": 1, "rank": 0, "step": 1}, "ranges": [[-1, 5]]},
                )
            )
        ),
    ],
)
def test_the_server_closes_the_connection_after_an_invalid_request(
    nodes: Any, connect_to: Callable[..., Wire], message: bytes
) -> None:
    writer, reader = nodes.start("a"), nodes.start("b")
    _snapshot(writer, 1)
    with connect_to(writer) as wire, pytest.raises(ConnectionError):
        wire.send(message)
        wire.receive(1)
    assert reader.load(_state(-1), nodes.source(writer, step=1), check=_nothing).remote_bytes == 4008


def test_a_range_beyond_the_payload_is_refused(nodes: Any, connect_to: Callable[..., Wire]) -> None:
    writer = nodes.start("a")
    _snapshot(writer, 1)
    with connect_to(writer) as wire:
        wire.send_message(Request(verb=Verb.FIND, part=Part(generation=1, rank=0, step=1)))
        part = wire.receive_message(Answer).part
        assert part is not None
        wire.receive(part.index_bytes + part.extra_bytes)
        wire.send_message(Request(verb=Verb.READ, part=part, ranges=((0, part.num_bytes), (part.num_bytes, 1))))
        assert not wire.receive_message(Answer).ok
        wire.send_message(Request(verb=Verb.UNCHANGED, part=part))
        assert wire.receive_message(Answer).ok


def test_silent_clients_do_not_block_other_clients(nodes: Any) -> None:
    writer, reader = nodes.start("a"), nodes.start("b")
    _snapshot(writer, 1)
    silent = [socket.create_connection(("127.0.0.1", writer.port)) for _ in range(80)]
    try:
        assert reader.load(_state(-1), nodes.source(writer, step=1), check=_nothing).remote_bytes == 4008
    finally:
        for sock in silent:
            sock.close()


def test_a_fenced_generation_stops_waiting_for_a_silent_peer(nodes: Any, mute: SnapshotServer) -> None:
    reader = nodes.start("a")
    num_checks = 0

    class Fenced(Exception):
        pass

    def check() -> None:
        nonlocal num_checks
        num_checks += 1
        if num_checks == 4:
            raise Fenced

    source = SnapshotSource(generation=1, world_size=1, step=1, parts=(mute,))
    with pytest.raises(Fenced):
        reader.load(_state(-1), source, check=check)


def test_a_silent_peer_times_out(mute: SnapshotServer) -> None:
    with pytest.raises(TimeoutError, match=r"no progress for 0\.3 s"):
        connect(mute, "secret", check=_nothing, patience_s=0.3)


def test_close_interrupts_transfers(nodes: Any, mute: SnapshotServer, caplog: pytest.LogCaptureFixture) -> None:
    writer, other = nodes.start("a"), nodes.start("b")
    _snapshot(writer, 1)
    assert writer.replicate(mute)
    with socket.create_connection(("127.0.0.1", other.port)):
        start = time.monotonic()
        writer.close()
        other.close()
        assert time.monotonic() - start < 8.0, "close must not wait for the 10 s timeout of a silent peer"
    [failed] = [record for record in caplog.records if record.message == "snapshot_store.send_failed"]
    assert failed.error == "ConnectionAbortedError: this process is closing its snapshot store", "not a timeout"
