"""A node with another release of Shoal than the control plane's is named."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import shoal_workers
from shoal_workers.version import VERSION

_NODE = "127.0.0.9"
_ASK = """
import asyncio, sys, ray
from shoal_service.gateway.on_nodes import other_releases
ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
print(asyncio.run(other_releases()))
"""


def asked(arena: Any) -> str:
    """What a control plane would add to the error of a supervisor that could not be created."""
    ran = subprocess.run(
        [arena.server.python, "-c", _ASK, arena.nodes.address],
        env={**os.environ, **arena.server.ray_environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout.strip()


@pytest.mark.matrix
def test_the_node_and_both_releases_are_named(arena: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arena.mend()
    assert asked(arena) == ""
    shutil.copytree(Path(shoal_workers.__path__[0]), tmp_path / "shoal_workers")
    version = tmp_path / "shoal_workers" / "version.py"
    version.write_text(version.read_text().replace(VERSION, "0.0.1"))
    with monkeypatch.context() as context:
        context.setenv("PYTHONPATH", str(tmp_path))
        arena.nodes.add(_NODE, num_cpus=1)
    try:
        words = asked(arena)
    finally:
        arena.nodes.remove(_NODE)
    assert words.startswith(f"The control plane is Shoal {VERSION}, and {_NODE} has 0.0.1: install the same release")
