"""The rendezvous store over real sockets: who may use it, how waits end, and that it equals torch's own stores."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed import DistStoreError

from shoal_workers.engine.generation_ends import Fenced, FormFailed
from shoal_workers.engine.group.fence import Fence
from shoal_workers.engine.group.gloo import bounded_connecting, listening_addresses, replace_constructor
from shoal_workers.engine.group.store.client import GenerationStore, StoreConnection
from shoal_workers.engine.group.store.messages import Operation, Space, StoreRequest, pack
from shoal_workers.engine.group.store.server import StoreServer

KEY = "the attempt's key"
PATIENCE = timedelta(seconds=60)


@pytest.fixture
def server() -> Iterator[StoreServer]:
    server = StoreServer("127.0.0.1", KEY)
    yield server
    server.close()


Connect = Callable[..., GenerationStore]


@pytest.fixture
def connect(server: StoreServer) -> Iterator[Connect]:
    """`connect(generation, check)`: a store of that generation with a connection of its own."""
    connections = []

    def connect(generation: int = 1, check: Callable[[], None] = lambda: None) -> GenerationStore:
        connections.append(connection_to(server))
        return GenerationStore(connections[-1], Space(generation, "job/1"), check=check, timeout=PATIENCE)

    yield connect
    for connection in connections:
        connection.close()


def connection_to(server: StoreServer, key: str = KEY, patience_s: float = 20.0) -> StoreConnection:
    return StoreConnection((server.host, server.port), key, check=lambda: None, patience_s=patience_s)


def test_it_listens_on_its_own_address_only(server: StoreServer) -> None:
    assert ("127.0.0.1", server.port) in listening_addresses()
    assert not {("0.0.0.0", server.port), ("::", server.port)} & listening_addresses()


def test_a_client_without_the_key_is_refused(server: StoreServer) -> None:
    with pytest.raises(ConnectionError, match="does not accept this attempt's key"):
        connection_to(server, "another key")


def test_a_server_without_the_key_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def pretend() -> None:
            sock, _ = impostor.accept()
            with sock:
                sock.sendall(b"n" * 32)
                sock.recv(64)
                sock.sendall(b"p" * 32)
                sock.recv(1)

        threading.Thread(target=pretend, daemon=True).start()
        with pytest.raises(ConnectionError, match="does not know this attempt's key"):
            StoreConnection(impostor.getsockname(), KEY, check=lambda: None, patience_s=60.0)


def test_requests_before_the_proof_are_not_served(server: StoreServer) -> None:
    with socket.create_connection((server.host, server.port), timeout=60) as stranger:
        assert len(stranger.recv(32, socket.MSG_WAITALL)) == 32
        stranger.sendall(b"x" * 1000)
        with pytest.raises(OSError):
            while stranger.recv(1):
                pytest.fail("the server answered")
            raise ConnectionResetError
    assert server.num_keys == 0


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(64), b"\x16\x03\x01" * 100, b"\xff" * 100_000])
def test_junk_of_a_stranger_ends_its_own_connection_only(server: StoreServer, connect: Connect, junk: bytes) -> None:
    """No rank of the group sees an error of it, so no job is charged for it."""
    store = connect()
    with socket.create_connection((server.host, server.port), timeout=60) as stranger:
        with suppress(OSError):  # the server may close it before everything is sent
            stranger.sendall(junk)
            while stranger.recv(1 << 16):
                pass
    store.set("key", "value")
    assert store.get("key") == b"value" and server._thread.is_alive()


@pytest.mark.parametrize("junk", [b"\xff" * 100, pack([b"\xff"] * 5), pack([b"1", b"set", b"x", b"y"]), pack([b"1"])])
def test_junk_of_a_member_ends_its_own_connection_only(server: StoreServer, connect: Connect, junk: bytes) -> None:
    store, member = connect(), connection_to(server)
    member._socket.sendall(junk)
    member._socket.settimeout(60)
    with suppress(OSError):
        assert member._socket.recv(1) == b""
    member.close()
    store.set("key", "value")
    assert store.get("key") == b"value" and server._thread.is_alive()


def test_a_name_is_no_address() -> None:
    with pytest.raises(OSError, match="illegal IP address"):
        StoreConnection(("localhost", 1), KEY, check=lambda: None, patience_s=1.0)


def test_silent_connections_do_not_keep_others_out() -> None:
    server = StoreServer("127.0.0.1", KEY, max_unproven=3, proof_s=0.2)
    silent = [socket.create_connection((server.host, server.port), timeout=60) for _ in range(4)]
    connection_to(server).close()
    assert len(silent[0].recv(33, socket.MSG_WAITALL)) == 32, "the oldest one was closed after its challenge"
    for one in silent:
        one.close()
    server.close()


def test_a_server_that_is_awake_ends_before_it_is_woken_and_closes_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The order of the threads is forced: it ends between the two steps of `close`."""
    server = StoreServer("127.0.0.1", KEY, max_unproven=1, proof_s=600.0)
    silent = [socket.create_connection((server.host, server.port), timeout=60) for _ in range(2)]
    stop, thread = server._stopped.set, server._thread

    def stop_and_await_the_end() -> None:
        stop()
        thread.join(60)
        assert not thread.is_alive(), "the second connection keeps it awake"

    monkeypatch.setattr(server._stopped, "set", stop_and_await_the_end)
    server.close()
    server.close()
    assert [server._wake.fileno(), server._woken.fileno(), server._listener.fileno()] == [-1, -1, -1]
    for one in silent:
        one.close()


