"""What the code of a job can read of the service that runs it."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest

from kit.processes.server import SECRET, SERVICE_SECRETS, Server
from shoal_api.client import Client
from shoal_workers.contract.job import JobState

TASKS = Path(__file__).parents[2] / "kit" / "ray_tasks"


def test_job_code_finds_its_own_variables_and_no_setting_of_the_service(
    shoal_server: Server, client: Client, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("hub-token-of-the-job\n")
    job = client.submit(
        {
            "name": "looks-around",
            "task": "looks_around:Task",
            "code": {"working_dir": str(TASKS), "env": {"COLOUR": "green"}},
            "secrets": {"HUB_TOKEN": {"file": str(tmp_path / "token")}},
            "batch": {"global_size": 4, "micro_size": 2},
            "stop": {"steps": 2},
        }
    )
    ended = client.wait(job.id, timeout_s=120)
    assert ended.status.state is JobState.SUCCEEDED, ended.status
    lines = [line.text for line in client.logs(job.id)]
    shown = [json.loads(line.removeprefix("ENV ")) for line in lines if line.startswith("ENV ")]
    assert {process for process, _, _ in shown if process.split()[0] != "os.environ"}, "it has read those of /proc"
    assert [entry for entry in shown if entry[1] == "PATH"], "what is not secret is inherited"
    assert ["os.environ", "COLOUR", "green"] in shown
    assert ["os.environ", "HUB_TOKEN", "[secret HUB_TOKEN]"] in shown, "job code has it; the log does not"
    assert "the secret is [secret HUB_TOKEN]" in lines
    [raw] = [
        path
        for path in Path(str(shoal_server.note and shoal_server.note["temp_dir"])).rglob("worker-*.out")
        if b"the secret is" in path.read_bytes()
    ]
    assert b"hub-token-of-the-job" not in raw.read_bytes()
    assert "hub-token-of-the-job" not in client.job(job.id).model_dump_json()
    assert b"hub-token-of-the-job" not in (shoal_server.state_dir / "shoal.db").read_bytes()
    leaked = [entry for entry in shown if SECRET in entry[2] or entry[1] in SERVICE_SECRETS]
    assert leaked == []
    folders = dict(json.loads(line.removeprefix("FOLDER ")) for line in lines if line.startswith("FOLDER "))
    assert folders[min(folder for folder in folders if f"/{job.id}-" in folder)] == 0o700, "no other user reads it"
    assert shoal_server.note is not None
    mode = Path(shoal_server.note["temp_dir"]).stat().st_mode & 0o777
    assert mode == 0o700, "Ray opens its own directories, and not the one above"


@pytest.mark.first
def test_no_process_of_the_cluster_has_a_secret_of_the_service(shoal_server: Server) -> None:
    assert shoal_server.process is not None
    environments = {}
    for pid, command in shoal_server.processes().items():
        if pid != shoal_server.process.pid:
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
                environments[command] = Path(f"/proc/{pid}/environ").read_bytes()
    assert any("/raylet" in command for command in environments)
    assert [command for command, environment in environments.items() if SECRET.encode() in environment] == []


@pytest.mark.first
def test_the_process_with_the_database_has_loaded_neither_ray_nor_torch(shoal_server: Server) -> None:
    assert shoal_server.process is not None
    pid = shoal_server.process.pid
    [gateway] = [pid for pid, command in shoal_server.processes().items() if "gateway.process" in command]
    try:
        loaded = Path(f"/proc/{pid}/maps").read_text()
    except PermissionError:
        return  # only root may look into the server
    assert "_raylet" not in loaded and "/torch/" not in loaded
    assert "_raylet" in Path(f"/proc/{gateway}/maps").read_text()
    assert Path(f"/proc/{gateway}/environ").read_bytes().count(b"SHOAL_") == 0
    arguments = Path(f"/proc/{gateway}/cmdline").read_bytes()
    token = (shoal_server.state_dir / "default-gateway-token").read_bytes().strip()
    assert token not in arguments and token not in Path(f"/proc/{gateway}/environ").read_bytes()


@pytest.mark.first
def test_the_files_of_the_cluster_are_those_of_their_owner_alone(shoal_server: Server) -> None:
    files = [
        path for path in shoal_server.state_dir.iterdir() if path.is_file() and not path.name.startswith("server-")
    ]
    assert {"shoal.db", "ray-token", "ray-node-0.log", "embedded-cluster.json"} <= {path.name for path in files}
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in files if path.stat().st_mode & 0o077} == {}
