"""The real fleet and the real journal pass the contract tests that their fakes pass."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from kit.processes.server import Server

TESTS = Path(__file__).parents[1]


def test_the_implementations_over_ray_pass_the_contracts_of_their_protocols(shoal_server: Server) -> None:
    assert shoal_server.note is not None
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}  # the wheel's code is tested
    ran = subprocess.run(
        [shoal_server.python, "-m", "pytest", TESTS / "kit" / "programs" / "ray_contracts.py", "-q", "-x"],
        env={**inherited, **shoal_server.ray_environment, "SHOAL_TEST_RAY_ADDRESS": shoal_server.note["address"]},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " passed" in ran.stdout or "[100%]" in ran.stdout
    shoal_server.wait_until_free()