def test_every_closer_returns_after_the_thread_has_ended() -> None:
    server = StoreServer("127.0.0.1", KEY)
    alive: list[bool] = []

    def close() -> None:
        server.close()
        alive.append(server._thread.is_alive())

    closers = [threading.Thread(target=close) for _ in range(8)]
    for one in closers:
        one.start()
    for one in closers:
        one.join(60)
    assert alive == [False] * 8


def test_clients_that_reset_their_connection_at_any_point_harm_no_other(server: StoreServer, connect: Connect) -> None:
    store = connect()
    for _ in range(20):
        stranger = socket.create_connection((server.host, server.port))
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stranger.close()  # before or after it is accepted
        gone = connection_to(server)
        gone._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        request = StoreRequest(1, Operation.GET, Space(1, "job/1"), (b"key", b"absent"))
        gone._socket.send(request.pack())
        gone._socket.close()  # reset while its request waits, or is about to
        gone.close()
        store.set("key", "value")
    store.set("absent", "value")
    assert connect().get("absent") == b"value"
    assert server._thread.is_alive()


def operations(store: Store) -> list[Any]:
    """What torch's own code does with a store, through PrefixStore."""
    prefixed = PrefixStore("groups", store)
    found: list[Any] = [prefixed.add("n", 2), prefixed.add("n", 3), prefixed.check(["n", "k"])]
    prefixed.set("k", "v")
    prefixed.append("k", "w")
    found += [prefixed.get("k"), prefixed.check(["n", "k"]), prefixed.multi_get(["k", "n"])]
    prefixed.multi_set(["a", "b"], ["1", "2"])
    prefixed.wait(["a", "b"])
    found += [prefixed.compare_set("a", "1", "3"), prefixed.compare_set("a", "1", "4"), prefixed.get("a")]
    found += [prefixed.delete_key("a"), prefixed.delete_key("a"), prefixed.check(["a"])]
    return [*found, prefixed.num_keys(), prefixed.has_extended_api()]


def test_torch_finds_in_it_what_it_finds_in_its_own_store(connect: Connect) -> None:
    assert operations(connect()) == operations(HashStore())


def test_a_clone_does_not_wait_for_a_wait_of_the_store(connect: Connect) -> None:
    store = connect()
    clone, found = store.clone(), []
    thread = threading.Thread(target=lambda: found.append(store.get("late")))
    thread.start()
    clone.set("other", "1")
    clone.set("late", "2")
    thread.join(60)
    assert (found, store.get("other")) == ([b"2"], b"1")
    store.close()


