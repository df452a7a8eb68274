"""A node's fork server: imports torch, Ray and the engine once, then forks a process for each request.

    raylet -> launch.py -- argv, env, streams --> server == fork ==> the worker, which registers with the raylet

Without it, a worker needs six seconds of CPU time from Ray's decision until it is warm, nearly all of it for imports. A
fork has the modules already, and shares their pages with the node's other workers. The server must not train, open a
device or start a thread, because it forks. It ends with the raylet, or ten minutes after its last forked process ended.

A client sends its request as one message, right after it has connected. If none arrives within `_REQUEST_S`, or
`MAX_WAITING` newer clients wait, the client is disconnected. A client that sends nothing, or something else than a
request, neither ends the server nor delays the others.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal_workers.exit_status import Recorder
from shoal_workers.forkserver.code_path import leave_out_code
from shoal_workers.forkserver.idle import end_when_idle
from shoal_workers.forkserver.launch import (
    FORK_SERVER,
    LARGEST_REQUEST,
    LISTENER_FD,
    PRELOAD,
    is_of_this_user,
    warm_marker,
)
from shoal_workers.forkserver.orphans import SWEEP_S, adopt_orphans, end_orphans
from shoal_workers.ray_internals import WORKER_SCRIPT, raylet_socket

_IDLE_S = 600.0
_REQUEST_S = 10.0
MAX_WAITING = 64
_NUM_STREAMS = 3
_LAST_WAIT_S = 10.0
"""Workers end with their raylet; the server waits this long for them, to end what they leave behind."""
_MODULES = (
    "ray",
    WORKER_SCRIPT,
    "torch._dynamo",
    "shoal_workers.actor",
    "shoal_workers.engine.engine",
    "shoal_workers.script.runner",
    "shoal_workers.snapshot_store.store",
    "shoal_workers.tasks.lm",
)


def main(address: str, raylet_pid: int) -> None:
    adopt_orphans()
    gc.disable()  # imports create many objects and no garbage
    for name in _MODULES:
        importlib.import_module(name)
    _preload(os.environ.get(PRELOAD, ""))
    gc.collect()
    gc.freeze()  # otherwise the collector would write to, and so copy, every page
    gc.enable()
    Path(warm_marker(address)).touch()
    with socket.socket(fileno=LISTENER_FD) as listener:
        children: dict[int, int] = {}  # pidfd, which is readable when the process has ended -> pid
        recorder = Recorder(address.rpartition(".shoal-")[0])
        request = _serve(listener, raylet_pid, children, recorder)
        if request is None:
            Path(warm_marker(address)).unlink(missing_ok=True)
            Path(address).unlink(missing_ok=True)  # before it is closed, so that no client finds a dead socket
    if request is not None:
        _become(request, address)
    else:
        _wait_for_last(children, recorder)


def _preload(value: str) -> None:
    """The module that the environment names; a node without it imports it where it is needed, if at all."""
    if value:
        module, _, folder = value.split(" ", 2)
        sys.path.insert(0, folder)  # before other versions of the same package
        with suppress(ImportError):
            importlib.import_module(module)
        sys.path.remove(folder)


def _serve(listener: socket.socket, raylet_pid: int, children: dict[int, int], recorder: Recorder) -> Request | None:
    """Return in every forked process, with its request; in the server itself it returns None at its end."""
    try:
        raylet = os.pidfd_open(raylet_pid)
    except ProcessLookupError:
        return None
    poll = select.poll()
    poll.register(raylet, select.POLLIN)
    poll.register(listener, select.POLLIN)
    clients = Clients()
    has_orphans = False
    while True:
        has_orphans = has_orphans and end_orphans(children.values())
        wait_s = SWEEP_S if has_orphans else clients.patience_s(time.monotonic())
        ready = dict(poll.poll(wait_s * 1000 if wait_s is not None else None if children else _IDLE_S * 1000))
        if raylet in ready or not (ready or children or clients.waiting or has_orphans):
            return None
        for ended in children.keys() & ready.keys():
            poll.unregister(ended)
            recorder.reap(ended, children.pop(ended))
            os.close(ended)
            has_orphans = True  # perhaps
        for number in clients.waiting.keys() & ready.keys():
            poll.unregister(number)
            with clients.take(number) as connection:
                request = receive(connection)
                if request is None:
                    continue
                pid = _fork(connection, request)
                if pid == 0:
                    for descriptor in (raylet, *children):
                        os.close(descriptor)
                    clients.close()
                    return request
                for stream in request.streams:
                    os.close(stream)
            with suppress(ProcessLookupError):
                if pid is not None:
                    child = os.pidfd_open(pid)
                    poll.register(child, select.POLLIN)
                    children[child] = pid
        if listener.fileno() in ready:
            connection, _ = listener.accept()
            poll.register(connection, select.POLLIN)
            clients.add(connection, time.monotonic())
        for number in clients.overdue(time.monotonic()):
            poll.unregister(number)
            clients.take(number).close()


def _wait_for_last(children: dict[int, int], recorder: Recorder) -> None:
    """Wait until no worker and nothing that one has left is there any more, at most for `_LAST_WAIT_S`."""
    deadline_mono = time.monotonic() + _LAST_WAIT_S
    poll = select.poll()
    for child in children:
        poll.register(child, select.POLLIN)
    while (end_orphans(children.values()) or children) and time.monotonic() < deadline_mono:
        for ended, _ in poll.poll(SWEEP_S * 1000):
            poll.unregister(ended)
            recorder.reap(ended, children.pop(ended))


def _fork(connection: socket.socket, request: Request) -> int | None:
    """0 in the new process, whose pid the client gets; None if there is no new process, and the client learns it from
    the end of the connection."""
    if _has_hung_up(connection):  # Ray waits for a process for a minute, and the imports may take longer
        return None
    try:
        pid = os.fork()
    except OSError:  # the limit of processes
        return None
    if pid:
        with suppress(OSError):  # Ray has killed the client since
            connection.send(str(pid).encode())
    return pid


def _has_hung_up(connection: socket.socket) -> bool:
    """Return whether the client has gone; without it a process would register with a raylet that does not expect
    it."""
    poll = select.poll()
    poll.register(connection, 0)
    return bool(poll.poll(0))


def _become(request: Request, address: str) -> None:
    """Run in the forked process: set up what a new interpreter with these arguments would have, and run the
    script. A process that is no worker of Ray's, as the guardian of a script, gets no thread."""
    os.setpgid(0, 0)
    adopt_orphans()
    for number, stream in enumerate(request.streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.env)
    os.environ[FORK_SERVER] = address
    script = request.argv[0]
    sys.argv = request.argv
    sys.path[0:1] = [str(Path(script).parent), *_python_path(request.env)]
    leave_out_code()
    _seed()
    if raylet_socket(request.argv):
        end_when_idle()
    runpy.run_path(script, run_name="__main__")


