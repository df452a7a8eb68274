"""RunningGateway: a real gateway on a thread of its own, with a fake in place of Ray."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from doubles.fake_ray import FakeRay
from kit.processes.server import until as until
from shoal_service.core.nodes import Node
from shoal_service.gateway.gateway import Gateway, Link

NODE = Node(node_id="a", ip="127.0.0.1", alive=True, cpus=2.0, gpus=0.0, memory_gib=1.0, labels={"zone": "x"})
PATIENCE_S = 60.0


@dataclass
class RunningGateway:
    """A gateway on a thread of its own."""

    url: str
    token: str
    cluster: str = "east"
    labels: dict[str, str] = field(default_factory=dict)
    ray: FakeRay = field(default_factory=lambda: FakeRay(NODE))
    replaces: bool = False
    lines: list[str] = field(default_factory=list)
    """What it has said to people."""
    error: Exception | None = None
    gateway: Gateway | None = None
    _loop: asyncio.AbstractEventLoop | None = None
    _stop: asyncio.Event | None = None
    _thread: threading.Thread | None = None

    def start(self) -> RunningGateway:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="gateway")
        self._thread.start()
        until(lambda: self._stop, "the gateway runs")
        return self

    async def _run(self) -> None:
        link = Link(self.url, self.token, self.cluster)
        self._loop = asyncio.get_running_loop()
        how: dict[str, Any] = {"replaces": self.replaces, "labels": self.labels}
        self.gateway = Gateway(self.ray, link, address="head:6379", say=self.lines.append, **how)
        self._stop = asyncio.Event()
        try:
            await self.gateway.run(self._stop)
        except Exception as error:
            self.error = error
        await link.close()

    def call(self, function: Callable[[], Any]) -> Any:
        """On its loop."""
        assert self._loop is not None

        async def there() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(there(), self._loop).result(PATIENCE_S)

    def stop(self) -> None:
        assert self._loop is not None and self._stop is not None
        if self._thread is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self.wait()

    def wait(self) -> None:
        """Until it has ended."""
        assert self._thread is not None
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