def test_a_clone_is_fenced_and_closed_with_its_store(server: StoreServer) -> None:
    fence = Fence()
    connection = connection_to(server)
    store = GenerationStore(connection, Space(1, "job/1"), check=fence.of(1).check, timeout=timedelta(hours=1))
    clone, errors = store.clone(), []

    def wait() -> None:
        try:
            clone.get("never")
        except Fenced as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    fence.raise_to(1)
    store.wake()
    thread.join(60)
    assert len(errors) == 1
    store.close()
    with pytest.raises(DistStoreError, match="has left the rendezvous store"):
        clone.set("key", "value")
    with pytest.raises(DistStoreError, match="has left the rendezvous store"):
        store.clone()
    connection.close()


def test_a_timeout_that_is_set_through_a_prefix_counts_and_is_worded_as_torch_words_it(connect: Connect) -> None:
    own, of_torch = connect(), HashStore()
    for store in (own, of_torch):
        prefixed = PrefixStore("groups", store)
        prefixed.set_timeout(timedelta(seconds=0.05))
        with pytest.raises(DistStoreError, match=r"(?i)wait timeout"):
            prefixed.get("never")
    assert own.timeout == of_torch.timeout == timedelta(seconds=0.05)


def test_a_wait_that_passes_its_timeout_names_the_keys_and_spoils_nothing(connect: Connect) -> None:
    store = connect()
    with pytest.raises(DistStoreError, match=r"did not answer wait never within 0\.05 s"):
        store.wait(["never"], timedelta(seconds=0.05))
    store.set("never", "1")
    assert store.get("never") == b"1"


def test_the_fence_ends_a_wait_and_the_connection_serves_the_next_generation(server: StoreServer) -> None:
    fence = Fence()
    connection = connection_to(server)
    store = GenerationStore(connection, Space(1, "job/1"), check=fence.of(1).check, timeout=timedelta(hours=1))
    errors: list[BaseException] = []
    waits = threading.Event()

    def wait() -> None:
        waits.set()
        try:
            PrefixStore("groups", store).wait(["never"])
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    waits.wait(60)
    fence.raise_to(1)
    connection.wake()
    thread.join(60)
    assert [type(error) for error in errors] == [Fenced]
    assert connection.is_idle
    following = GenerationStore(connection, Space(2, "job/1"), check=fence.of(2).check, timeout=PATIENCE)
    following.set("key", "value")
    assert following.get("key") == b"value"
    connection.close()


def test_a_lost_store_ends_a_wait(server: StoreServer, connect: Connect) -> None:
    store = connect()
    threading.Timer(0.05, server.close).start()
    with pytest.raises(DistStoreError, match="was lost"):
        store.get("never")


def test_an_error_of_the_store_passes_through_gloo(connect: Connect) -> None:
    """The constructor of a group is C++, and calls the store from there."""
    with pytest.raises(DistStoreError):
        dist.ProcessGroupGloo(connect(), 0, 2, timeout=timedelta(seconds=0.3))


def test_a_rank_without_an_address_is_a_rank_that_has_not_connected(
    monkeypatch: pytest.MonkeyPatch, connect: Connect
) -> None:
    """The wait for the addresses may end just before the limit of connecting is seen; here it always does."""
    monkeypatch.setenv("GLOO_ENABLE_STORE_V2_API", "1")
    replace_constructor()
    store = connect()
    store.set_timeout(timedelta(seconds=0.3))

    def await_the_constructor() -> None:
        for thread in threading.enumerate():
            if thread.name == "shoal-connect":
                thread.join(60)

    message = (
        r"not all ranks have connected to this one within 0\.3 s: the rendezvous store .* did not answer get 0/0, 0/1"
    )
    with pytest.raises(FormFailed, match=message), bounded_connecting(await_the_constructor, 0.3):
        dist.ProcessGroupGloo(store, 0, 2, timeout=timedelta(seconds=600))
