"""run.py under torchrun: the same spec without Ray, resumed from what it committed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal_workers.checkpoint.commit import newest_committed

SPEC: dict[str, Any] = {
    "task": "tiny_tasks:Counting",
    "batch": {"global_size": 8, "micro_size": 2},
    "optimizer": {"lr": 0.02},
    "stop": {"steps": 6},
    "checkpoint": {"every_steps": 4},
    "validation": {"samples": 5},
    "elasticity": {"max_workers": 2},
}


def launch(directory: Path, *launcher: str) -> tuple[dict[int, float], dict[str, Any]]:
    """Losses by step, and the final line."""
    spec = directory / "spec.yaml"
    spec.write_text(json.dumps(SPEC))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    command = [
        sys.executable,
        "-m",
        *launcher,
        "shoal_workers.run",
        str(spec),
        "--checkpoint-dir",
        str(directory / "ck"),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    words = [line.split() for line in done.stdout.splitlines() if line.startswith("step ")]
    return {int(w[1]): float(w[3]) for w in words}, json.loads(done.stdout.splitlines()[-1])


def test_torchrun_trains_a_spec_and_a_single_process_resumes_it(tmp_path: Path, reference: Any) -> None:
    plain = reference(6, **SPEC)
    losses, end = launch(tmp_path, "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    assert losses == pytest.approx(plain, abs=1e-5)
    assert (end["end"], end["steps"], end["checkpoints"]) == ("finished", 6, 2)
    assert end["tokens_per_s"] > 0
    newest = newest_committed(str(tmp_path / "ck"))
    assert newest is not None and "step-000000000006-a1" in newest
    (Path(newest) / "COMMIT.json").unlink()
    again, end_again = launch(tmp_path)
    assert again == pytest.approx({step: plain[step] for step in (5, 6)}, abs=1e-5)
    assert end_again["val_loss"] == pytest.approx(end["val_loss"], abs=1e-5)
