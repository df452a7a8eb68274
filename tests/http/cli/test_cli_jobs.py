"""Commands that read jobs and change them, against a real server."""

from __future__ import annotations

import threading
from typing import Any

import pytest

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


def test_a_job_is_found_by_id_by_its_beginning_and_by_name(shoal: Any, service: Any) -> None:
    job = service.add_job(name="alone")
    for reference in (job.id, job.id[:-2], "alone"):
        assert shoal("show", reference, "--json").json()["id"] == job.id


def test_a_name_that_two_jobs_have_is_refused_with_both_ids(shoal: Any, service: Any) -> None:
    jobs = [service.add_job(name="same-name"), service.add_job(name="same-name")]
    ran = shoal("show", "same-name")
    assert ran.code == 2
    assert all(job.id in ran.err for job in jobs)


def test_an_unknown_job_ends_with_4_and_names_the_nearest(shoal: Any, service: Any) -> None:
    service.add_job(name="byte-lm")
    ran = shoal("show", "bite-lm")
    assert ran.code == 4
    assert "byte-lm" in ran.err
    assert "Traceback" not in ran.err


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
    assert [line["rank"] for line in shoal("logs", job.id, "--tail", "1", "--json").json()] == [1]


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
    assert len(shoal("logs", job.id, "-f", "--json").json_lines()) == 2


def test_the_cluster_is_shown_in_both_forms(shoal: Any) -> None:
    assert shoal("cluster", "--json").json()["cpus_total"] == 4
    assert "CPUs 1 of 4 free" in shoal("cluster").out


def test_scale_changes_only_what_is_given(shoal: Any, service: Any) -> None:
    job = service.add_job()
    changed = shoal("scale", job.id, "--max", "3", "--standby", "1", "--json").json()["spec"]["elasticity"]
    assert (changed["min_workers"], changed["max_workers"], changed["standby"]) == (2, 3, 1)


def test_scale_without_a_number_is_a_usage_error(shoal: Any, service: Any) -> None:
    assert shoal("scale", service.add_job().id).code == 2


def test_scaling_beyond_the_micro_batches_is_refused_with_the_numbers(shoal: Any, service: Any) -> None:
    ran = shoal("scale", service.add_job().id, "--max", "11")
    assert ran.code == 2
    assert "Lower max_workers to 10" in ran.err


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
