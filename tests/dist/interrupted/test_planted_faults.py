"""What a run of pytest prints about a process that is left, a hang, and a hang that cannot be interrupted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]
_PROGRAM = "tests/kit/guard/planted.py"


def _run(name: str, last_s: float) -> subprocess.CompletedProcess[str]:
    """`last_s`: how long processes may take to end, and a test after its limit."""
    command = [sys.executable, "-m", "pytest", f"{_PROGRAM}::{name}"]
    environment = {**os.environ, "SHOALTEST_LAST_S": f"{last_s:g}"}
    return subprocess.run(
        command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )


def test_a_process_that_is_left_fails_the_run_and_is_named_with_its_test() -> None:
    ran = _run("test_leaves_a_process", 1.0)
    assert ran.returncode == 1 and "1 passed" in ran.stdout, ran.stdout
    line = rf"process \d+, started during {_PROGRAM}::test_leaves_a_process \(call\): .*time.sleep\(600\)"
    assert re.search(line, ran.stdout), ran.stdout


def test_a_hang_is_ended_with_the_stacks_of_its_threads_and_of_its_processes() -> None:
    ran = _run("test_hangs_beside_another_process", 60.0)
    assert ran.returncode == 1 and "1 failed" in ran.stdout, ran.stdout
    assert "_wait_for_ever()" in ran.stdout and "in_the_child (<string>:1)" in ran.stdout, ran.stdout


@pytest.mark.slow
def test_a_hang_that_takes_no_signal_ends_the_process_with_its_stacks() -> None:
    ran = _run("test_hangs_in_native_code", 1.0)
    assert ran.returncode != 0 and "in test_hangs_in_native_code" in ran.stdout, ran.stdout
