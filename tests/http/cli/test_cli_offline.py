"""Commands that need no server, and what all commands share: start-up time, errors, usage."""

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from shoal_api.cli import session
from shoal_api.client import client

pytestmark = pytest.mark.first


def test_the_help_loads_no_heavy_module() -> None:
    script = (
        "import sys\nfrom typer.testing import CliRunner\nfrom shoal_api.cli.main import build_app\n"
        "assert CliRunner().invoke(build_app(), ['--help']).exit_code == 0\n"
        "print(sorted({'torch', 'ray', 'sqlalchemy', 'fastapi', 'httpx', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_command_against_the_server_loads_neither_torch_nor_ray(service: Any) -> None:
    script = (
        "import sys\nfrom typer.testing import CliRunner\nfrom shoal_api.cli.main import build_app\n"
        f"assert CliRunner().invoke(build_app(), ['jobs', '--url', {service.url!r}]).exit_code == 0\n"
        "print(sorted({'torch', 'ray', 'fastapi'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_default_url_equals_that_of_the_client() -> None:
    assert session.DEFAULT_URL == client.DEFAULT_URL


def test_validate_shows_how_each_world_size_splits_a_step(offline: Any, spec_file: Path) -> None:
    ran = offline("validate", str(spec_file))
    assert ran.code == 0
    assert "3 workers: 3 micro-batches each, 1 of them padding" in ran.out
    assert offline("validate", str(spec_file), "--json").json()["valid"] is True


def test_validate_lists_all_errors_together(offline: Any, spec_file: Path) -> None:
    wrong = ("--set", "stop.steps=0", "--set", "seeed=1")
    ran = offline("validate", str(spec_file), *wrong, "--json")
    assert ran.code == 2
    assert {problem["path"] for problem in ran.json()["errors"]} == {"stop.steps", "seeed"}
    assert "seed" in offline("validate", str(spec_file), *wrong).err


def test_validate_says_of_a_script_what_is_run(offline: Any, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("script: {module: pkg.train}\nelasticity: {min_workers: 2, max_workers: 8}\n")
    ran = offline("validate", str(path))
    assert (ran.code, ran.out) == (
        0,
        "job: the spec is valid\n  script -m pkg.train, as by torchrun, with 2 to 8 workers\n",
    )
    refused = offline("data", "prepare", str(path))
    assert refused.code == 2 and "a script or a loop reads its own data" in refused.err


def test_a_program_given_for_a_spec_names_the_commands_for_programs(offline: Any, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("def main():\n    pass\n")
    for command in (("validate",), ("plan",), ("sweep", "--grid", "seed=1,2")):
        ran = offline(*command, str(path))
        assert ran.code == 2
        assert "is a Python program" in ran.err and f"shoal submit {path}" in ran.err


def test_a_script_is_checked_without_being_run(offline: Any, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import torch\ntorch.distributed.init_process_group()\nraise SystemExit(9)\n")
    ran = offline("check", str(path))
    assert "can run as a script, as it is" in ran.out
    assert "Relative files go there, and are kept until it is deleted: shoal files JOB." in ran.err
    found = offline("check", str(path), "--json").json()
    assert (found["door"], found["launcher"], found["program"]) == ("script", "torchrun", "train.py")
    spec = tmp_path / "job.yaml"
    spec.write_text("script: {module: train}\ncode: {working_dir: .}\n")
    assert offline("check", str(spec), "--json").json()["program"] == "train.py"
    assert offline("check", str(tmp_path / "nowhere.py")).code == 4


def test_the_schema_documents_every_key(offline: Any) -> None:
    schema = offline("schema").json()
    assert schema["properties"]["stop"]
    assert "LanguageModelConfig" in schema["$defs"]


def test_version_names_shoal_ray_torch_and_python(offline: Any) -> None:
    assert set(offline("version", "--json").json()) == {"shoal", "ray", "torch", "python"}


def test_data_prepare_refuses_a_task_that_reads_its_own_data(offline: Any, spec_file: Path) -> None:
    ran = offline("data", "prepare", str(spec_file), "--set", "task=mine:Task")
    assert ran.code == 2


def test_data_show_shows_what_the_task_reads_and_names_what_cannot_be_read(
    offline: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text, spec = tmp_path / "text.txt", tmp_path / "spec.json"
    text.write_text("to be or not to be " * 40)
    data = {"paths": [str(text)], "cache_dir": str(tmp_path / "cache"), "validation_fraction": 0}
    spec.write_text(json.dumps({"data": data, "model": {"seq_len": 16}, "stop": {"steps": 1}}))
    train = offline("data", "show", str(spec), "--samples", "1", "--json").json()["splits"]["train"]
    assert train["samples"] == 47 and [row["in_loss"] for row in train["rows"]] == [16]
    assert "train: 47 samples" in offline("data", "show", str(spec)).out
    text.unlink()
    ran = offline("data", "show", str(spec))
    said = capfd.readouterr().err
    assert ran.code == 1 and "text.txt' matches no file" in said and "Traceback" not in said
    ran = offline("data", "show", str(spec), "--set", "script={file: train.py}", "--set", "task=null")
    assert ran.code == 2


def test_an_unknown_option_is_a_usage_error(offline: Any) -> None:
    assert offline("jobs", "--bogus").code == 2


def test_serve_refuses_contradictory_settings_with_a_message(offline: Any) -> None:
    ran = offline("serve", "--ray-address", "127.0.0.1:1", "--num-cpus", "4")
    assert ran.code == 2
    assert "ray_address" in ran.err
    assert "Traceback" not in ran.err


def test_ctrl_c_detaches_from_a_followed_job_which_continues(service: Any) -> None:
    job = service.add_job()
    service.train(job)
    command = [sys.executable, "-m", "shoal_api.cli.main", "watch", job.id, "--url", service.url, "--json"]
    watcher = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=_as_in_a_terminal
    )
    guard = threading.Timer(60, watcher.kill)
    guard.start()
    try:
        assert watcher.stdout is not None
        assert json.loads(watcher.stdout.readline())["seq"] == 1
        err = _interrupt(watcher)
    finally:
        guard.cancel()
        watcher.kill()
        watcher.wait()
    assert watcher.returncode == 130
    assert f"shoal watch {job.id}" in err
    assert "Traceback" not in err
    assert not service.store.get_job(job.id).status.state.ended


def _as_in_a_terminal() -> None:
    """If the tests run in the background of a script, SIGINT is ignored, and child processes inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _interrupt(process: subprocess.Popen[str]) -> str:
    """Send Ctrl-C, repeatedly, because one that arrives while Python runs a finaliser is lost. Return the output."""
    while True:
        process.send_signal(signal.SIGINT)
        try:
            return process.communicate(timeout=10)[1]
        except subprocess.TimeoutExpired:
            continue


def test_export_names_the_checkpoint_that_cannot_be_read(offline: Any, tmp_path: Path) -> None:
    ran = offline("export", str(tmp_path), str(tmp_path / "out"))
    assert ran.code == 1
    assert "never committed" in ran.err
    ran = offline("export", str(tmp_path / "nowhere"), str(tmp_path / "out"))
    assert ran.code == 2
    assert "is not a directory" in ran.err
