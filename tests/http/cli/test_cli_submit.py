"""`submit` and `watch`: overrides, invalid specs, following, exit codes."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from shoal_api.cli.follow import follow_job
from shoal_api.cli.render.progress import PlainScreen
from shoal_api.client import Client
from shoal_service.core.events.training import GenerationFormed
from shoal_service.reports import PendingEvent
from shoal_service.store import archives, histories
from shoal_service.views import JobStatus
from shoal_workers.contract.job import EndReason, JobState

RUNNING = JobStatus(state=JobState.RUNNING, attempt=1, workers=4, desired_workers=4, step=1, total_steps=100)


def test_submit_prints_the_job_and_how_to_watch_it(shoal: Any, spec_file: Path) -> None:
    ran = shoal("submit", str(spec_file))
    assert ran.code == 0
    assert f"shoal watch {ran.out.split()[0]}" in ran.out


def test_submit_reads_standard_input_and_applies_changes(shoal: Any, spec_file: Path) -> None:
    ran = shoal(
        "submit",
        "-",
        "--set",
        "stop.steps=7",
        "--set",
        "optimizer.lr=1e-2",
        "--name",
        "mine",
        "--json",
        stdin=spec_file.read_text(),
    )
    job = ran.json()
    assert (job["name"], job["spec"]["stop"]["steps"]) == ("mine", 7)


def test_an_invalid_spec_is_refused_and_the_error_names_the_key_and_the_nearest_one(
    shoal: Any, spec_file: Path
) -> None:
    ran = shoal("submit", str(spec_file), "--set", "batch.global_sise=8")
    assert ran.code == 2
    assert "'global_size'" in ran.err
    assert shoal("jobs", "--json").json() == []


def test_a_missing_file_ends_with_4(shoal: Any) -> None:
    assert shoal("submit", "nowhere.yaml").code == 4


def test_a_working_directory_is_relative_to_the_spec(shoal: Any, service: Any, spec_file: Path) -> None:
    (spec_file.parent / "code").mkdir()
    (spec_file.parent / "code" / "mine.py").write_text("class Task: ...\n")
    spec = json.loads(spec_file.read_text()) | {"task": "mine:Task", "data": {}, "code": {"working_dir": "code"}}
    spec_file.write_text(json.dumps(spec))
    job = shoal("submit", str(spec_file), "--json").json()
    assert service.store.reading(archives.exists)(job["spec"]["code"]["archive"])


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script in the current directory, with 1 MiB beside it that is not sent."""
    directory = tmp_path / "mine"
    (directory / "runs").mkdir(parents=True)
    (directory / "train.py").write_text("print()\n")
    (directory / "runs" / "weights.bin").write_bytes(b"\0" * (1 << 20))
    (directory / ".shoalignore").write_text("runs\n")
    monkeypatch.chdir(directory)
    return directory / "train.py"


def test_a_script_needs_no_spec(shoal: Any, service: Any, script: Path) -> None:
    options = ("--workers", "2:8", "--gpus", "1", "--cpus", "2", "--standby", "1", "--grace", "30")
    ran = shoal("submit", "train.py", *options, "--name", "mine", "--json", "--", "--lr", "3e-4", "--url", "x")
    assert ran.code == 0, ran.err
    job = ran.json()
    assert job["name"] == "mine"
    assert job["spec"]["script"] == {
        "file": "train.py",
        "module": None,
        "args": ["--lr", "3e-4", "--url", "x"],
        "launcher": "torchrun",
        "grace_s": 30.0,
        "progress": "auto",
    }
    elasticity = job["spec"]["elasticity"]
    assert (elasticity["min_workers"], elasticity["max_workers"], elasticity["standby"]) == (2, 8, 1)
    assert (job["spec"]["worker"]["gpus"], job["spec"]["worker"]["cpus"]) == (1, 2.0)
    assert service.store.reading(archives.exists)(job["spec"]["code"]["archive"])
    assert "stop" not in job["spec"] and "model" not in job["spec"], "a script's spec has no keys of tasks"


def test_the_size_of_the_code_is_reported(shoal: Any, script: Path) -> None:
    ran = shoal("submit", "train.py", "--dry-run")
    assert f"code: {script.parent}, 2 files, 13 B (" in ran.err and ".shoalignore leaves out 1" in ran.err


def test_a_dry_run_has_no_job_to_follow(shoal: Any, script: Path) -> None:
    refused = shoal("submit", "train.py", "--dry-run", "--follow", "--wait")
    assert refused.code == 2 and "--dry-run cannot be combined with --follow, --wait" in refused.err


