"""Commands that read jobs and change them, against a real server."""

import itertools
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from kit.views import incident_view
from kit.worlds.written_service import AT
from shoal_api.cli.commands.artifacts import find_checkpoint
from shoal_api.cli.session import Session
from shoal_service.core.stacks import cluster
from shoal_service.reports import PendingLog
from shoal_service.views import JobStatus
from shoal_workers.contract.job import EndReason, IncidentCause, JobState
from shoal_workers.contract.messages import Frame, LogStream, Phase, WorkerStack

FRAME = Frame(function="__getitem__", file="shapes.py", line=41)
STACKS = cluster(
    [
        (3, WorkerStack(worker_id="w/3", frames=(FRAME,), phase=Phase.FORWARD, step=40)),
        (0, WorkerStack(worker_id="w/0", phase=Phase.IDLE)),
        (1, WorkerStack(worker_id="w/1", phase=Phase.IDLE)),
    ],
    at=5.0,
    generation=1,
    reason="the group stands still",
)
LISTS = ("events", "workers", "incidents", "checkpoints", "logs")


def test_an_empty_service_lists_no_jobs_and_names_the_command_to_submit_one(shoal: Any) -> None:
    assert shoal("jobs", "--json").json() == []
    assert "shoal submit" in shoal("jobs").out


def test_jobs_are_listed_newest_first_and_by_state(shoal: Any, service: Any) -> None:
    first, second = service.add_job(name="first"), service.add_job(name="second")
    service.begin(first)
    assert [job["id"] for job in shoal("jobs", "--json").json()] == [second.id, first.id]
    assert [job["id"] for job in shoal("jobs", "--json", "--state", "queued").json()] == [second.id]
    text = shoal("jobs").out
    assert "second" in text
    assert "QUEUED" in text


def test_jobs_are_found_by_labels_and_words_and_shown_with_annotations(shoal: Any, service: Any) -> None:
    cod = service.add_job(name="cod", labels={"lr": "3e-4"}, annotations={"why": "Is 3e-4 too much?\nSee the thread."})
    eel = service.add_job(name="eel", labels={"lr": "1e-4"})

    def listed(*arguments: str) -> list[str]:
        return [job["id"] for job in shoal("jobs", "--json", *arguments).json()]

    assert listed("--label", "lr=3e-4") == [cod.id]
    assert listed("--label", "lr", "--label", "lr!=3e-4") == [eel.id]
    assert listed("--label", "!lr") == []
    assert listed("--search", "EEL lr=1e") == [eel.id]
    assert listed("--search", "thread") == [], "annotations are not searched"
    refused = shoal("jobs", "--label", "=3")
    assert (refused.code, "NAME!=VALUE" in refused.err) == (2, True)
    text = shoal("show", cod.id).out
    assert "lr=3e-4" in text and "why: Is 3e-4 too much?" in text and "See the thread." in text


def test_an_unknown_state_is_a_usage_error_that_lists_the_states(shoal: Any) -> None:
    ran = shoal("jobs", "--state", "BUSY")
    assert ran.code == 2
    assert "RUNNING" in ran.err
    assert ran.out == ""


def test_show_prints_the_job_in_both_forms(shoal: Any, service: Any) -> None:
    job = service.add_job()
    service.train(job)
    assert shoal("show", job.id, "--json").json()["status"]["step"] == 10
    text = shoal("show", job.id).out
    assert "10 of 100" in text
    assert "■■■■ 4/4" in text
    assert "▁" in text


def test_show_prints_the_metrics_of_the_task(shoal: Any, service: Any) -> None:
    job = service.add_job()
    service.begin(job)
    status = JobStatus(state=JobState.RUNNING, metrics={"acc": 0.25, "f1": 0.5}, val_metrics={"acc": 0.125})
    service.report(job, status)
    text = shoal("show", job.id).out
    assert "acc 0.25, f1 0.5" in text
    assert "validation: acc 0.125" in text


@pytest.mark.parametrize("name", LISTS)
def test_every_list_comes_as_one_json_document_and_as_text(shoal: Any, service: Any, name: str) -> None:
    job = service.add_job()
    service.train(job)
    document = shoal(name, job.id, "--json")
    assert document.code == 0
    assert len(document.json()) >= 1
    assert document.err == ""
    text = shoal(name, job.id)
    assert text.code == 0
    assert text.out.strip()


@pytest.mark.parametrize("name", LISTS)
def test_every_list_of_a_queued_job_is_printed(shoal: Any, service: Any, name: str) -> None:
    job = service.add_job()
    assert shoal(name, job.id).code == 0
    assert isinstance(shoal(name, job.id, "--json").json(), list)


