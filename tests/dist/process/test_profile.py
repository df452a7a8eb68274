"""`python -m shoal_workers.profile` measures this machine with real processes."""

from __future__ import annotations

import json
import subprocess

import pytest

from kit.processes.warm import warm_python
from shoal_service.control.planning import profile_of


@pytest.mark.matrix
def test_two_processes_are_measured_and_make_a_profile() -> None:
    command = [warm_python(), "-m", "shoal_workers.profile", "--processes", "2", "--seconds", "0.05"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    measured = json.loads(done.stdout)
    assert list(measured["groups"]) == ["2"]
    profile = profile_of(measured)
    assert 1e6 < profile.inside.bandwidth < 1e13
    assert 0 < profile.inside.latency(2) < 1
    assert all(1e8 < rate < 1e16 for rate in measured["matmul_flops"].values())
