"""The worked example of a plan runs as it is: the same losses split by tensors, by stages, and not at all."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kit.processes.warm import warm_python

EXAMPLE = Path(__file__).parents[3] / "examples" / "user-plan"


def last_loss(directory: Path, num_processes: int, parallelism: Any) -> float:
    spec = yaml.safe_load((EXAMPLE / "waves.yaml").read_text())
    spec |= {"parallelism": parallelism, "stop": {"steps": 6}, "code": {}}
    path = directory / "spec.yaml"
    path.write_text(yaml.safe_dump(spec))
    done = subprocess.run(
        [
            *(warm_python(), "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"),
            *("-m", "shoal_workers.run", str(path), "--checkpoint-dir", str(directory / f"checkpoints-{parallelism}")),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLE)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return float(json.loads(done.stdout.strip().splitlines()[-1])["loss"])


@pytest.mark.matrix
def test_the_example_gives_the_same_losses_in_every_layout(tmp_path: Path) -> None:
    alone = last_loss(tmp_path, 1, "auto")
    assert last_loss(tmp_path, 2, {"tp": 2}) == pytest.approx(alone, abs=1e-5)
    assert last_loss(tmp_path, 2, {"pp": 2}) == pytest.approx(alone, abs=1e-5)