def test_logs_can_be_of_one_rank_and_of_the_last_lines(shoal: Any, service: Any) -> None:
    job = service.add_job()
    service.train(job)
    assert "rank 0" not in shoal("logs", job.id, "--rank", "1").out
    assert len(shoal("logs", job.id, "--tail", "1", "--json").json()) == 1
    assert shoal("logs", job.id, "--tail", "0", "--json").json() == [], "as tail=0 of the REST API: only new lines"
    assert [line["text"] for line in shoal("logs", job.id, "--rank", "1", "--tail", "1", "--json").json()] == [
        "hello from rank 1"
    ]


def test_the_log_marks_where_an_attempt_begins(shoal: Any, service: Any) -> None:
    job = service.add_job()
    service.train(job)
    service.finish(job, EndReason.PREEMPTED)
    service.begin(job)
    worker_id = f"shoal/{job.id}/2/worker-0"
    line = PendingLog(at=AT, rank=0, worker_id=worker_id, stream=LogStream.STDOUT, text="again")
    service.report(job, _running(), logs=(line,))
    lines = shoal("logs", job.id).out.splitlines()
    heads = {number: line for number, line in enumerate(lines) if line.startswith("---")}
    assert list(heads.values()) == ["--- attempt 1 ---", "--- attempt 2 ---"]
    for number in heads:
        assert "[job] job QUEUED -> STARTING" in lines[number + 1]
    assert shoal("logs", job.id, "--tail", "2").out.splitlines()[0] == "--- attempt 2 ---", "the tail says which it is"
    assert "---" not in shoal("logs", job.id, "--json").out


def test_the_log_of_a_job_that_prints_nothing_tells_what_happens_to_it(shoal: Any, service: Any) -> None:
    job = service.add_job()
    ran = shoal("logs", job.id)
    assert (ran.out, ran.err.strip()) == ("", "the task has printed nothing so far; the job is QUEUED")
    service.begin(job)
    service.report(job, _running())
    service.finish(job)
    ran = shoal("logs", job.id)
    head, first, *_, last = ran.out.splitlines()
    assert head == "--- attempt 1 ---"
    assert re.match(r"2023-11-\d\d \d\d:\d\d:\d\d \[job\] job QUEUED -> STARTING", first), (
        "the time is before each line"
    )
    assert last.endswith(" [job] job RUNNING -> SUCCEEDED (finished): done")
    assert ran.err.strip() == "the task has printed nothing"


def test_following_events_prints_one_json_line_each_until_the_job_ends(shoal: Any, service: Any) -> None:
    job = service.add_job()
    service.begin(job)
    writer = threading.Timer(0.3, lambda: (service.report(job, _running()), service.finish(job)))
    writer.start()
    ran = shoal("events", job.id, "-f", "--json")
    writer.join()
    lines = ran.json_lines()
    assert [line["seq"] for line in lines] == list(range(1, len(lines) + 1))
    assert lines[-1]["data"]["to"] == "SUCCEEDED"


def test_following_logs_ends_with_the_job(shoal: Any, service: Any) -> None:
    job = service.add_job()
    service.train(job)
    service.finish(job)
    lines = shoal("logs", job.id, "-f", "--json").json_lines()
    assert [line["text"] for line in lines if line["stream"] == "stdout"] == ["hello from rank 0", "hello from rank 1"]
    assert lines[-1]["text"].startswith("job RUNNING -> SUCCEEDED")


def test_the_cluster_is_shown_in_both_forms(shoal: Any) -> None:
    assert shoal("cluster", "--json").json()["cpus_total"] == 4
    assert "CPUs 1 of 4 free" in shoal("cluster").out


def test_scale_changes_only_what_is_given(shoal: Any, service: Any) -> None:
    job = service.add_job()
    changed = shoal("scale", job.id, "--max", "3", "--standby", "1", "--json").json()["spec"]["elasticity"]
    assert (changed["min_workers"], changed["max_workers"], changed["standby"]) == (2, 3, 1)


def test_scale_prints_the_workers_and_the_layout_that_will_be(shoal: Any, service: Any) -> None:
    job = service.add_job()
    assert "2 to 3 workers when it starts" in shoal("scale", job.id, "--max", "3").out
    service.train(job)
    ran = shoal("scale", job.id, "--max", "2")
    assert "4 -> 2 at the next step boundary; no step is lost (min 2, max 2, standby 0)" in ran.out
    assert "fsdp4 -> dp2 at the next step boundary" in ran.out


