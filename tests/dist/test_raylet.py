"""A process that stands for an actor's ends with the one that stands for its raylet, also if nobody reaps that one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_ACTOR = """
import sys
from shoal_workers.raylet import end_with_raylet
end_with_raylet()
print("ready", flush=True)
sys.stdin.read()
"""
_PATIENCE_S = 30


@contextmanager
def _started(code: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, **environment},
    )  # fmt: skip
    with process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def test_it_ends_as_soon_as_its_raylet_does() -> None:
    with _started("import sys; print(flush=True); sys.stdin.read()") as raylet:
        with _started(_ACTOR, RAY_RAYLET_PID=str(raylet.pid)) as actor:
            raylet.kill()

            assert actor.wait(_PATIENCE_S) == 1
            assert raylet.returncode is None, "it was not reaped"


def test_without_a_raylet_it_lives_until_it_is_told() -> None:
    for unknown in ("", "raylet"):
        with _started(_ACTOR, RAY_RAYLET_PID=unknown) as actor:
            assert actor.stdin is not None
            actor.stdin.close()

            assert actor.wait(_PATIENCE_S) == 0
