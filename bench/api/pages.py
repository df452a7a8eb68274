"""Many open pages of one job: from a worker's report of a step to the last of them.

The latency of a step is counted from the time at which rank 0 has completed it to the time at which the last of the
clients has received it. The steps before all clients are connected do not count.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from typing import Any

from kit.processes.os_processes import cpu_seconds


class Pages:
    def __init__(self, port: int, token: str, job_id: str, count: int) -> None:
        self._port, self._token, self._job_id, self._count = port, token, job_id, count
        self._first: dict[int, list[float]] = {}
        """When each client received a step, by step."""
        self._completed: dict[int, float] = {}
        self._last_step: list[int] = [0] * count
        self._is_connected = [asyncio.Event() for _ in range(count)]

    async def follow(self, pid: int, seconds: float) -> dict[str, Any]:
        tasks = [asyncio.create_task(self._page(number)) for number in range(self._count)]
        await asyncio.gather(*(event.wait() for event in self._is_connected))
        first, cpu, begun_mono = max(self._last_step) + 1, cpu_seconds(pid), time.monotonic()
        await asyncio.sleep(seconds)
        cpu_share = (cpu_seconds(pid) - cpu) / (time.monotonic() - begun_mono)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        complete = [step for step, times in self._first.items() if step >= first and len(times) == self._count]
        late = sorted(max(self._first[step]) - self._completed[step] for step in complete)
        assert len(late) > seconds / 2, f"only {len(late)} steps reached all pages in {seconds:g} s"
        return {
            "stream_p50_ms": round(statistics.median(late) * 1e3),
            "stream_p99_ms": round(late[int(len(late) * 0.99)] * 1e3),
            "stream_steps": len(late),
            "cpu_share": round(cpu_share, 3),
        }

    async def _page(self, number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 24)
        request = f"GET /v1/jobs/{self._job_id}/overview?logs=true HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\n"
        writer.write(f"{request}Authorization: Bearer {self._token}\r\nAccept: text/event-stream\r\n\r\n".encode())
        name = b""
        try:
            while line := await reader.readline():
                if line.startswith(b"event:"):
                    name = line[6:].strip()
                elif line.startswith(b"data:") and name == b"series":
                    self._received(number, json.loads(line[5:]))
        finally:
            writer.close()

    def _received(self, number: int, series: dict[str, Any]) -> None:
        now, columns = time.time(), series["columns"]
        for step, at in zip(columns["step"], columns["at"], strict=True):
            self._completed[step] = at
            self._first.setdefault(step, []).append(now)
            self._last_step[number] = step
        self._is_connected[number].set()