def test_relayout_prints_the_layout_that_will_be_and_why(shoal: Any, service: Any) -> None:
    job = service.add_job()
    service.train(job)
    ran = shoal("relayout", job.id, "--tp", "2")
    assert "workers  4, as before" in ran.out
    assert "layout   fsdp4 -> fsdp2 x tp2 at the next step boundary" in ran.out
    assert "as_requested" in ran.out


def test_scale_without_a_number_is_a_usage_error(shoal: Any, service: Any) -> None:
    assert shoal("scale", service.add_job().id).code == 2


def test_pause_resume_and_cancel_print_the_state_afterwards(shoal: Any, service: Any) -> None:
    job = service.add_job()
    assert shoal("pause", job.id, "--json").json()["status"]["state"] == "PAUSED"
    assert shoal("resume", job.id, "--json").json()["status"]["state"] == "QUEUED"
    assert "CANCELLED" in shoal("cancel", job.id).out


def test_a_request_that_the_state_does_not_allow_is_a_usage_error(shoal: Any, service: Any) -> None:
    job = service.add_job()
    shoal("cancel", job.id)
    ran = shoal("resume", job.id, "--json")
    assert ran.code == 2
    assert ran.json()["error"]["exit_code"] == 2


def _running() -> Any:
    from shoal_service.views import JobStatus
    from shoal_workers.contract.job import JobState

    return JobStatus(state=JobState.RUNNING, attempt=1, workers=4, desired_workers=4, total_steps=100)


