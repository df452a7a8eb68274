"""Connections: limited by address and in all, ended when their request does not arrive, refused without descriptors."""

import logging
import os
import resource
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from shoal_api.http.serving import ConnectionLimits, HttpConfig, RequestTimeouts

HALF = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"


def connect(url: str, head: bytes = HALF) -> socket.socket:
    parts = httpx.URL(url)
    connection = socket.create_connection((parts.host, parts.port or 80), timeout=30)
    connection.sendall(head)
    return connection


def read_all(connection: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    pieces = []
    with connection:
        while piece := _receive(connection):
            pieces.append(piece)
    return b"".join(pieces)


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(65536)
    except ConnectionResetError:
        return b""


def is_alive(url: str) -> bool:
    return httpx.get(f"{url}/healthz", timeout=30, trust_env=False).status_code == 200


def test_connections_of_one_address_are_limited_and_make_room_when_they_end(serve: Any) -> None:
    url, metrics = serve(HttpConfig(connections=ConnectionLimits(per_address=3)))
    with ExitStack() as held:
        for _ in range(3):
            held.enter_context(connect(url))
        answer = read_all(connect(url, b""))
        assert answer.startswith(b"HTTP/1.1 503 ") and b"Retry-After: 1" in answer
        assert b"The limit is 3 connections of one address (SHOAL_LIMIT_ADDRESS_CONNECTIONS)" in answer
        assert metrics.refusals.values()["connections",] == 1
    while b"503" in read_all(connect(url, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")):
        pass
    assert is_alive(url)


def test_a_trusted_proxy_has_the_connections_of_many_and_counts_in_all(serve: Any) -> None:
    url, _ = serve(HttpConfig(connections=ConnectionLimits(per_address=1, total=3, proxies="10.0.0.0/8, 127.0.0.1")))
    with ExitStack() as held:
        for _ in range(3):
            held.enter_context(connect(url))
        assert b"SHOAL_LIMIT_CONNECTIONS" in read_all(connect(url, b""))


def test_a_request_that_does_not_arrive_ends_with_its_connection(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    url, _ = serve(HttpConfig(timeouts=RequestTimeouts(head_s=0.3, idle_s=0.5, body_s=2.0)))
    silent, half = connect(url, b""), connect(url)
    assert read_all(half).startswith(b"HTTP/1.1 408 ") and read_all(silent).startswith(b"HTTP/1.1 408 ")
    body = (
        b"POST /v1/session HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
    )
    assert read_all(connect(url, body)) == b""
    second = connect(url, HALF + b"\r\n" + HALF)
    answers = read_all(second)
    assert answers.startswith(b"HTTP/1.1 200 "), "the second request on the same connection is half"
    assert is_alive(url)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR], (
        "a client that leaves is no error"
    )


def test_without_descriptors_connections_are_dropped_and_the_log_has_one_line(
    serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    url, metrics = serve(HttpConfig())
    with httpx.Client(base_url=url, timeout=30, trust_env=False) as http, ExitStack() as held:
        assert http.get("/healthz").status_code == 200
        waiting = [held.enter_context(socket.socket()) for _ in range(5)]
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        highest = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, before[1]))
        while True:  # the gaps below the limit
            try:
                held.callback(os.close, os.open(os.devnull, os.O_RDONLY))
            except OSError:
                break
        parts = httpx.URL(url)
        for connection in waiting:
            connection.settimeout(30)
            connection.connect((parts.host, parts.port))
            assert _receive(connection) == b""  # and not closed, so that it gives no descriptor back
            assert http.get("/healthz").status_code == 200, "on a connection that there was"
    assert metrics.refusals.values()["connections",] == 5
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == ["http.no_descriptors"]
    assert is_alive(url)


@pytest.mark.parametrize(
    ("descriptors", "most"), [(256, 160), (64, 32), (1024, 928), (1_048_576, 4096)], ids=["256", "64", "1024", "many"]
)
def test_the_server_keeps_descriptors_for_itself(descriptors: int, most: int) -> None:
    assert ConnectionLimits().limit_total(descriptors) == most
