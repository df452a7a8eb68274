"""Scripts of Ray Train on a real cluster: unchanged, with Ray Data and checkpoints; a worker dies, the group
shrinks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray.train.examples.pytorch as examples
import torch
from torch import nn

from kit.processes.server import PATIENCE_S, Server, until
from kit.worlds.gated_scripts import SCRIPTS, GatedScript
from shoal_api.client import Client
from shoal_workers.contract.job import JobState

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray-train"
ROWS, EPOCHS, BATCH = 52, 2, 4
SAVED, GATED, LAST = 8, 10, 14
"""Steps of ray_train_rows.py with two workers: seven steps an epoch, a checkpoint each 4 steps, a gate after step
10."""


class Run(GatedScript):
    """A job with ray_train_rows.py."""

    def __init__(self, client: Client, folder: Path) -> None:
        self._folder = folder
        data = folder / "data"
        data.mkdir()
        for file in range(4):
            rows = range(file * ROWS // 4, (file + 1) * ROWS // 4)
            (data / f"{file}.csv").write_text("row\n" + "".join(f"{row}\n" for row in rows))
        args = [str(data), str(folder / "rows"), str(folder / "gate")]
        script = {"file": "ray_train_rows.py", "args": args, "launcher": "ray_train"}
        super().__init__(client, script, gate=folder / "gate", gated=GATED, min_workers=1)

    def rows(self) -> dict[int, list[list[int]]]:
        """By step, what each rank has read in it, in the group that completed the step last."""
        found: dict[int, list[list[int]]] = {}
        groups: dict[int, int] = {}
        lines = [line for rank in range(2) for line in Path(f"{self._folder}/rows.{rank}").read_text().splitlines()]
        for group, step, rows in (line.split(" ", 2) for line in lines):
            number, newest = int(group), groups.get(int(step), -1)
            if number > newest:
                groups[int(step)], found[int(step)] = number, []
            if number >= newest:
                found[int(step)].append([int(row) for row in rows[1:-1].split(",")])
        return found


@pytest.fixture
def run(client: Client, tmp_path: Path) -> Iterator[Run]:
    with Run(client, tmp_path) as one:
        yield one


def _losses() -> list[float]:
    """The same training in one process of plain torch, which reads the file from its beginning to its end."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(EPOCHS):
        for first in range(0, ROWS, 2 * BATCH):
            x = torch.arange(first, min(first + 2 * BATCH, ROWS))[:, None] / ROWS
            loss = nn.functional.mse_loss(model(x), 3 * x + 1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.mark.first
@pytest.mark.cells(1, 1)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_worker_costs_the_steps_since_the_checkpoint_and_no_row(client: Client, run: Run, victim: int) -> None:
    """Rank 0 has the script, and with it the actor that reads the dataset."""
    run.reach_the_gate()
    pid = next(worker.pid for worker in client.workers(run.id) if worker.rank == victim)
    client.scale(run.id, min_workers=2)
    os.kill(pid, signal.SIGKILL)
    until(lambda: client.incidents(run.id), "the incident")
    run.open()
    status = run.ends().status

    assert (status.step, status.incidents) == (LAST, 1)
    assert run.lines("rank 0 of 2 goes on from step") == [
        f"rank 0 of 2 goes on from step {step}" for step in (0, SAVED)
    ]
    assert run.lines("dataset train goes on after 8 rows of its pass")
    series = {point.step: point.loss for point in client.series(run.id)}
    assert [series[step] for step in range(1, LAST + 1)] == pytest.approx(_losses(), abs=1e-6)
    rows = run.rows()
    per_epoch = LAST // EPOCHS
    for epoch in range(EPOCHS):
        steps = range(epoch * per_epoch + 1, (epoch + 1) * per_epoch + 1)
        assert [row for step in steps for of_rank in rows[step] for row in of_rank] == [*range(ROWS)]
    [result] = run.lines("^result: ")
    assert result.startswith(f"result: returned by rank 0, step {LAST}, loss ")
    assert result.endswith("['checkpoint_000007', 'checkpoint_000011']"), "the reports before steps 8 and 12"


def test_an_example_of_ray_runs_unchanged_and_a_shard_is_read_in_every_way(client: Client, tmp_path: Path) -> None:
    """Both jobs are submitted together, since most of their time is the start. The example is the file that Ray
    installs. 17 rows on two ranks are eight for each, and one is left out."""
    shutil.copy(Path(examples.__file__).with_name("torch_linear_example.py"), tmp_path)
    script = {"file": "torch_linear_example.py", "args": ["--epochs", "2"], "launcher": "ray_train"}
    elasticity = {"min_workers": 2, "max_workers": 2}
    job = client.submit({"script": script, "code": {"working_dir": str(tmp_path)}, "elasticity": elasticity})
    script = {"file": "ray_train_shards.py", "launcher": "ray_train"}
    reading = client.submit({"script": script, "code": {"working_dir": str(SCRIPTS)}, "elasticity": elasticity})
    ended = client.wait(job.id, timeout_s=PATIENCE_S)
    assert (ended.status.state, ended.status.step) == (JobState.SUCCEEDED, 2), ended.status
    losses = [point.loss for point in client.series(job.id)]
    assert len(losses) == 2 and all(loss is not None for loss in losses)
    printed = [line.text for line in client.logs(job.id) if line.text.startswith("{'loss':")]
    assert printed == [str({"loss": losses[-1]})], "the last lines of the script run once, on rank 0"
    _assert_read_in_every_way(client, reading.id)


def test_a_driver_script_trains_on_the_service_and_gets_the_result(
    shoal_server: Server, client: Client, tmp_path: Path
) -> None:
    shutil.copy(SCRIPTS / "ray_train_driver.py", tmp_path)
    url = f"http://127.0.0.1:{shoal_server.port}"
    environment = {**os.environ, "SHOAL_STATE_DIR": str(shoal_server.state_dir), "SHOAL_URL": url}
    environment.pop("PYTHONPATH", None)
    command = [str(shoal_server.python), "ray_train_driver.py", "3"]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    printed = [line for line in ran.stdout.splitlines() if line.startswith("result ")]
    assert printed == ["result {'loss': 4.0, 'step': 3} driven ['rank0', 'rank1'] [1, 2, 3]"]
    [job] = [job for job in client.jobs() if job.name == "driven"]
    assert (job.state, job.step) == (JobState.SUCCEEDED, 3)
    assert f"shoal watch {job.id}" in ran.stderr and "job STARTING -> RUNNING" in ran.stderr


def _assert_read_in_every_way(client: Client, job_id: str) -> None:
    ended = client.wait(job_id, timeout_s=PATIENCE_S)
    lines = [line.text for line in client.logs(job_id)]
    assert ended.status.state is JobState.SUCCEEDED, (ended.status, lines)
    first, second = sorted(
        (json.loads(line) for line in lines if line.startswith('{"rank":')), key=lambda one: one["rank"]
    )
    large = [[*range(8)], [*range(8, 16)]]
    by_three = [[0, 1, 2, 6, 7, 8, 12, 13], [3, 4, 5, 9, 10, 11, 14, 15]]
    for rank, found in enumerate((first, second)):
        assert found["rows"] == found["blocks"] == large[rank]
        assert found["materialized"] == large[rank]
        assert found["broken off"] == by_three[rank][:3]
        assert found["batches"] == [by_three[rank][:3], by_three[rank][3:6]]
        assert found["shuffled"] == by_three[rank]
        assert found["names"] == ["id"]
    assert second["whole"] == [*range(5)]


@pytest.mark.matrix
def test_the_example_is_recognised_and_trains(shoal_server: Server, client: Client) -> None:
    """As a user submits it: no option says that it is a script of Ray Train, or how many workers it wants."""
    url = f"http://127.0.0.1:{shoal_server.port}"
    environment = {**os.environ, "SHOAL_STATE_DIR": str(shoal_server.state_dir), "SHOAL_URL": url}
    environment.pop("PYTHONPATH", None)
    command = [str(shoal_server.python), "-m", "shoal_api.cli.main", "submit", "train.py", "--", "--epochs", "1"]
    ran = subprocess.run(command, cwd=EXAMPLE, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "train.py has a TorchTrainer of Ray Train: --launcher ray_train, with --workers 2 as it says" in ran.stderr
    job_id = ran.stdout.split()[0]
    ended = client.wait(job_id, timeout_s=PATIENCE_S)
    lines = [line.text for line in client.logs(job_id)]
    assert (ended.status.state, ended.status.step) == (JobState.SUCCEEDED, 40), (ended.status, lines)
    [printed] = [line for line in lines if line.startswith("trained to step 40, loss ")]
    assert float(printed.split()[5].rstrip(":")) < 1.0, "three rings: a guess is at 1.1"
