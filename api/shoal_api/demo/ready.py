"""Waits until the demo's server is ready, and shows what the server waits for."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import httpx

from shoal_api.cli.errors import CliError
from shoal_api.cli.exit_codes import ExitCode
from shoal_api.cli.output import Output
from shoal_api.cli.readiness import waits_for
from shoal_api.demo.processes import ServerProcess

_LIMIT_S = 120.0
_POLL_S = 0.2


def await_ready(server: ServerProcess, url: str, output: Output) -> None:
    """Return when the server is ready. Raises CliError with the end of its log if it ends or takes too long."""
    began = time.monotonic()
    spinner: Any = output.stdout.status("") if output.live else nullcontext()
    with spinner as status:
        while True:
            missing = _waits_for(url)
            if missing is None:
                break
            if status is not None:
                status.update(f"waiting for {missing} ({time.monotonic() - began:.0f} s)")
            if server.exit_code() is not None:
                raise _failed(server, f"the server ended with exit code {server.exit_code()} before it was ready")
            if time.monotonic() - began > _LIMIT_S:
                raise _failed(server, f"the server was not ready after {_LIMIT_S:g} s: it waits for {missing}")
            server.wait(_POLL_S)
    text = f"ready after {time.monotonic() - began:.1f} s"
    output.say(text, "dim") if output.as_json else output.line(None, text, "dim")


def _waits_for(url: str) -> str | None:
    """What the server waits for; None if it is ready."""
    try:
        return waits_for(url)
    except httpx.TransportError:
        return "the server to start"


def _failed(server: ServerProcess, message: str) -> CliError:
    return CliError(
        message,
        details=server.log_tail(),
        hint="`shoal doctor` looks for the cause",
        exit_code=ExitCode.FAILED,
    )
