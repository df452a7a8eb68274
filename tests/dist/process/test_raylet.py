"""A worker process ends with its raylet, also if the dead raylet is not reaped. Plain processes play both roles."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_ACTOR = """
import sys
from shoal_workers.actor_process import exit_with_raylet
exit_with_raylet()
print("ready", flush=True)
sys.stdin.read()
"""
_STOPPED_IN_THE_END = """
import os, signal, socket, sys
from shoal_workers import actor_process
actor_process.os._exit = lambda status: os.kill(os.getpid(), signal.SIGSTOP)  # what the kernel needs for much memory
listener = socket.create_server(("127.0.0.1", 0))
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
actor_process.exit_with_raylet()
print(listener.getsockname()[1], flush=True)
sys.stdin.read()
"""
_PATIENCE_S = 60


@contextmanager
def _started(code: str, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    with process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def test_an_actor_ends_as_soon_as_its_raylet_does() -> None:
    with _started("import sys; print(flush=True); sys.stdin.read()") as raylet:
        with _started(_ACTOR, RAY_RAYLET_PID=str(raylet.pid)) as actor:
            raylet.kill()

            assert actor.wait(_PATIENCE_S) == 1
            assert raylet.returncode is None, "it was not reaped"


def test_without_a_raylet_a_worker_runs_until_it_is_stopped() -> None:
    for unknown in ("", "raylet"):
        with _started(_ACTOR, RAY_RAYLET_PID=unknown) as actor:
            assert actor.stdin is not None
            actor.stdin.close()

            assert actor.wait(_PATIENCE_S) == 0


def test_connected_peers_see_the_end_before_the_process_exits() -> None:
    with (
        _started("import sys; print(flush=True); sys.stdin.read()") as raylet,
        socket.create_server(("127.0.0.1", 0)) as peer,
    ):
        port = str(peer.getsockname()[1])
        with _started(_STOPPED_IN_THE_END, port, RAY_RAYLET_PID=str(raylet.pid)) as actor:
            connection, _ = peer.accept()
            with connection:
                connection.settimeout(_PATIENCE_S)
                raylet.kill()

                assert connection.recv(1) == b""
                assert actor.poll() is None