def test_a_directory_of_its_name_does_not_shadow_a_job(
    service: Any, session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("byte-lm").mkdir()
    Path("other").mkdir()
    job = service.add_job()
    service.train(job)
    assert find_checkpoint(session, "byte-lm", None) == "/tmp/x/step-10"
    assert find_checkpoint(session, "./byte-lm", None) == "./byte-lm"
    assert find_checkpoint(session, "other", None) == "other"  # no job has this name


def test_top_shows_the_jobs_that_go_on(shoal: Any, service: Any) -> None:
    ended, training = service.add_job(), service.add_job()
    service.train(ended)
    service.finish(ended)
    service.train(training)
    document = shoal("top", "--json").json()
    assert [job["id"] for job in document["jobs"]] == [training.id]
    assert document["jobs"][0]["tokens_per_s"] == 1234.0
    assert document["cluster"]["connected"] is True
    ran = shoal("top")  # not a terminal: one view
    assert training.id in ran.out and ended.id not in ran.out and "10/100" in ran.out


def test_stacks_of_all_ranks_are_shown_and_an_incident_shows_those_that_it_keeps(shoal: Any, service: Any) -> None:
    job = service.add_job()
    service.begin(job)
    ran = shoal("stacks", job.id)
    assert ran.code != 0 and "drives no workers of it" in ran.err
    service.cluster.taken[job.id] = STACKS
    text = shoal("stacks", job.id).out
    assert text.splitlines()[0] == STACKS.summary
    assert "shapes.py:41  __getitem__" in text
    only = shoal("stacks", job.id, "--rank", "3", "--json").json()
    assert [one["ranks"] for one in only["clusters"]] == [[3]]
    hung = incident_view(
        cause=IncidentCause.HUNG, witness="progress", ranks=(3,), worker_ids=("w/3",), at=5.0, stacks=STACKS
    )
    service.report(job, _running(), incidents=(hung,))
    service.report(job, _running(), incidents=(hung.model_copy(update={"stacks": None, "message": "closed"}),))
    assert STACKS.summary in shoal("incidents", job.id, "1").out  # a restarted supervisor does not know them


def test_series_are_written_to_standard_output_or_to_a_file(shoal: Any, service: Any, tmp_path: Path) -> None:
    job = service.add_job()
    service.train(job)
    head, *rows = shoal("series", job.id).out.splitlines()
    assert head.startswith("step,at,loss,") and len(rows) == 10
    file = tmp_path / "a.csv"
    shoal("series", job.id, "-o", str(file))
    assert file.read_text().splitlines() == [head, *rows]
    shoal("series", job.id, "-o", str(tmp_path / "a.parquet"))
    assert (tmp_path / "a.parquet").read_bytes().startswith(b"PAR1")
    assert not list(tmp_path.glob("*.part"))
    assert [point["step"] for point in shoal("series", job.id, "--json").json()] == list(range(1, 11))


@pytest.mark.parametrize("options", [("--format", "parquet"), ("--json", "-o", "x.csv"), ("-o", "/none/x.csv")])
def test_a_series_that_cannot_be_written_is_refused_with_the_way_out(
    shoal: Any, service: Any, options: tuple[str, ...]
) -> None:
    job = service.add_job()
    ran = shoal("series", job.id, *options)
    assert ran.code != 0 and "error:" in ran.err


def test_a_checkpoint_is_pinned_by_its_step_and_unpinned(shoal: Any, service: Any) -> None:
    job = service.add_job()
    service.train(job)
    assert shoal("pin", job.id, "10", "--json").json()["pinned"] is True
    assert "committed, pinned" in shoal("checkpoints", job.id).out
    assert shoal("pin", job.id, "10", "--undo", "--json").json()["pinned"] is False
    wrong = shoal("pin", job.id, "11")
    assert wrong.code == 4 and "no committed checkpoint of step 11" in wrong.err
    assert shoal("pin", job.id, "10", "--undo").code == 4


def test_webhooks_are_listed(shoal: Any, service: Any) -> None:
    assert "docs/webhooks.md" in shoal("webhooks").out
    hook = {"url": "https://example.org/hook", "secret": "file:a"}
    job = service.add_job(webhooks=[hook])
    [shown] = shoal("webhooks", job.id, "--json").json()
    assert (shown["hook"], shown["receiver"]) == ("job/0", "https://example.org")
    assert "nothing sent yet" in shoal("webhooks", job.id).out


def test_the_spec_of_a_job_is_printed_as_yaml_and_can_be_submitted(shoal: Any, service: Any, tmp_path: Path) -> None:
    job = service.add_job(
        name="source", user="ada", optimizer={"lr": 1e-7}, labels={"lr": "1e-7", "at": "12:30", "on": "yes"}
    )
    text = shoal("show", job.id, "--spec").out
    assert "lr: 1.0e-07" in text and "schedule" not in text and "checkpoint" not in text, "a default is not printed"
    (tmp_path / "again.yaml").write_text(text)
    again = shoal("submit", str(tmp_path / "again.yaml"), "--json").json()
    assert again["spec"] == shoal("show", job.id, "--json").json()["spec"]


def test_a_job_is_renamed_also_after_its_end(shoal: Any, service: Any) -> None:
    job = service.add_job(name="before")
    service.train(job)
    service.finish(job)
    assert shoal("rename", job.id, "after").out.split()[:2] == [job.id, "after"]
    assert [one["name"] for one in shoal("jobs", "--search", "after", "--json").json()] == ["after"]
    assert "to version 2: name" in shoal("events", job.id).out
    assert shoal("rename", "after", "not a name").code == 2


def test_without_a_match_the_number_of_jobs_is_said(shoal: Any, service: Any) -> None:
    for option in (("--where", "lr > 5"), ("--state", "FAILED")):
        assert shoal("jobs", *option).out.strip() == "no jobs; `shoal submit SPEC` creates one", option
    service.add_job(name="only")
    sentence = "no job matches, of 1 job; `shoal jobs` lists it"
    for option in (
        ("--where", "lr > 5"),
        ("--state", "FAILED"),
        ("--search", "other"),
        ("--where", "lr > 5", "--columns", "lr"),
    ):
        assert shoal("jobs", *option).out.strip() == sentence, option
    assert shoal("jobs", "--where", "lr > 5", "--json").json() == []
    service.add_job(name="second")
    assert shoal("jobs", "--search", "other").out.strip() == "no job matches, of 2 jobs; `shoal jobs` lists them"


def test_without_a_match_the_nearest_names_of_metrics_are_said(shoal: Any, service: Any) -> None:
    job = service.add_job(name="only", labels={"team": "speech"})
    service.begin(job)
    service.report(job, JobStatus(state=JobState.RUNNING, metrics={"accuracy": 0.25, "f1": 0.5}))
    text = shoal("jobs", "--where", "metric.acuracy > 0.1 and metric.f1 > 0.1").out
    assert "no job has metric.acuracy; near it is metric.accuracy" in " ".join(text.split())
    assert "f1" not in text, "a job has it"
    text = " ".join(shoal("jobs", "--where", "metric.zzz > 1 or label.taem == 'speech'").out.split())
    assert "no job has metric.zzz; metrics are metric.accuracy, metric.f1" in text
    assert "no job has label.taem; near it is label.team" in text


def test_the_page_of_a_job_has_groups(shoal: Any, service: Any) -> None:
    job = service.add_job(name="grouped")
    service.train(job)
    lines = ["", *(line.strip() for line in shoal("show", job.id).out.splitlines())]
    heads = [line.split()[0] for before, line in itertools.pairwise(lines) if line and not before]
    assert heads == ["id", "state", "step", "workers"]