def _python_path(env: dict[str, str]) -> Sequence[str]:
    return [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _seed() -> None:
    """Python's generator seeds itself after a fork; numpy's would have the same state in all forks."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


@dataclass(frozen=True, slots=True)
class Request:
    """What a new process runs. `streams`: file descriptors of its standard input, output and error."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    streams: tuple[int, ...]


@dataclass(slots=True)
class Clients:
    """Connections that have not sent their request yet."""

    waiting: dict[int, tuple[socket.socket, float]] = field(default_factory=dict)
    """Each connection by its file descriptor, oldest first, and since when it waits, in seconds of the monotonic
    clock."""

    def add(self, connection: socket.socket, now: float) -> None:
        connection.setblocking(False)
        self.waiting[connection.fileno()] = connection, now

    def take(self, number: int) -> socket.socket:
        """The caller closes it."""
        return self.waiting.pop(number)[0]

    def overdue(self, now: float) -> list[int]:
        """Return the connections to close."""
        num_surplus = len(self.waiting) - MAX_WAITING
        waiting = enumerate(self.waiting.items())
        return [number for i, (number, (_, since)) in waiting if i < num_surplus or now - since >= _REQUEST_S]

    def patience_s(self, now: float) -> float | None:
        """Seconds until one of them is overdue; None if none waits."""
        oldest = next(iter(self.waiting.values()), None)
        return None if oldest is None else max(0.0, oldest[1] + _REQUEST_S - now)

    def close(self) -> None:
        for connection, _ in self.waiting.values():
            connection.close()
        self.waiting.clear()


def receive(connection: socket.socket) -> Request | None:
    """Return None if the client has gone, is of another user, or has sent something else than a request."""
    if not is_of_this_user(connection):
        return None
    try:
        message, streams, _, _ = socket.recv_fds(connection, LARGEST_REQUEST, _NUM_STREAMS)
    except OSError:
        return None
    try:
        return parse(message, tuple(streams))
    except (ValueError, RecursionError):
        for stream in streams:
            os.close(stream)
        return None


def parse(message: bytes, streams: tuple[int, ...]) -> Request:
    """ValueError or RecursionError: not a request."""
    decoded = json.loads(message)
    if not isinstance(decoded, dict):
        raise ValueError("a request is an object")
    argv, env, cwd = (decoded.get(key) for key in ("argv", "env", "cwd"))
    if not (isinstance(argv, list) and argv and _are_text(argv)):
        raise ValueError("argv is a list of texts, and has at least one")
    if not (isinstance(env, dict) and _are_text([*env.values()])):
        raise ValueError("env is an object of texts")
    if not isinstance(cwd, str) or len(streams) != _NUM_STREAMS:
        raise ValueError("a request has a directory and three streams")
    return Request(argv, env, cwd, streams)


def _are_text(values: list[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
