"""How a gateway reads code archives: once each, one after the other, and on from where a connection broke."""

import asyncio
import hashlib
from collections import Counter

import pytest

from doubles.event_loop import settle
from shoal_service.gateway.answering import Downloads
from shoal_service.gateway.link import Link


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
