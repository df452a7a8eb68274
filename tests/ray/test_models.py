"""`shoal model get NAME@prod`: files that are whole, from a registered checkpoint of a real job, or a named reason."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kit.processes.server import until
from kit.worlds.tiny_jobs import Submit, holds
from shoal_api.client import Client
from shoal_service.artifact_views import ModelRequest
from shoal_service.views import CheckpointState, JobPatch

_PATIENCE_S = 120.0


def test_what_prod_names_survives_retention_and_arrives_whole_or_with_what_is_damaged(
    shoal_server: Any, client: Client, submit: Submit, tmp_path: Path
) -> None:
    run = submit(workers=1, steps=16, strikes=holds(6), checkpoint={"every_steps": 4, "keep": 1})
    run.wait_at("step-6-0")
    until(lambda: _committed(client, run.id) == [4], "the checkpoint of step 4")
    made = client.register_model("fish", ModelRequest(job=run.id, step=4, description="of step 4"))
    client.set_model_alias(made.project, "fish", "prod", made.version)
    client.patch(run.id, JobPatch(priority=1))  # the attempt has observed the registration once it has observed this
    until(lambda: client.job(run.id).status.observed_generation == 2, "the directive has arrived")
    run.release("step-6-0")
    run.finish()
    assert _committed(client, run.id) == [4, 16], "checkpoint.keep is 1, and what is registered stays"
    found = client.model(made.project, "fish", "prod")
    assert (found.step, found.state, found.lineage[0].job_id) == (4, CheckpointState.COMMITTED, run.id)
    assert found.bytes > 0 and found.metrics["loss"] == pytest.approx(run.losses()[4], rel=1e-5)
    assert found.lineage[0].code == "tiny:Tiny" and len(found.lineage[0].code_sha256) == 64

    out = tmp_path / "out"
    ran = _get(shoal_server, "fish@prod", out)
    assert ran.returncode == 0, ran.stderr
    _compare(found.url, out)
    manifest = json.loads((out / "shoal-export.json").read_text())
    assert manifest["of"]["checkpoint"] == found.url and manifest["result"]["checkpoint"] == found.url
    whole = (out / "model.safetensors").read_bytes()
    (out / "model.safetensors").write_bytes(whole[: len(whole) // 2])  # as a copy that was broken off
    ran = _get(shoal_server, "fish@prod", out)
    assert ran.returncode == 0 and (out / "model.safetensors").read_bytes() == whole, ran.stderr

    newer = client.register_model("fish", ModelRequest(job=run.id))
    client.set_model_alias(made.project, "fish", "prod", newer.version)
    ran = _get(shoal_server, "fish@prod", out)
    assert ran.returncode != 0 and "Name another directory" in _words(ran)
    assert (out / "model.safetensors").read_bytes() == whole, "the older version is as it was"
    ran = _get(shoal_server, "fish@prod", tmp_path / "newer")
    assert ran.returncode == 0, ran.stderr
    _compare(newer.url, tmp_path / "newer")

    payload = next(path for path in sorted(Path(newer.url).iterdir()) if path.suffix == ".bin")
    content = payload.read_bytes()
    payload.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    ran = _get(shoal_server, "fish@prod", tmp_path / "damaged")
    assert ran.returncode != 0 and f"{payload.name} has crc32" in _words(ran)
    assert not list((tmp_path / "damaged").glob("*.safetensors")), "nothing that is not verified"
    payload.unlink()
    ran = _get(shoal_server, "fish@prod", tmp_path / "damaged")
    assert ran.returncode != 0 and f"{payload.name} is missing" in _words(ran)
    payload.write_bytes(content)
    ran = _get(shoal_server, "fish@prod", tmp_path / "damaged")
    assert ran.returncode == 0, "it goes on as soon as the object is back"
    _compare(newer.url, tmp_path / "damaged")


def _committed(client: Client, job_id: str) -> list[int]:
    return [one.step for one in client.checkpoints(job_id) if one.state is CheckpointState.COMMITTED]


def _compare(checkpoint: str, out: Path) -> None:
    """The exported tensors are those of the checkpoint."""
    import torch
    from safetensors.torch import load_file

    from shoal_workers.checkpoint.reader import load, read_catalogue

    shapes = read_catalogue(checkpoint)[0]
    state = {name: torch.empty_like(one, device="cpu") for name, one in shapes.items() if name.startswith("model.")}
    load(state, directory=checkpoint)
    exported = load_file(out / "model.safetensors")
    assert state and sorted(exported) == sorted(name.removeprefix("model.") for name in state)
    assert all(torch.equal(exported[name.removeprefix("model.")], tensor) for name, tensor in state.items())


def _words(ran: subprocess.CompletedProcess[str]) -> str:
    return " ".join(ran.stderr.split())


def _get(server: Any, reference: str, out: Path) -> subprocess.CompletedProcess[str]:
    program = [server.python, "-c", "from shoal_api.cli.main import main; main()", "model", "get", reference]
    environment = {**os.environ, "SHOAL_STATE_DIR": str(server.state_dir), "COLUMNS": "400"}
    command = [*program, "--to", str(out), f"--url=http://127.0.0.1:{server.port}"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_PATIENCE_S)
