"""Each job has a directory of its own, through every door, and what its program writes there is kept."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kit.processes.server import PATIENCE_S, Server, until
from shoal_api.client import Client
from shoal_service.views import SweepRequest
from shoal_workers.contract.job import JobState
from shoal_workers.contract.outputs import FOLDER

WRITERS = Path(__file__).parents[1] / "kit" / "writers"
DOORS: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "task": lambda mark, gates: {
        "task": "tasks:Task",
        "model": {"mark": mark, "gates": gates},
        "batch": {"global_size": 4, "micro_size": 2},
        "stop": {"steps": 1},
    },
    "loop": lambda mark, gates: {"loop": {"file": "loop.py", "args": [mark, gates]}},
    "script": lambda mark, gates: {"script": {"file": "script.py", "args": [mark, gates]}},
    "ray_train": lambda mark, gates: {
        "script": {"file": "ray_train_writer.py", "args": [mark, gates], "launcher": "ray_train"}
    },
}
NAMES = ["beside.txt", "mine.txt", "runs/x/events.txt"]
NEW = ["new mine.txt", "new events.txt", "new beside.txt"]


def content(client: Client, job_id: str, name: str) -> str:
    out = io.BytesIO()
    client.save_file(job_id, name, out)
    return out.getvalue().decode()


def lines(client: Client, job_id: str, words: str) -> list[str]:
    return [line.text for line in client.logs(job_id) if re.search(words, line.text)]


@pytest.mark.cells(1, 1)
@pytest.mark.parametrize("door", DOORS)
def test_two_jobs_with_one_code_at_once_share_nothing_that_can_be_written(
    client: Client, tmp_path: Path, door: str
) -> None:
    marks = (f"{door}-1", f"{door}-2")
    code = {"working_dir": str(WRITERS)}
    jobs = {mark: client.submit({"name": mark, "code": code, **DOORS[door](mark, str(tmp_path))}).id for mark in marks}
    try:
        until(lambda: all((tmp_path / mark).exists() or _has_ended(client, jobs[mark]) for mark in marks), "the marks")
        (tmp_path / "open").touch()
        for mark, job_id in jobs.items():
            status = client.wait(job_id, timeout_s=PATIENCE_S).status
            said = lines(client, job_id, "^(read|found|new) |Relative files go to")
            assert status.state is JobState.SUCCEEDED, (status, lines(client, job_id, ""))
            assert f"read {mark}" in said and [line for line in said if line.startswith(("found", "new"))] == NEW, said
            assert len([line for line in said if "Relative files" in line]) == 1, said
            assert [file.name for file in client.files(job_id).items] == NAMES
            assert {content(client, job_id, name) for name in NAMES} == {mark}
    finally:
        for job_id in jobs.values():
            if not _has_ended(client, job_id):
                client.cancel(job_id)


def _has_ended(client: Client, job_id: str) -> bool:
    return client.job(job_id).status.state.ended


def test_what_a_script_has_written_goes_with_it_and_survives_the_server(
    join_cluster: Callable[..., Server], tmp_path: Path
) -> None:
    server = join_cluster(tmp_path / "state", [], {"SHOAL_CHECKPOINT_URL": str(tmp_path / "checkpoints")})
    server.start().wait_for_cluster()
    gate = tmp_path / "gate"
    with server.client as client:
        script = {"file": "resumes.py", "args": [str(gate)]}
        job = client.submit({"script": script, "code": {"working_dir": str(WRITERS)}})
        until(lambda: lines(client, job.id, "has reached step 20"), "step 20")
        client.pause(job.id)
        until(lambda: client.job(job.id).status.state is JobState.PAUSED, "the pause")
        assert content(client, job.id, "out/last.txt") == "20"
        [line] = lines(client, job.id, "Relative files go to")
        directory = Path(line.removeprefix("Relative files go to ").partition(" on each node")[0])
        assert (directory / "out" / "last.txt").read_text() == "20"
        shutil.rmtree(directory)  # as on a node where the job has not been
        directory.with_suffix(".json").unlink()
        gate.touch()
        client.resume(job.id)
        status = client.wait(job.id, timeout_s=PATIENCE_S).status
        assert status.state is JobState.SUCCEEDED, status
        assert lines(client, job.id, "goes on from") == ["goes on from step 0", "goes on from step 20"]
    assert server.stop() == 0
    server.start().wait_for_cluster()
    with server.client as client:
        assert [file.name for file in client.files(job.id, "*.txt").items] == ["out/last.txt"]
        assert content(client, job.id, "out/last.txt") == "40"
        client.delete_job(job.id)
        assert not (tmp_path / "checkpoints" / job.id / FOLDER).exists()


@pytest.mark.matrix
def test_eight_scripts_of_one_code_at_once_have_files_curves_and_checkpoints_of_their_own(
    join_cluster: Callable[..., Server], tmp_path: Path
) -> None:
    storage = tmp_path / "checkpoints"
    server = join_cluster(tmp_path / "state", [], {"SHOAL_CHECKPOINT_URL": str(storage)})
    server.start().wait_for_cluster()
    rates = [number / 10 for number in range(1, 9)]
    spec = {
        "name": "swept",
        "script": {"file": "swept.py", "args": [str(tmp_path)]},
        "code": {"working_dir": str(WRITERS)},
        "elasticity": {"min_workers": 1, "max_workers": 1},
    }
    with server.client as client:
        grid = {"code.env.LR": tuple(f'"{lr}"' for lr in rates)}
        swept = client.submit_sweep(SweepRequest(name="eight", spec=spec, grid=grid))
        jobs = {float(client.job(job.id).spec.code.env["LR"]): job.id for job in swept.jobs}
        assert sorted(jobs) == rates
        try:
            for lr, job_id in jobs.items():  # one after the other, as eight start on few cores
                until(lambda lr=lr, job_id=job_id: (tmp_path / str(lr)).exists() or _has_ended(client, job_id), f"{lr}")
            (tmp_path / "open").touch()
            ends = {lr: f"{lr} 10 {(1 - lr) ** 10:.6f}" for lr in rates}
            for lr, job_id in jobs.items():
                job = client.wait(job_id, timeout_s=PATIENCE_S)
                assert job.status.state is JobState.SUCCEEDED, (job.status, lines(client, job_id, ""))
                assert lines(client, job_id, "^(found|has)") == ["found", f"has {ends[lr]} {ends[lr]}"]
                curve = {point.step: point.loss for point in client.series(job_id)}
                assert curve == pytest.approx({step: (1 - lr) ** step for step in range(1, 11)}, abs=1e-6)
                names = [file.name for file in client.files(job_id).items]
                assert len(names) == 2 and names[0] == "last.txt" and names[1].startswith("runs/"), names
        finally:
            client.cancel_sweep("default", "eight")  # of those that have not ended
    assert server.stop() == 0
    server.start().wait_for_cluster()
    command = [server.python, "-m", "shoal_api.cli.main", "fetch", jobs[0.3], "last.txt", "--out", tmp_path / "here"]
    environment = {**os.environ, "SHOAL_URL": f"http://127.0.0.1:{server.port}", "SHOAL_TOKEN": server.token}
    subprocess.run(command, check=True, env=environment, cwd=tmp_path)
    assert [path.read_text() for path in (tmp_path / "here").rglob("*.txt")] == [ends[0.3]]