def test_the_command_line_of_torchrun_is_submitted_as_it_is(shoal: Any, script: Path) -> None:
    ran = shoal("submit", "--json", "--", "torchrun", "--standalone", "--nproc-per-node", "2", "train.py", "--follow")
    job = ran.json()
    assert job["spec"]["script"]["args"] == ["--follow"]
    assert job["spec"]["elasticity"]["max_workers"] == 2
    assert "ignored, because Shoal connects the processes: --standalone" in ran.err
    more = shoal("submit", "--json", "--workers", "4", "--", "torchrun", "--nproc-per-node", "2", "train.py").json()
    assert more["spec"]["elasticity"]["max_workers"] == 4, "--workers decides"


def test_a_script_of_ray_train_is_recognised_and_says_its_workers_itself(shoal: Any, script: Path) -> None:
    script.write_text(
        "from ray.train import FailureConfig, RunConfig, ScalingConfig\n"
        "from ray.train.torch import TorchTrainer\n"
        "scaling = ScalingConfig(num_workers=4, use_gpu=True)\n"
        "run = RunConfig(failure_config=FailureConfig(max_failures=3))\n"
        "TorchTrainer(print, scaling_config=scaling, run_config=run).fit()\n"
    )
    ran = shoal("submit", "train.py", "--json")
    spec = ran.json()["spec"]
    assert spec["script"]["launcher"] == "ray_train"
    assert (spec["elasticity"]["min_workers"], spec["elasticity"]["max_workers"]) == (4, 4)
    assert (spec["worker"]["gpus"], spec["retry"]["max_failures"]) == (1, 3)
    said = "--launcher ray_train, with --workers 4 --gpus 1 --set retry.max_failures 3 as it says"
    assert f"train.py has a TorchTrainer of Ray Train: {said}" in ran.err

    ran = shoal("submit", "train.py", "--workers", "2:8", "--gpus", "0", "--set", "retry.max_failures=1", "--json")
    spec = ran.json()["spec"]
    assert (spec["elasticity"]["min_workers"], spec["elasticity"]["max_workers"]) == (2, 8)
    assert (spec["worker"]["gpus"], spec["retry"]["max_failures"]) == (0, 1)
    assert "--workers has precedence over ScalingConfig(num_workers=...)" in ran.err

    other = shoal("submit", "train.py", "--launcher", "torchrun", "--json").json()["spec"]
    assert (other["script"]["launcher"], other["elasticity"]["max_workers"]) == ("torchrun", 1)


def test_the_options_of_a_submission_also_change_a_spec(shoal: Any, spec_file: Path) -> None:
    job = shoal("submit", str(spec_file), "--workers", "3", "--cpus", "0.5", "--json").json()
    assert (job["spec"]["elasticity"]["min_workers"], job["spec"]["worker"]["cpus"]) == (3, 0.5)
    refused = shoal("submit", str(spec_file), "--grace", "3")
    assert refused.code == 2 and "has no script" in refused.err


def test_a_script_of_a_spec_takes_the_options_of_scripts(shoal: Any, script: Path) -> None:
    Path("job.yaml").write_text("script: {file: train.py}\ncode: {working_dir: .}\n")
    job = shoal("submit", "job.yaml", "--launcher", "accelerate", "--grace", "3", "--json").json()
    assert (job["spec"]["script"]["launcher"], job["spec"]["script"]["grace_s"]) == ("accelerate", 3.0)
    refused = shoal("submit", "job.yaml", "--", "--lr", "1")
    assert refused.code == 2 and "script.args" in refused.err


def test_a_script_goes_on_from_the_files_of_another_one(shoal: Any, script: Path) -> None:
    first = shoal("submit", "train.py", "--json").json()["id"]
    job = shoal("submit", "train.py", "--from", first, "--json").json()
    assert job["spec"]["continue_from"]["job"] == first
    assert f"the files of job {first}" in " ".join(shoal("show", job["id"]).out.split())
    refused = shoal("submit", "train.py", "--from", f"{first}@3")
    assert refused.code == 2 and "a script decides itself which of its files it loads" in refused.err


def test_an_option_of_the_script_before_the_dashes_is_answered_with_where_it_goes(shoal: Any, script: Path) -> None:
    ran = shoal("submit", "train.py", "--lr", "3e-4")
    assert ran.code == 2
    assert "No such option: --lr" in ran.err and "after --: shoal submit train.py -- --lr" in " ".join(ran.err.split())
    assert "after --" not in shoal("submit", "job.yaml", "--lr", "3e-4").err


@pytest.mark.parametrize("word", ["run", "train", "launch"])
def test_the_words_that_people_try_first_name_the_command(shoal: Any, word: str) -> None:
    for arguments in ((), ("train.py", "--lr", "1"), ("--help",)):
        ran = shoal(word, *arguments)
        assert ran.code == 2
        assert f"no command {word!r}" in ran.err and "shoal submit train.py --workers 2" in ran.err
    assert f"shoal {word} " not in shoal("--help").out


