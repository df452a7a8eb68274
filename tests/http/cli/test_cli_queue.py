"""The queue, priorities and quotas on the command line, against a real server."""

import time
from pathlib import Path
from typing import Any

import pytest

from kit.store_calls import set_queue
from shoal_service.core.scheduling.explaining import GrowthLimit, HeldBack
from shoal_service.core.scheduling.market import Wait
from shoal_service.store import queueing


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
    assert waiting.id in text and "vision" in text
    document = shoal("queue", "--json").json()
    assert [one["place"]["holders"] for one in document["items"]] == [[holder.id]]
    assert {one["name"]: one["workers"] for one in document["projects"]} == {"default": 4, "vision": 0}
    assert shoal("queue", "--project", "default", "--json").json()["items"] == []


def test_an_empty_queue_says_so(shoal: Any) -> None:
    assert "no job waits" in shoal("queue").out


def test_show_and_jobs_tell_the_place_in_the_queue(shoal: Any, queued: Any) -> None:
    holder, waiting = queued
    shown = " ".join(shoal("show", "second").out.split())
    assert "vision, user default, priority 5" in shown and "Needs 2 workers, 1 is free." in shown
    assert f"position 1; {holder.id} holds what it waits for; expected start:" in shown
    assert "QUEUED #1" in " ".join(shoal("jobs").out.split())
    assert [job["id"] for job in shoal("jobs", "--project", "vision", "--json").json()] == [waiting.id]


def test_show_and_queue_tell_why_a_running_job_gets_no_more_workers(shoal: Any, queued: Any, service: Any) -> None:
    holder, _ = queued
    reason = "With 6 workers it would save 1.0 s of that."
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
        assert "no quotas of its own" in shoal("quota", "delete", "vision").out
        assert shoal("quota", "delete", "vision").code == 4
        assert list(service.store.reading(queueing.defined_projects)()) == ["lab"]

    def test_impossible_quotas_are_refused_with_the_way_out(self, shoal: Any) -> None:
        assert "--limit 8, or --limit none" in shoal("quota", "set", "vision", "--limit", "many").err
        assert "Set limit to at least 9" in shoal("quota", "set", "vision", "--guaranteed", "9", "--limit", "8").err
