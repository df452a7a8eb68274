"""`shoal export JOB`: from a server's finished job to a model that transformers loads."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from shoal_api.client import Client
from shoal_workers.contract.job import JobState

transformers = pytest.importorskip("transformers")

_PATIENCE_S = 120.0


@pytest.mark.matrix
def test_a_jobs_newest_checkpoint_is_exported_by_the_jobs_name(
    shoal_server: Any, client: Client, tmp_path: Path
) -> None:
    import torch

    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"{a} and {b} make {a + b}." for a in range(40) for b in range(20)))
    spec = {
        "name": "to-export",
        "model": {"dim": 32, "num_layers": 2, "num_heads": 4, "seq_len": 16},
        "data": {"paths": [str(text)], "cache_dir": str(tmp_path / "cache")},
        "batch": {"global_size": 4, "micro_size": 2},
        "stop": {"steps": 3},
        "validation": {"samples": 0},
        "elasticity": {"min_workers": 1, "max_workers": 1},
    }
    job = client.wait(client.submit(spec).id, until=[JobState.SUCCEEDED], timeout_s=_PATIENCE_S)
    assert job.status.state is JobState.SUCCEEDED, job.status

    ran = _export(shoal_server, client, "to-export", tmp_path / "out", "--json")
    assert ran.returncode == 0, ran.stderr
    (newest,) = [one for one in client.checkpoints(job.id) if one.step == 3]
    assert json.loads(ran.stdout)["checkpoint"] == newest.url
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.arange(16).reshape(1, 16)
    with torch.no_grad():
        assert math.isfinite(model(tokens, labels=tokens).loss.item())

    ran = _export(shoal_server, client, "to-export", tmp_path / "other", "--step=2")
    assert ran.returncode != 0
    output = " ".join(ran.stderr.split())
    assert "no committed checkpoint of step 2" in output, output
    assert not (tmp_path / "other").exists()


def _export(server: Any, client: Client, *arguments: object) -> subprocess.CompletedProcess[str]:
    program = [server.python, "-c", "from shoal_api.cli.main import main; main()", "export", *map(str, arguments)]
    environment = {**os.environ, "SHOAL_STATE_DIR": str(server.state_dir)}  # the token of the server's owner is there
    command = [*program, f"--url=http://127.0.0.1:{server.port}"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_PATIENCE_S)
