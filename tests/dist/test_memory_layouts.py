"""A snapshot of any layout loads into any other, bit for bit, locally and over TCP; uneven, empty."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_PROGRAM = Path(__file__).with_name("memory_layouts.py")
_LAYOUTS = ("plain", "fsdp1", "fsdp2", "fsdp3", "fsdp4", "hsdp2x2", "fsdp2xtp2")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("memory")


@pytest.fixture(scope="module")
def told(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 0 of the four processes saw."""
    meeting_point = tmp_path_factory.mktemp("store") / "store"
    program = subprocess.Popen(
        [sys.executable, str(_PROGRAM), str(meeting_point), str(root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        output, errors = program.communicate(timeout=150)
    finally:
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)
            program.wait()
    assert program.returncode == 0, errors
    return dict(json.loads(output.splitlines()[-1]))


@pytest.mark.parametrize(("saved", "loaded"), list(itertools.product(_LAYOUTS, _LAYOUTS)))
def test_state_is_bit_equal_after_resharding(told: dict[str, Any], saved: str, loaded: str) -> None:
    assert told["differing"][f"{saved}->{loaded}"] == []


def test_parts_came_from_local_memory_and_over_the_network(told: dict[str, Any]) -> None:
    assert told["local"] > 0
    assert told["remote"] > 0


def test_nothing_is_left_when_all_have_closed(told: dict[str, Any], root: Path) -> None:
    assert list(root.iterdir()) == []
