"""The uvicorn server, with a clean stop: it ends open streams before uvicorn waits for its connections.

uvicorn shuts the application down only after the last connection has closed, so an open event stream would delay that
indefinitely. `shoal serve` and tests use `make_server`; `uvicorn --factory` needs `--timeout-graceful-shutdown`.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from starlette.datastructures import State

from shoal_api.http.changes import Changes
from shoal_api.http.serving.listener import ConnectionLimits, GuardedListener
from shoal_api.http.serving.protocol import Patience, PatientProtocol
from shoal_service.telemetry.request_metrics import RequestMetrics

_GRACE_S = 5
_BACKLOG = 2048


@dataclass(frozen=True, slots=True)
class Wire:
    """How the server speaks to its clients."""

    tls_cert: Path | None = None
    tls_key: Path | None = None
    trusted_proxies: str = ""
    """Proxies whose X-Forwarded-For and X-Forwarded-Proto are believed; empty: none."""
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    patience: Patience = field(default_factory=Patience)

    @property
    def scheme(self) -> str:
        return "http" if self.tls_cert is None else "https"


def make_server(
    app: FastAPI,
    *,
    host: str,
    port: int,
    log_requests: bool = False,
    grace_s: int = _GRACE_S,
    wire: Wire = Wire(),
) -> uvicorn.Server:
    """A server for an application made by `create_app`; `run()` it on the main thread, or await `serve()`.

    `log_requests`: one log event per request. `grace_s`: seconds that running requests have at the stop.
    """
    config = uvicorn.Config(
        app,
        http=partial(PatientProtocol, wire.patience),  # type: ignore[arg-type]  # called as a class is
        host=host,
        port=port,
        log_config=None,  # the composition root sets up the logs
        log_level="info" if log_requests else "warning",
        access_log=log_requests,
        backlog=_BACKLOG,
        server_header=False,
        timeout_graceful_shutdown=grace_s,
        lifespan="on",
        ws="none",
        ssl_certfile=wire.tls_cert,
        ssl_keyfile=wire.tls_key,
        proxy_headers=bool(wire.trusted_proxies),
        forwarded_allow_ips=wire.trusted_proxies,
    )
    return _Server(config, app.state, wire)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, state: State, wire: Wire) -> None:
        super().__init__(config)
        self._changes: Changes = state.changes
        self._requests: RequestMetrics = state.requests
        self._wire = wire

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Takes the sockets over."""
        wire = self._wire
        guarded: list[socket.socket] = [
            GuardedListener(one, wire.connections, self._requests.refused, is_plain=wire.tls_cert is None)
            for one in sockets or ()
        ]
        try:
            await super().serve(guarded or None)
        finally:
            for one in guarded:
                one.close()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._changes.close()
        await super().shutdown(sockets)
