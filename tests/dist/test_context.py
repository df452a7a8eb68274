"""Context parallelism is exact: outputs, losses and gradients are those of one process, at cp 2 and 4, both methods."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist

_PROGRAM = Path(__file__).with_name("context_attention.py")
_METHODS = ("all_gather", "ulysses")
_DEGREES = ("cp2", "cp4")
_HEADS = ("4/4", "4/2", "4/1", "12/3")


@pytest.fixture(scope="module")
def differs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """What four processes saw: the largest difference of each case."""
    meeting_point = tmp_path_factory.mktemp("store") / "store"
    program = subprocess.Popen(
        [sys.executable, str(_PROGRAM), str(meeting_point)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        told, errors = program.communicate(timeout=150)
    finally:
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)
            program.wait()
    assert program.returncode == 0, errors
    return dict(json.loads(told.splitlines()[-1]))


@pytest.mark.parametrize(("method", "degree", "heads"), list(itertools.product(_METHODS, _DEGREES, _HEADS)))
def test_attention_over_ranks_is_attention(differs: dict[str, float], method: str, degree: str, heads: str) -> None:
    assert differs[f"{method} {degree} {heads} float32"] < 1e-6
    assert differs[f"{method} {degree} {heads} bfloat16"] < 2e-2


@pytest.mark.parametrize(("method", "degree"), list(itertools.product(_METHODS, _DEGREES)))
def test_a_model_with_positions_has_the_same_loss_and_gradients(
    differs: dict[str, float], method: str, degree: str
) -> None:
    assert differs[f"{method} {degree} model"] < 1e-6
