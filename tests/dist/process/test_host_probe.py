"""The host probe with real sockets: only a host whose kernel answers nothing is silent.

A kernel drops connects to a port whose queue of unaccepted connections is full: this is a silent host without another
machine, and it answers again when the connections are accepted.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from shoal_service.supervisor.workers.probes import HostProbe

_PATIENCE_S = 60.0
Answers = queue.Queue[dict[str, str]]


@pytest.fixture
def probe() -> Iterator[tuple[HostProbe, Answers]]:
    reports: Answers = queue.Queue()
    probe = HostProbe("me")
    yield probe, reports
    probe.stop()


def _listener(backlog: int) -> socket.socket:
    listener = socket.create_server(("127.0.0.1", 0), backlog=backlog)
    listener.settimeout(_PATIENCE_S)
    return listener


def _report(reports: Answers, condition: Callable[[dict[str, str]], Any]) -> dict[str, str]:
    while not condition(report := reports.get(timeout=_PATIENCE_S)):
        pass
    return report


def test_a_host_that_swallows_connects_is_silent_until_it_answers_again(
    probe: tuple[HostProbe, Answers],
) -> None:
    watching, reports = probe
    with _listener(1) as full, _listener(100) as other:
        addresses = {"a": full.getsockname(), "b": other.getsockname()}
        watching.watch(addresses, head="me")
        watching.start(reports.put)
        for _ in range(3):
            full.accept()[0].close()
        silent = _report(reports, lambda report: report)
        assert list(silent) == ["a"] and "no answer to" in silent["a"]
        full.setblocking(False)
        while True:
            try:
                full.accept()[0].close()
            except BlockingIOError:
                break
        assert _report(reports, lambda report: not report) == {}


def test_a_stopped_process_and_a_closed_port_are_not_silent(probe: tuple[HostProbe, Answers]) -> None:
    watching, reports = probe
    code = "import socket, sys; s = socket.create_server(('127.0.0.1', 0), backlog=100); "
    code += "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    with (
        _listener(1) as full,
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process,
    ):
        assert process.stdout is not None
        stopped = ("127.0.0.1", int(process.stdout.readline()))
        process.send_signal(signal.SIGSTOP)
        with _listener(1) as closing:
            closed = closing.getsockname()
        watching.watch({"stopped": stopped, "closed": closed, "full": full.getsockname()}, head="me")
        watching.start(reports.put)
        assert list(_report(reports, lambda report: report)) == ["full"], "found after the same time, and alone"
        process.kill()


def test_a_node_that_was_silent_before_is_silent_until_it_answers(probe: tuple[HostProbe, Answers]) -> None:
    watching, reports = probe
    with _listener(1) as full, _listener(100) as other:
        for _ in range(2):
            socket.create_connection(full.getsockname()).close()
        watching.watch({"a": full.getsockname(), "b": other.getsockname()}, head="b")
        watching.start(reports.put, frozenset({"a", "b"}))
        assert list(_report(reports, lambda report: len(report) == 1)) == ["a"], "b answers"


def test_a_node_that_is_watched_no_longer_is_not_reported(probe: tuple[HostProbe, Answers]) -> None:
    watching, reports = probe
    with _listener(1) as full, _listener(100) as other:
        addresses = {"a": full.getsockname(), "b": other.getsockname()}
        watching.watch(addresses, head="b")
        watching.start(reports.put)
        _report(reports, lambda report: "a" in report)
        watching.watch({"b": addresses["b"]}, head="b")
        assert _report(reports, lambda report: not report) == {}


class _Killed:
    """A stopped process would be waited for without end."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def close(self) -> None:
        self._process.kill()


_LISTEN = (
    "import socket, sys; s = socket.create_server(('{ip}', 7001), backlog=100); print('up', flush=True); "
    "sys.stdin.read()"
)


@pytest.fixture
def host() -> Iterator[tuple[str, str]]:
    """A network namespace with an address and one end of a link; the other end is here. Its name and its address."""
    name, ip = f"shoalp{os.getpid()}", "10.201.79.2"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no network namespace can be made here: {made.stderr.strip()}")
    try:
        _ip("link", "add", f"{name[:13]}v", "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("addr", "add", "10.201.79.1/24", "dev", f"{name[:13]}v")
        _ip("link", "set", f"{name[:13]}v", "up")
        _ip("-n", name, "addr", "add", f"{ip}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", name, "link", "set", device, "up")
        yield name, ip
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def test_a_host_whose_link_is_cut_is_silent_until_the_link_is_back_and_a_stopped_process_is_not(
    probe: tuple[HostProbe, Answers], host: tuple[str, str]
) -> None:
    watching, reports = probe
    name, ip = host
    command = ["ip", "netns", "exec", name, sys.executable, "-c", _LISTEN.format(ip=ip)]
    with (
        _listener(100) as other,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
        closing(_Killed(process)),
    ):
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGSTOP)  # its kernel goes on to answer
        watching.watch({"host": (ip, 7001), "other": other.getsockname()}, head="me")
        watching.start(reports.put)
        for _ in range(3):
            other.accept()[0].close()
        assert reports.empty(), "a process without CPU is not a silent host"
        cut_at = time.monotonic()
        _ip("-n", name, "link", "set", "eth0", "down")
        assert list(_report(reports, lambda report: report)) == ["host"]
        silent_at = time.monotonic()
        _ip("-n", name, "link", "set", "eth0", "up")
        assert _report(reports, lambda report: not report) == {}
        print(f"silent after {silent_at - cut_at:.2f} s, back after {time.monotonic() - silent_at:.2f} s")
