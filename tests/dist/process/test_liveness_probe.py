"""The liveness probe: only the closed port of a process proves that it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from shoal_service.supervisor.protocols import Gone
from shoal_service.supervisor.workers import probes

_PATIENCE_S = 60.0
Listening = tuple[subprocess.Popen[str], int, Callable[[], str]]


def _unknown() -> None:
    """The raylet's port is unknown."""


_LISTENS = """
import socket, sys
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
connection, _ = listener.accept()
print("connected", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def listening() -> Iterator[Listening]:
    """A listening process, its port, and a function that returns when a connection is open."""
    with subprocess.Popen(
        [sys.executable, "-c", _LISTENS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline()), process.stdout.readline
        process.kill()


def _refused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def test_a_killed_process_is_reported_dead(listening: Listening) -> None:
    process, port, connected = listening

    async def story() -> None:
        watching = asyncio.create_task(probes.until_gone(("127.0.0.1", port), _unknown))
        await asyncio.to_thread(connected)
        process.kill()
        assert not _reported(await asyncio.wait_for(watching, _PATIENCE_S)).with_raylet
        assert await probes.refuses(("127.0.0.1", port))

    asyncio.run(story())


def test_a_busy_loop_does_not_take_an_open_port_for_a_silent_one() -> None:
    async def story() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            asking = asyncio.create_task(probes.accepts(listener.getsockname()))
            await asyncio.sleep(0)
            await asyncio.sleep(0)  # the connect is under way
            time.sleep(3 * probes.REFUSAL_S)  # noqa: ASYNC251 -- as a long turn of the supervisor does
            assert await asyncio.wait_for(asking, _PATIENCE_S)

    asyncio.run(story())


def test_a_process_that_closes_the_connection_is_alive() -> None:
    async def story() -> None:
        connected: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
        server = await asyncio.start_server(lambda _, writer: connected.put_nowait(writer), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        watching = asyncio.create_task(probes.until_gone(("127.0.0.1", port), _unknown))
        for _ in range(3):
            writer = await asyncio.wait_for(connected.get(), _PATIENCE_S)
            assert not watching.done()
            writer.transport.abort()
        last = await asyncio.wait_for(connected.get(), _PATIENCE_S)
        assert not watching.done() and not await probes.refuses(("127.0.0.1", port))
        last.close()
        (await asyncio.wait_for(connected.get(), _PATIENCE_S)).close()  # the check above opened a connection
        server.close()
        assert not _reported(await asyncio.wait_for(watching, _PATIENCE_S)).with_raylet

    asyncio.run(story())


def test_a_broken_connection_to_a_closed_raylet_is_reported_as_its_end() -> None:
    async def story() -> None:
        connected: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
        at_raylet: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
        server = await asyncio.start_server(lambda _, writer: connected.put_nowait(writer), "127.0.0.1", 0)
        raylet = await asyncio.start_server(lambda _, writer: at_raylet.put_nowait(writer), "127.0.0.1", 0)
        port, raylet_port = (one.sockets[0].getsockname()[1] for one in (server, raylet))
        watching = asyncio.create_task(probes.until_gone(("127.0.0.1", port), lambda: ("127.0.0.1", raylet_port)))
        first = await asyncio.wait_for(connected.get(), _PATIENCE_S)
        (await asyncio.wait_for(at_raylet.get(), _PATIENCE_S)).close()
        first.transport.abort()
        second = await asyncio.wait_for(connected.get(), _PATIENCE_S)
        assert not watching.done(), "the raylet was there when the connection broke"
        while not at_raylet.empty():
            at_raylet.get_nowait().close()
        raylet.close()
        second.transport.abort()
        assert _reported(await asyncio.wait_for(watching, _PATIENCE_S)).with_raylet
        server.close()

    asyncio.run(story())


def test_a_raylet_that_was_never_reachable_proves_nothing() -> None:
    async def story() -> None:
        connected: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
        server = await asyncio.start_server(lambda _, writer: connected.put_nowait(writer), "127.0.0.1", 0)
        raylet = ("127.0.0.1", _refused_port())
        watching = asyncio.create_task(probes.until_gone(server.sockets[0].getsockname(), lambda: raylet))
        (await asyncio.wait_for(connected.get(), _PATIENCE_S)).transport.abort()
        last = await asyncio.wait_for(connected.get(), _PATIENCE_S)
        assert not watching.done()
        server.close()
        last.transport.abort()
        assert not _reported(await asyncio.wait_for(watching, _PATIENCE_S)).with_raylet

    asyncio.run(story())


def test_a_port_that_was_never_open_proves_nothing() -> None:
    assert asyncio.run(probes.until_gone(("127.0.0.1", _refused_port()), _unknown)) is None


def test_a_cancelled_watch_ends(listening: Listening) -> None:
    _, port, connected = listening

    async def story() -> None:
        watching = asyncio.create_task(probes.until_gone(("127.0.0.1", port), _unknown))
        await asyncio.to_thread(connected)
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        assert watching.cancelled()

    asyncio.run(story())


def _reported(gone: Gone | None) -> Gone:
    assert gone is not None and 0 < time.time() - gone.at < _PATIENCE_S
    return gone
