"""Many open pages of one job that trains: from a worker's report of a step to the last client, and what it costs.

The latency of a step is counted from the time at which rank 0 has completed it to the time at which the last of the
clients has received it. The steps before all clients are connected do not count.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from kit.processes.server import until
from kit.worlds.tiny_jobs import submit_tiny
from shoal_server import ShoalServer, serving

_STEP_S = 0.2
_SECONDS = 30.0
_TICKS = os.sysconf("SC_CLK_TCK")


def measure(folder: Path, *, pages: int) -> dict[str, Any]:
    gate = folder / "gate"
    gate.mkdir()
    with serving(folder / "state", num_cpus=2) as server, server.client as client:
        run = submit_tiny(client, gate, dict, workers=2, min_workers=2, steps=1_000_000, step_s=_STEP_S)
        until(lambda: client.job(run.id).status.step >= 5, "the job trains", 300)
        alone = _cpu_share(server, 10.0)
        clients = _Pages(server, run.id, pages)
        found = asyncio.run(clients.follow(lambda: _cpu_s(server)))
        client.cancel(run.id)
        client.wait(run.id, timeout_s=120)
    found |= {"pages": pages, "cpu_share_without_pages": round(alone, 3)}
    print(
        f"{pages} pages of one job, a step each {_STEP_S} s: from a report to the last page p50 "
        f"{found['stream_p50_ms']} ms, p99 {found['stream_p99_ms']} ms of {found['stream_steps']} steps; control plane "
        f"{found['cpu_share']:.0%} of a core, {alone:.0%} without pages"
    )
    return found


class _Pages:
    def __init__(self, server: ShoalServer, job_id: str, count: int) -> None:
        self._port, self._token, self._job_id, self._count = server.port, server.token, job_id, count
        self._first: dict[int, list[float]] = {}
        """By step: when each client received it."""
        self._completed: dict[int, float] = {}
        self._last_step: list[int] = [0] * count
        self._is_connected = [asyncio.Event() for _ in range(count)]

    async def follow(self, cpu_s: Any) -> dict[str, Any]:
        tasks = [asyncio.create_task(self._page(number)) for number in range(self._count)]
        await asyncio.gather(*(event.wait() for event in self._is_connected))
        first, cpu, begun_mono = max(self._last_step) + 1, cpu_s(), time.monotonic()
        await asyncio.sleep(_SECONDS)
        cpu_share = (cpu_s() - cpu) / (time.monotonic() - begun_mono)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        complete = [step for step, times in self._first.items() if step >= first and len(times) == self._count]
        late = sorted(max(self._first[step]) - self._completed[step] for step in complete)
        assert len(late) > 50, f"only {len(late)} steps reached all pages"
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


def _cpu_share(server: ShoalServer, seconds: float) -> float:
    before = _cpu_s(server)
    time.sleep(seconds)
    return (_cpu_s(server) - before) / seconds


def _cpu_s(server: ShoalServer) -> float:
    """Of the server's own process; workers and Ray are others."""
    fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS
