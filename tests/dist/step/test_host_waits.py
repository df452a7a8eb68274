"""The host runs ahead of the GPU: no micro-batch makes it wait, and each step does so once, where it reads the vote."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from kit.device import DEVICE, ON_GPU
from kit.processes.warm import warm_python

_PROGRAM = Path(__file__).parents[2] / "kit" / "programs" / "host_waits.py"
_VOTE = "engine/step/vote.py"


@pytest.mark.parametrize("case", ["plain", "batchnorm", "adapters", "plain-whole", "loop"])
def test_a_step_waits_for_the_device_with_its_vote_alone(case: str, tmp_path: Path) -> None:
    """A table that never changes, statistics of BatchNorm, frozen parameters, whole parameters, and a user's loop."""
    folders = [str(_PROGRAM.parents[1]), str(_PROGRAM.parents[1] / "tasks")]
    answer = tmp_path / "answer.json"
    paths = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [warm_python(), _PROGRAM, answer, DEVICE, case],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    steps = json.loads(answer.read_text(encoding="utf-8"))[case]
    assert len(steps) >= 3
    others = [wait for step in steps for wait in step if not wait[1].startswith(_VOTE)]
    assert others == []
    # On a CPU the vote reads loss, norm and doubt one by one, and then the sums.
    assert all(1 <= len(step) <= (1 if ON_GPU else 4) for step in steps)
