"""A gateway: how it reads archives of code, which nodes have another release, and its reserve process."""

import asyncio
import hashlib
from collections import Counter

import pytest

from doubles.event_loop import settle
from shoal_service.gateway.gateway import Downloads, Link
from shoal_service.gateway.ray_cluster import SETTLE_S, SupervisorReserve, describe_other_releases


async def test_forty_orders_for_a_few_archives_read_each_once_and_one_at_a_time() -> None:
    reads, open_now, most = Counter[str](), 0, 0
    may_end = asyncio.Event()

    async def read(sha256: str) -> bytes:
        nonlocal open_now, most
        reads[sha256] += 1
        open_now += 1
        most = max(most, open_now)
        await may_end.wait()
        open_now -= 1
        return sha256.encode()

    downloads = Downloads(read)
    orders = [asyncio.create_task(downloads.archive(f"a{number % 5}")) for number in range(40)]
    await settle()
    orders[0].cancel()  # the control plane waits no longer, and orders it again
    again = asyncio.create_task(downloads.archive("a0"))
    may_end.set()
    assert await again == b"a0" and [await one for one in orders[1:6]] == [b"a1", b"a2", b"a3", b"a4", b"a0"]
    assert reads == {f"a{number}": 1 for number in range(5)} and most == 1


async def test_a_reading_that_failed_is_begun_again() -> None:
    failures = [OSError("no answer")]

    async def read(sha256: str) -> bytes:
        if failures:
            raise failures.pop()
        return b"x"

    downloads = Downloads(read)
    with pytest.raises(OSError, match="no answer"):
        await downloads.archive("a")
    await settle()
    assert await downloads.archive("a") == b"x"


def test_an_archive_goes_on_where_its_connection_broke() -> None:
    data = bytes(range(256)) * 400
    asked: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        asked.append(head.partition("range: bytes=")[2].partition("\r\n")[0])
        begin = int(asked[-1].rstrip("-"))
        status = "206 Partial Content" if begin else "200 OK"
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(data) - begin}\r\n\r\n".encode())
        writer.write(data[begin : begin + 60_000])
        await writer.drain()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        link = Link(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "token", "east")
        assert await link.archive(hashlib.sha256(data).hexdigest()) == data
        assert asked == ["0-", "60000-"]
        await link.close()
        server.close()

    asyncio.run(main())


def test_both_releases_and_the_nodes_are_named() -> None:
    words = describe_other_releases("0.2.0", {"10.0.0.3": "0.1.0", "10.0.0.2": "0.2.0", "10.0.0.4": "none"})
    assert words == (
        " The control plane is Shoal 0.2.0, and 10.0.0.3 has 0.1.0, 10.0.0.4 has no Shoal: "
        "install the same release on every node."
    )


def test_nothing_is_said_of_equal_releases() -> None:
    assert describe_other_releases("0.2.0", {}) == describe_other_releases("0.2.0", {"10.0.0.2": "0.2.0"}) == ""


def test_of_many_nodes_some_are_named() -> None:
    assert "and 15 more nodes:" in describe_other_releases("0.2.0", {f"10.0.0.{n}": "0.1.0" for n in range(20)})


KEEP_S = 600.0
NODES = ["n1", "n2", "n3"]


def reserve() -> SupervisorReserve:
    """One supervisor was started at time 0."""
    found = SupervisorReserve(KEEP_S)
    assert not found.is_due(1e9), "nothing is started before there is a job"
    assert found.take("env", NODES, 0.0) == ""
    return found


def test_a_process_is_started_a_while_after_the_last_supervisor_and_used_once() -> None:
    kept = reserve()
    assert kept.renew(NODES, SETTLE_S - 0.1) is None
    assert kept.renew(NODES, SETTLE_S) == ("n1", "env")
    assert not kept.is_due(SETTLE_S + 1)
    assert kept.take("env", NODES, 10.0) == "n1"
    assert kept.take("env", NODES, 10.1) == "", "it is used up"


def test_the_next_one_is_on_another_node() -> None:
    kept = reserve()
    used = []
    for at in range(5):
        assert kept.renew(NODES, 100.0 * at + SETTLE_S) is not None
        used.append(kept.take("env", NODES, 100.0 * at + 50))
    assert used == ["n1", "n2", "n3", "n1", "n2"]


def test_it_is_kept_for_a_supervisor_that_may_use_it() -> None:
    kept = reserve()
    kept.renew(NODES, SETTLE_S)
    assert kept.take("env", ["n2"], 10.0) == "", "its node is avoided"
    assert kept.take("env", NODES, 11.0) == "n1"


def test_it_is_replaced_before_it_ends_and_with_its_node() -> None:
    kept = reserve()
    kept.renew(NODES, SETTLE_S)
    assert kept.renew(NODES, SETTLE_S + KEEP_S - 30) is None
    assert kept.renew(NODES, SETTLE_S + KEEP_S - 20) == ("n2", "env")
    assert kept.take("env", NODES, SETTLE_S + 2 * KEEP_S) == "", "it has ended by then"
    other = reserve()
    other.renew(NODES, SETTLE_S)
    assert other.take("env", ["n2"], 10.0) == ""
    assert other.renew(["n2"], 20.0) == ("n2", "env"), "its node has gone"


def test_a_supervisor_with_another_environment_does_not_use_it() -> None:
    kept = reserve()
    kept.renew(NODES, SETTLE_S)
    assert kept.take("other", NODES, 10.0) == ""
    assert kept.renew(NODES, 20.0) == ("n2", "other"), "the next one is expected to be like the last"
