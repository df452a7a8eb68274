"""Scripts as tutorials have them, with their default output folders: two of each at once, and a process is killed."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from kit.processes.server import PATIENCE_S, until
from shoal_api.client import Client
from shoal_workers.contract.job import IncidentCause, JobState

TUTORIALS = Path(__file__).parents[1] / "kit" / "tutorials"
LAUNCHERS = {"accelerated": "accelerate", "ray_train": "ray_train"}
HALF, STEPS, TARGETS = 4, 8, (1.0, 5.0)


def lines(client: Client, job_id: str, words: str) -> list[str]:
    return [line.text for line in client.logs(job_id) if re.match(words, line.text)]


@pytest.mark.matrix  # tests/dist/script/test_libraries.py kills one of each; test_job_files.py has two jobs of a code
@pytest.mark.parametrize("name", ["torchrun", "accelerated", "hf_trainer", "lightning_trainer", "ray_train"])
def test_two_tutorial_scripts_at_once_go_on_from_their_own_files(client: Client, tmp_path: Path, name: str) -> None:
    jobs: dict[float, str] = {}
    for target in TARGETS:
        script = {"file": f"{name}.py", "args": [str(target), str(tmp_path)], "grace_s": 2}
        spec = {
            "name": name.replace("_", "-"),
            "script": {**script, "launcher": LAUNCHERS.get(name, "torchrun")},
            "code": {"working_dir": str(TUTORIALS)},
            "elasticity": {"min_workers": 2, "max_workers": 2},
        }
        jobs[target] = client.submit(spec).id
    ranks = [tmp_path / f"{target}-{rank}" for target in TARGETS for rank in (0, 1)]

    def reached() -> bool:
        ended = [client.job(job_id) for job_id in jobs.values() if client.job(job_id).status.state.ended]
        assert not ended, [(job.status, lines(client, job.id, "")) for job in ended]
        return all(path.exists() for path in ranks)

    try:
        until(reached, "step 4 of both")
        os.kill(int(ranks[1].read_text()), signal.SIGKILL)
        until(lambda: client.incidents(jobs[TARGETS[0]]), "the incident")
        (tmp_path / "open").touch()
        for target, job_id in jobs.items():
            status = client.wait(job_id, timeout_s=PATIENCE_S).status
            assert status.state is JobState.SUCCEEDED, (status, lines(client, job_id, ""))
            weight = target * (1 - 0.8**STEPS)
            assert set(lines(client, job_id, "ends with")) == {f"ends with {weight:.4f} of {target}"}
            begins = {int(line.split()[3]) for line in lines(client, job_id, "begins at step")}
            assert begins == ({0, HALF} if target == TARGETS[0] else {0}), begins
    finally:
        for job_id in jobs.values():
            if not client.job(job_id).status.state.ended:
                client.cancel(job_id)
    [incident] = client.incidents(jobs[TARGETS[0]])
    assert incident.cause is IncidentCause.SCRIPT_DIED and not client.incidents(jobs[TARGETS[1]])