def test_submit_follow_shows_events_as_text_and_ends_with_the_job(shoal: Any, service: Any, spec_file: Path) -> None:
    supervisor = _supervise(service, EndReason.FINISHED)
    ran = shoal("submit", str(spec_file), "--follow")
    supervisor.join()
    assert ran.code == 0
    assert "generation 1: 4 workers" in ran.out
    assert "SUCCEEDED" in ran.out


def test_submit_follow_json_is_events_and_then_the_job(shoal: Any, service: Any, spec_file: Path) -> None:
    supervisor = _supervise(service, EndReason.CANCELLED)
    ran = shoal("submit", str(spec_file), "--follow", "--json")
    supervisor.join()
    *events, job = ran.json_lines()
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert job["status"]["state"] in ("CANCELLED", "FAILED")
    assert ran.code == 1


def test_submit_wait_returns_the_ended_job(shoal: Any, service: Any, spec_file: Path) -> None:
    supervisor = _supervise(service, EndReason.FINISHED)
    ran = shoal("submit", str(spec_file), "--wait", "--json")
    supervisor.join()
    assert ran.code == 0
    assert ran.json()["status"]["state"] == "SUCCEEDED"


def test_watching_a_failed_job_ends_with_1_and_shows_its_message(shoal: Any, service: Any) -> None:
    job = service.add_job(retry={"max_failures": 0})
    service.train(job)
    service.finish(job, EndReason.USER_ERROR, "ValueError: your code")
    ran = shoal("watch", job.id)
    assert ran.code == 1
    assert "your code" in ran.out


def test_following_reports_every_tick_and_misses_no_event(service: Any) -> None:
    job = service.add_job()
    service.train(job)
    service.finish(job)
    lines: list[str] = []
    steps: list[int] = []
    screen = PlainScreen(lambda text, style: lines.append(text))
    with Client(service.url) as client:
        ended = follow_job(client, job.id, screen, on_tick=lambda view: steps.append(view.status.step))
    assert ended.status.state is JobState.SUCCEEDED
    assert len(lines) == len(service.store.reading(histories.read_events)(job.id))
    assert steps


def test_an_unreachable_server_ends_with_3_and_a_hint_how_to_start_one(offline: Any, spec_file: Path) -> None:
    ran = offline("submit", str(spec_file), "--json")
    assert ran.code == 3
    assert json.loads(ran.out)["error"]["exit_code"] == 3
    assert "shoal serve" in ran.err


def test_a_malformed_address_is_a_usage_error(offline: Any) -> None:
    assert offline("jobs", "--url", "localhost").code == 2


def _supervise(service: Any, reason: EndReason) -> threading.Thread:
    """Waits for the next job to be created, and writes the reports of its supervisor up to its end."""
    created = threading.Event()
    job_ids: list[str] = []

    def on_commit(job_id: str) -> None:
        job_ids.append(job_id)
        created.set()

    def play() -> None:
        with service.store.subscribe(on_commit):
            assert created.wait(60)
        job = service.store.get_job(job_ids[0])
        service.begin(job)
        event = GenerationFormed(
            generation=1,
            workers=4,
            start_step=0,
            steps_lost=0,
            form_s=0.1,
            build_s=0.1,
            restore_s=0.1,
            num_parameters=1000,
            layout="fsdp4",
        )
        service.report(job, RUNNING, events=(PendingEvent.of(event, 1.7e9),))
        service.finish(job, reason)

    thread = threading.Thread(target=play)
    thread.start()
    return thread


def test_a_job_like_another_has_its_spec_and_its_code_with_a_change(shoal: Any, service: Any, script: Path) -> None:
    first = shoal(
        "submit", "train.py", "--workers", "2", "--set", "finish_by=4e9", "--json", "--", "--lr", "3e-4"
    ).json()
    ran = shoal("submit", "--like", first["id"], "--set", "script.args=[--lr, '1.5e-4']", "--name", "half", "--json")
    spec = ran.json()["spec"]
    assert spec["script"]["args"] == ["--lr", "1.5e-4"] and ran.json()["name"] == "half"
    assert spec["code"] == first["spec"]["code"] and spec["elasticity"] == first["spec"]["elasticity"]
    assert spec["finish_by"] is None, "a deadline is that of the first job"
    refused = shoal("submit", "train.py", "--like", first["id"])
    assert refused.code == 2 and "was given two of them" in refused.err
    assert shoal("submit", "--like", "no-such-job").code == 4
