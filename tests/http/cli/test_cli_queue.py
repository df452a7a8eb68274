"""The queue, priorities and quotas on the command line, against a real server."""

import csv
import time
from pathlib import Path
from typing import Any

import pytest

from kit.store_calls import set_queue
from shoal_service.core.goodput import Category, Goodput
from shoal_service.core.scheduling.explaining import GrowthLimit, HeldBack
from shoal_service.core.scheduling.market import Wait
from shoal_service.store import queueing
from shoal_service.views import JobStatus
from shoal_workers.contract import JobState


@pytest.fixture
def queued(service: Any) -> Any:
    """A job that trains, and one that waits for its workers for about another minute."""
    holder, waiting = service.add_job(name="first"), service.add_job(name="second", project="vision", priority=5)
    service.train(holder)
    now = time.time()
    wait = Wait(waiting.id, "Needs 2 workers, 1 is free.", 1, (holder.id,), now + 60)
    set_queue(service.store, [wait], epoch=service.epoch, now=now)
    return holder, waiting


def test_the_queue_says_why_a_job_waits_who_holds_it_up_and_when_it_starts(shoal: Any, queued: Any) -> None:
    holder, waiting = queued
    text = " ".join(shoal("queue").out.split())
    assert waiting.id in text and "vision" in text and "Needs 2 workers, 1 is free. Waiting for first." in text
    assert holder.id not in text, "people know it by its name"
    document = shoal("queue", "--json").json()
    assert [one["place"]["holders"] for one in document["items"]] == [[holder.id]]
    assert {one["name"]: one["workers"] for one in document["projects"]} == {"default": 4, "vision": 0}
    assert shoal("queue", "--project", "default", "--json").json()["items"] == []


def test_an_empty_queue_says_so(shoal: Any) -> None:
    assert "no job waits" in shoal("queue").out


def test_show_and_jobs_tell_the_place_in_the_queue(shoal: Any, queued: Any) -> None:
    _, waiting = queued
    shown = " ".join(shoal("show", "second").out.split())
    assert "vision, user default, priority 5" in shown and "Needs 2 workers, 1 is free." in shown
    assert "waiting since 2023-11-14" in shown
    assert "queue position 1, waiting for first; expected start: in about 60 s" in shown
    assert "QUEUED #1" in " ".join(shoal("jobs").out.split())
    assert [job["id"] for job in shoal("jobs", "--project", "vision", "--json").json()] == [waiting.id]


def test_show_and_queue_tell_why_a_running_job_gets_no_more_workers(shoal: Any, queued: Any, service: Any) -> None:
    holder, _ = queued
    reason = "Growing to 6 workers saves 1.0 s of that."
    answer = HeldBack(holder.id, 4, 6, GrowthLimit.PAUSE_COSTS_MORE, reason)
    service.store.writing(queueing.save_growth, service.epoch)([answer], {holder.id: 1}, now=time.time())
    assert f"stays at 4 of 6: {reason}" in " ".join(shoal("show", "first").out.split())
    assert "4 of 6" in " ".join(shoal("queue").out.split())
    [shown] = shoal("queue", "--json").json()["held_back"]
    assert (shown["job_id"], shown["answer"]["reason"]) == (holder.id, reason)
    assert shoal("queue", "--project", "vision", "--json").json()["held_back"] == []


def test_the_priority_of_a_job_is_changed(shoal: Any, service: Any) -> None:
    job = service.add_job(name="calm")
    assert "priority 7" in shoal("priority", "calm", "7").out
    assert service.store.get_job(job.id).spec.priority == 7
    assert shoal("priority", "calm", "--json", "--", "-5").json()["spec"]["priority"] == -5
    assert shoal("priority", "calm", "2000").code == 2


def test_submit_takes_priority_and_project(shoal: Any, tmp_path: Path) -> None:
    spec = tmp_path / "job.yaml"
    spec.write_text("stop: {steps: 1}\ndata: {corpus: python-stdlib}\npriority: 1\n")
    job = shoal("submit", str(spec), "--priority", "50", "--project", "vision", "--json").json()
    assert (job["spec"]["priority"], job["spec"]["project"]) == (50, "vision")
    assert shoal("submit", str(spec), "--json").json()["spec"]["priority"] == 1


class TestQuota:
    def test_what_is_not_given_stays(self, shoal: Any, service: Any) -> None:
        shoal("quota", "set", "vision", "--weight", "2", "--limit", "8", "--max-queued", "3")
        view = shoal("quota", "set", "vision", "--guaranteed", "4", "--limit", "none", "--json").json()
        assert (view["weight"], view["guaranteed"], view["limit"], view["max_queued"]) == (2.0, 4, None, 3)
        assert "vision" in shoal("quota", "list").out

    def test_a_project_is_put_under_another_one_and_deleted(self, shoal: Any, service: Any) -> None:
        ran = shoal("quota", "set", "vision", "--parent", "lab")
        assert ran.code != 0 and "shoal quota set lab" in ran.err
        shoal("quota", "set", "lab")
        assert shoal("quota", "set", "vision", "--parent", "lab", "--json").json()["parent"] == "lab"
        assert shoal("quota", "set", "vision", "--parent", "none", "--json").json()["parent"] is None
        assert "the quotas of vision are deleted" in shoal("quota", "delete", "vision").out
        assert shoal("quota", "delete", "vision").code == 4
        assert list(service.store.reading(queueing.defined_projects)()) == ["lab"]

    def test_impossible_quotas_are_refused_with_the_way_out(self, shoal: Any) -> None:
        assert "--limit 8, or --limit none" in shoal("quota", "set", "vision", "--limit", "many").err
        assert "Set limit to at least 9" in shoal("quota", "set", "vision", "--guaranteed", "9", "--limit", "8").err


def test_the_use_of_projects_is_shown_by_week_and_written_as_csv(shoal: Any, service: Any, tmp_path: Path) -> None:
    job = service.add_job(name="first", project="vision")
    service.begin(job)
    now = time.time()
    seconds = {Category.PRODUCTIVE: 5400.0, Category.QUEUED: 36_000.0, Category.STARTING: 1800.0}
    goodput = Goodput(seconds=seconds, total=43_200.0, at=now)
    service.report(job, JobStatus(state=JobState.RUNNING, goodput=goodput))
    [row] = shoal("usage", "--by", "month", "--periods", "2000", "--json").json()[-1:]
    assert row["project"] == "vision" and row["num_jobs"] == 1
    weeks = shoal("usage", "--by", "week", "--periods", "1", "--project", "vision").out.splitlines()
    assert weeks[0].split() == ["week", "of", "project", "worker", "hours", "productive", "jobs"]
    assert "vision" in weeks[1] and weeks[1].split()[-1] == "1"
    path = tmp_path / "usage.csv"
    assert shoal("usage", "--by", "month", "--periods", "1200", "--csv", str(path)).code == 0
    head, *rows = csv.reader(path.read_text().splitlines())
    assert head == ["project", "month", "worker_hours", "productive_hours", "jobs"]
    assert sum(float(row[2]) for row in rows) == pytest.approx(2.0, abs=0.01), "without the ten hours in the queue"
    assert sum(float(row[3]) for row in rows) == pytest.approx(1.5, abs=0.01)
    assert shoal("usage", "--csv", "-", "--project", "none", "--by", "month").out.splitlines() == [",".join(head)]
    assert "no job of project none has had workers" in shoal("usage", "--project", "none").out
