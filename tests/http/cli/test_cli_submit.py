"""`submit` and `watch`: overrides, invalid specs, following, exit codes."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

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
    ended = follow_job(
        lambda: Client(service.url),
        job.id,
        PlainScreen(lambda text, style: lines.append(text)),
        on_tick=lambda view: steps.append(view.status.step),
    )
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
