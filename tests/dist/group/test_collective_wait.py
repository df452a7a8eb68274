"""A rank can leave every collective in which the training thread waits, whichever way gloo carries it out."""

from __future__ import annotations

import subprocess
from pathlib import Path

from kit.processes.warm import warm_python

_PROGRAM = Path(__file__).parents[2] / "kit" / "processes" / "leave_collectives.py"


def test_a_rank_leaves_any_collective_that_cannot_complete() -> None:
    result = subprocess.run([warm_python(), _PROGRAM], stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    ends = dict(line.split(" ", 1) for line in result.stdout.splitlines())
    assert len(ends) == 8
    assert set(ends.values()) == {"left"}, ends
