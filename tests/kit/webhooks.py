"""A real receiver of webhooks on a free port, and the delivery on a thread of its own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from shoal_service.clock import SystemClock
from shoal_service.control.webhooks import Secrets, WebhookConfig, WebhookDelivery
from shoal_service.core.webhooks import UNRESTRICTED, RetryPolicy, WebhookRules
from shoal_service.store import Lease, Store
from shoal_service.telemetry.tallies import WebhookTallies

SECRET_NAME = "env:SHOAL_WEBHOOK_SECRET_TEST"
SECRET = "a-secret-of-this-test"
HANG = 0
"""In place of a status: no answer until the receiver is closed."""
LONGEST_S = 60.0
"""For whatever a test waits for; other processes may use the cores."""


@dataclass(frozen=True)
class Message:
    """What the receiver got."""

    path: str
    headers: Mapping[str, str]
    raw: bytes

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]

    @property
    def body(self) -> Any:
        return json.loads(self.raw)


class Receiver:
    """Answers 204, or the statuses in `answers` first. A context manager."""

    def __init__(self, *answers: int, port: int = 0) -> None:
        self.messages: list[Message] = []
        self._answers = deque(answers)
        self._changed = threading.Condition()
        self._released = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), name="receiver")
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """The port refuses connections afterwards."""
        self._released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def ids(self) -> list[str]:
        with self._changed:
            return [message.id for message in self.messages]

    def types(self) -> list[str]:
        with self._changed:
            return [message.body["type"] for message in self.messages]

    def wait(self, number: int) -> list[Message]:
        """Until so many messages have arrived."""
        return self.wait_until(lambda messages: len(messages) >= number)

    def wait_until(self, is_done: Callable[[list[Message]], bool]) -> list[Message]:
        with self._changed:
            assert self._changed.wait_for(lambda: is_done(self.messages), LONGEST_S), self.messages
            return list(self.messages)

    def _arrived(self, message: Message) -> int:
        with self._changed:
            self.messages.append(message)
            self._changed.notify_all()
            return self._answers.popleft() if self._answers else 204

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["Content-Length"]))
                status = receiver._arrived(Message(self.path, dict(self.headers), raw))
                if status == HANG:
                    receiver._released.wait(LONGEST_S)
                    self.close_connection = True
                    return
                self.send_response(status)
                if 300 <= status < 400:
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing on the terminal."""

        return Handler


def config_of(
    *hooks: Any,
    answer_s: float = 30.0,
    directory: Path = Path("/nowhere"),
    rules: WebhookRules = UNRESTRICTED,
    **policy: float,
) -> WebhookConfig:
    """Fast retries, unless `policy` says otherwise."""
    return WebhookConfig(
        secrets=Secrets({SECRET_NAME.removeprefix("env:"): SECRET}, directory),
        rules=rules,
        hooks=tuple(hooks),
        retries=RetryPolicy(**{"first_s": 0.02, "longest_s": 0.1, **policy}),
        answer_s=answer_s,
    )


@contextmanager
def delivering(store: Store, config: WebhookConfig, lease: Callable[[], Lease | None]) -> Iterator[WebhookTallies]:
    """Runs the delivery until the end of the block."""
    tallies = WebhookTallies(hook.name for hook in config.hooks)
    started: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
    is_started = threading.Event()

    async def run() -> None:
        stop = asyncio.Event()
        started.append((asyncio.get_running_loop(), stop))
        delivery = WebhookDelivery(store, SystemClock(), config, lease=lease, tallies=tallies)
        is_started.set()
        await delivery.run(stop)

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="delivery")
    thread.start()
    assert is_started.wait(LONGEST_S)
    try:
        yield tallies
    finally:
        loop, stop = started[0]
        loop.call_soon_threadsafe(stop.set)
        thread.join(LONGEST_S)
        assert not thread.is_alive(), "the delivery does not stop"
