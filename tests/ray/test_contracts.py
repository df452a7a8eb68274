"""Test modules that run as drivers in the cluster: the contracts of fleet and journal, and lives of supervisors."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from kit.processes.server import Server

TESTS = Path(__file__).parents[1]


def test_the_implementations_over_ray_pass_the_contracts_of_their_protocols(shoal_server: Server) -> None:
    _pass_in_the_cluster(shoal_server, "ray_contracts.py", timeout_s=240)


def _pass_in_the_cluster(server: Server, program: str, *, timeout_s: float) -> None:
    """The tests of one program pass in a process that uses the wheel's code, as a driver of the server's cluster."""
    assert server.note is not None
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}  # the wheel's code is tested
    ran = subprocess.run(
        [server.python, "-m", "pytest", TESTS / "kit" / "programs" / program, "-q", "-x"],
        env={**inherited, **server.ray_environment, "SHOAL_TEST_RAY_ADDRESS": server.note["address"]},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " passed" in ran.stdout or "[100%]" in ran.stdout
    server.wait_until_free()
