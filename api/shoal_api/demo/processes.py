"""Starts the processes of the demo, waits until they are ready, and ends all of them, however the demo ends: the
server, and a Prometheus that scrapes it (`shoal demo --keep --prometheus`).

On Linux the demo becomes the subreaper of its descendants (PR_SET_CHILD_SUBREAPER), so a process whose parent has ended
is still found among them, and the server receives SIGTERM if the demo is killed. On other systems only the server's
process group is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from shoal_api.cli.errors import CliError, ExitCode
from shoal_api.cli.output import Output
from shoal_api.cli.readiness import waits_for
from shoal_service.cluster.connects import find_free_port

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05
_SERVER_READY_S = 120.0
_SERVER_POLL_S = 0.2
_PROMETHEUS_READY_S = 30.0
_PROMETHEUS_POLL_S = 0.1
_SCRAPE_S = 2


class ServerProcess:
    """A process of `shoal serve`. Call `stop` in a `finally` block."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path, *, outlive: bool) -> None:
        """`outlive`: the server keeps running after the demo has ended (`--keep`)."""
        _prctl(_PR_SET_CHILD_SUBREAPER, 0 if outlive else 1)
        # processes that this one has started before are not the server's, and must not be killed with it
        self._not_ours = set(descendants(os.getpid()))
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=None if outlive else _die_with_parent,
            )
        self.pid = self._process.pid
        self.log = log

    def exit_code(self) -> int | None:
        """Return the exit code; None while the process runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> None:
        """Return when the server ends, after `seconds` at the latest."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def log_tail(self, num_lines: int = 15) -> tuple[str, ...]:
        return tuple(self.log.read_text(errors="replace").splitlines()[-num_lines:])

    def owns(self, pid: int) -> bool:
        """Return True if `pid` is a descendant of the server. The demo sends signals to no other process."""
        return pid in descendants(self.pid) or pid in self._below_this_process()

    def stop(self, grace_s: float = 20.0) -> None:
        """Send SIGTERM, wait, then kill the remaining processes. Idempotent; a second Ctrl-C ends the wait."""
        below = descendants(self.pid)  # before the server ends: then its children have another parent
        _end(self._process, grace_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        # a pid may belong to another process by now, which the start time tells
        _sweep({pid: started for pid, started in below.items() if start_time(pid) == started})
        _sweep(self._below_this_process())

    def _below_this_process(self) -> dict[int, str]:
        """Return the descendants of this process that are newer than the server; they include orphans of the server."""
        return {pid: started for pid, started in descendants(os.getpid()).items() if pid not in self._not_ours}


def _end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Send SIGTERM and wait; kill the process after `grace_s`, or at Ctrl-C."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        process.wait(grace_s)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait()


def descendants(root: int) -> dict[int, str]:
    """Return pid and start time of every descendant of `root`; empty on systems without /proc."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        fields = _stat(int(entry.name))
        if fields is not None and fields[0] != "Z":
            parents[int(entry.name)] = int(fields[1])
    below: dict[int, str] = {}
    frontier = {root}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier and pid not in below}
        below.update({pid: start_time(pid) or "" for pid in frontier})
    return below


def start_time(pid: int) -> str | None:
    """Return the start time of a process; it distinguishes the process from a later one with the same pid."""
    fields = _stat(pid)
    return fields[19] if fields is not None else None


def _sweep(victims: Mapping[int, str]) -> None:
    for pid in victims:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 5.0
    for pid, started in victims.items():
        while start_time(pid) == started and time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] == pid:
                    break
            time.sleep(_POLL_S)


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat, beginning with the state. The name before it may contain spaces and
    brackets."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


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
            if time.monotonic() - began > _SERVER_READY_S:
                raise _failed(server, f"the server was not ready after {_SERVER_READY_S:g} s: it waits for {missing}")
            server.wait(_SERVER_POLL_S)
    text = f"ready after {time.monotonic() - began:.1f} s"
    output.say(text, "dim") if output.as_json else output.line(None, text, "dim")


def _waits_for(url: str) -> str | None:
    """Return what the server waits for; None if it is ready."""
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


class PrometheusProcess:
    """A running Prometheus on loopback; its files are below the demo's folder."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self._process = process
        self.url = url
        self.pid = process.pid

    def stop(self) -> None:
        """End the process. Idempotent."""
        _end(self._process, 10.0)

    def __enter__(self) -> PrometheusProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start_prometheus(target: str, folder: Path, token_file: Path) -> PrometheusProcess | None:
    """Start a Prometheus that scrapes the service at the URL `target` every two seconds, and return it once it answers;
    None if it is not installed. `token_file` need not exist yet.

    Raises:
        OSError: it ended at once, or does not answer; the message has the end of its log.
    """
    program = shutil.which("prometheus")
    if program is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "global": {"scrape_interval": f"{_SCRAPE_S}s", "scrape_timeout": f"{_SCRAPE_S}s"},
        "scrape_configs": [
            {
                "job_name": "shoal",
                "authorization": {"credentials_file": str(token_file)},
                "static_configs": [{"targets": [urlsplit(target).netloc]}],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    port = find_free_port()
    log = folder / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--enable-feature=exemplar-storage",
                "--log.level=warn",
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    started = PrometheusProcess(process, f"http://127.0.0.1:{port}")
    try:
        _await_prometheus(process, started.url, log)
    except BaseException:
        started.stop()
        raise
    return started


def _await_prometheus(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline_mono = time.monotonic() + _PROMETHEUS_READY_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/-/ready").status_code == 200:
                return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_PROMETHEUS_POLL_S)
        if process.poll() is not None or time.monotonic() > deadline_mono:
            tail = " ".join(log.read_text(errors="replace").splitlines()[-3:])
            raise OSError(f"Prometheus is not ready after {_PROMETHEUS_READY_S:g} s, or has ended: {tail}")
