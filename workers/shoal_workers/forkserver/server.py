"""A node's fork server: imports torch, Ray and the engine once, then forks a ready process for everybody that asks.

    raylet -> launch.py -- argv, env, streams --> server == fork ==> the worker, which registers with the raylet

A shard needs six seconds of processor time from Ray's decision to a warm engine, nearly all of it imports; a fork has
them for nothing, and its pages of code are shared with all others of the node. The server never trains, opens no
device and starts no thread, as whoever forks must not. It ends with the raylet, or some minutes after the last process
that it forked.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal_workers.forkserver.idle import end_when_idle
from shoal_workers.forkserver.launch import LARGEST_REQUEST, LISTENER_FD

_IDLE_S = 600.0
_MODULES = (
    "ray",
    "ray._private.workers.default_worker",
    "torch._dynamo",
    "shoal_workers.actor",
    "shoal_workers.engine.engine",
    "shoal_workers.snapshot_store.store",
    "shoal_workers.tasks.lm",
)
"""`__main__` of a worker is Ray's script, whose own imports are had by importing it under its name."""


@dataclass(frozen=True, slots=True)
class Request:
    argv: list[str]
    env: dict[str, str]
    cwd: str
    streams: tuple[int, ...]


def main(address: str, raylet_pid: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for what is forked
    gc.disable()  # imports make many objects and no garbage
    for name in _MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the collector would copy every page that it looks at
    gc.enable()
    with socket.socket(fileno=LISTENER_FD) as listener:
        request = _serve(listener, raylet_pid)
        if request is None:
            Path(address).unlink(missing_ok=True)  # before it is closed: nobody finds a socket that no one listens to
    if request is not None:
        _become(request)


def _serve(listener: socket.socket, raylet_pid: int) -> Request | None:
    """Returns in every forked process, with what it is to be; in the server itself, None at its end."""
    try:
        raylet = os.pidfd_open(raylet_pid)
    except ProcessLookupError:
        return None
    poll = select.poll()
    poll.register(raylet, select.POLLIN)
    poll.register(listener, select.POLLIN)
    children: set[int] = set()  # as descriptors that can be read from when they end
    while ready := dict(poll.poll(None if children else _IDLE_S * 1000)):
        if raylet in ready:
            return None
        for ended in children & ready.keys():
            poll.unregister(ended)
            os.close(ended)
            children.remove(ended)
        if listener.fileno() not in ready:
            continue
        connection, _ = listener.accept()
        with connection:
            request = _receive(connection)
            if request is None:
                continue
            pid = os.fork()
            if pid == 0:
                for descriptor in (raylet, *children):
                    os.close(descriptor)
                return request
            connection.send(str(pid).encode())
            for stream in request.streams:
                os.close(stream)
        with suppress(ProcessLookupError):
            child = os.pidfd_open(pid)
            poll.register(child, select.POLLIN)
            children.add(child)
    return None


def _receive(connection: socket.socket) -> Request | None:
    """None: whoever asked is gone."""
    try:
        message, streams, _, _ = socket.recv_fds(connection, LARGEST_REQUEST, 3)
        desired: dict[str, Any] = json.loads(message)
    except (OSError, ValueError):
        return None
    return Request(desired["argv"], desired["env"], desired["cwd"], tuple(streams))


def _become(request: Request) -> None:
    """In the forked process: what a new interpreter would be that was given these arguments."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, stream in enumerate(request.streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.env)
    script = request.argv[0]
    sys.argv = request.argv
    sys.path[0:1] = [str(Path(script).parent), *_python_path(request.env)]
    _seed()
    end_when_idle()
    runpy.run_path(script, run_name="__main__")


def _python_path(env: dict[str, str]) -> Sequence[str]:
    return [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _seed() -> None:
    """Python's own generator seeds itself after a fork; numpy's would be the same in all of them."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
