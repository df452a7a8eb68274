"""Model types of transformers that have a tensor plan compute the same when two ranks have half of each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal_workers.contract.hf import TIED_BY_DEFAULT

pytest.importorskip("transformers")
pytestmark = [pytest.mark.dist, pytest.mark.matrix]

_PROGRAM = Path(__file__).with_name("hugging_face_tensor.py")


@pytest.fixture(scope="module")
def differences(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By model type."""
    program = subprocess.Popen(
        [sys.executable, str(_PROGRAM), str(tmp_path_factory.mktemp("store") / "store")],
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


@pytest.mark.parametrize("model_type", sorted(TIED_BY_DEFAULT))
def test_halves_of_a_model_compute_what_the_whole_computes(differences: dict[str, Any], model_type: str) -> None:
    assert differences[model_type]["loss"] < 1e-5
    assert differences[model_type]["gradient"] < 1e-4
