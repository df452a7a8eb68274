"""`submit --from`, `extend`, `retry`, `label` and `update` against a real server and store."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal_service.control.code_archive import pack
from shoal_service.store import archives
from shoal_service.views import CheckpointView, JobStatus
from shoal_workers.contract.job import EndReason, JobState


def _ended(service: Any, reason: EndReason, *steps: int) -> Any:
    job = service.add_job(retry={"max_failures": 0})
    service.begin(job)
    views = tuple(
        CheckpointView(step=step, url=f"/c/{job.id}/s{step}", state="committed", attempt=1, generation=1)
        for step in steps
    )
    service.report(job, JobStatus(state=JobState.RUNNING, step=max(steps)), checkpoints=views)
    service.finish(job, reason)
    return job


def test_submit_from_a_job_names_it_and_its_step(shoal: Any, service: Any, spec_file: Path) -> None:
    source = _ended(service, EndReason.STORAGE_FAILED, 20, 40)
    job = shoal("submit", str(spec_file), "--from", f"{source.id}@20", "--json").json()
    assert job["spec"]["continue_from"]["step"] == 20
    assert job["spec"]["continue_from"]["url"] == f"/c/{source.id}/s20"
    assert f"job {source.id} after step 20" in " ".join(shoal("show", job["id"]).out.split())
    assert shoal("submit", str(spec_file), "--from", source.id, "--json").json()["status"]["step"] == 40


def test_submit_from_nothing_is_refused_in_words(shoal: Any, service: Any, spec_file: Path) -> None:
    source = _ended(service, EndReason.STORAGE_FAILED, 20, 40)
    assert shoal("submit", str(spec_file), "--from", "nobody").code == 4
    assert "'x' is not a step" in shoal("submit", str(spec_file), "--from", f"{source.id}@x").err
    ran = shoal("submit", str(spec_file), "--from", f"{source.id}@30")
    assert ran.code == 2 and "It has those of steps 20, 40" in ran.err


def test_an_ended_job_is_extended_and_a_failed_one_tried_again(shoal: Any, service: Any) -> None:
    failed = _ended(service, EndReason.STORAGE_FAILED, 40)
    assert shoal("retry", failed.id).out.split()[:3] == [failed.id, "byte-lm", "QUEUED"]
    ran = shoal("retry", failed.id)
    assert ran.code != 0 and "it has not failed" in ran.err
    done = _ended(service, EndReason.FINISHED, 100)
    ran = shoal("extend", done.id, "--steps", "100")
    assert ran.code != 0 and "100 done. Give more than 100" in ran.err
    assert "QUEUED  step 100 of 150" in shoal("extend", done.id, "--steps", "150").out
    assert service.store.get_job(done.id).spec.stop.steps == 150


def test_labels_and_annotations_are_set_removed_and_shown(shoal: Any, service: Any) -> None:
    job = service.add_job(labels={"team": "speech", "draft": "1"})
    shown = shoal("label", job.id, "team=vision", "draft-", "lr=3e-4=x")
    assert (shown.code, shown.out.splitlines()[1:]) == (0, ["lr=3e-4=x", "team=vision"])
    assert [one["id"] for one in shoal("jobs", "--label", "team=vision", "--json").json()] == [job.id]
    assert shoal("jobs", "--label", "draft", "--json").json() == []
    shoal("annotate", job.id, "why=Is 3e-4 too much?")
    assert "why: Is 3e-4 too much?" in shoal("show", job.id).out
    shoal("cancel", job.id)
    assert shoal("label", job.id, "team-", "lr-").out.splitlines()[1:] == ["no labels"]
    assert shoal("annotate", job.id, "--json").json()["spec"]["annotations"] == {"why": "Is 3e-4 too much?"}


def test_alerts_are_set_shown_and_taken_away_and_a_wrong_one_names_its_mistake(shoal: Any, service: Any) -> None:
    job = service.add_job()
    assert shoal("alert", job.id).out.splitlines()[1:] == ["no alerts"]
    assert shoal("alert", job.id, "loss > 10", "max(grad_norm) > 100").out.splitlines()[1:] == [
        "loss > 10: not yet",
        "max(grad_norm) > 100: not yet",
    ]
    assert "loss > 10: not yet" in shoal("show", job.id).out
    refused = shoal("alert", job.id, "los > 10")
    assert refused.code != 0 and "there is no 'los'; near it are loss" in refused.err
    assert service.store.get_job(job.id).spec.alerts == ("loss > 10", "max(grad_norm) > 100")
    assert shoal("alert", job.id, "--clear").out.splitlines()[1:] == ["no alerts"]


def test_a_label_without_a_value_and_one_given_twice_are_refused(shoal: Any, service: Any) -> None:
    job = service.add_job()
    bare = shoal("label", job.id, "team")
    assert bare.code == 2 and "shoal label JOB team=VALUE, or team- to remove it" in bare.err
    assert "'team' is given twice" in shoal("label", job.id, "team=a", "team-").err
    assert "a name has at most 63 letters" in shoal("label", job.id, "te am=a").err
    assert service.store.get_job(job.id).spec_version == 1


@pytest.fixture
def new(tmp_path: Path) -> Path:
    directory = tmp_path / "new"
    directory.mkdir()
    (directory / "mine.py").write_text("VALUE = 2\n")
    return directory


def test_update_stores_the_directory_and_names_its_version(shoal: Any, service: Any, new: Path) -> None:
    job = service.add_job(task="mine:Task", code={"archive": "a" * 64, "env": {"A": "1"}})
    service.begin(job)
    ran = shoal("update", job.name, "--code", str(new))
    archive = pack(new)
    assert ran.code == 0
    assert ran.out.splitlines() == [
        f"{job.id}  byte-lm  STARTING  code {archive.sha256[:12]}",
        f"`shoal watch {job.id}` shows when it trains, or why it does not",
    ]
    assert service.store.reading(archives.get)(archive.sha256) == archive.data
    code = service.store.get_job(job.id).spec.code
    assert (code.archive, code.env) == (archive.sha256, {"A": "1"})
    assert "spec changed to version 2: code" in shoal("events", job.id).out


def test_update_changes_the_weights_of_a_mixture_and_says_when(shoal: Any, service: Any) -> None:
    sources = [{"path": "web/*", "name": "web", "weight": 3}, {"path": "a=b", "weight": 1}]
    job = service.add_job(data={"sources": sources})
    ran = shoal("update", job.name, "--weights", "web=0.5,a=b=0.25")
    assert (ran.code, ran.out.splitlines()) == (
        0,
        [f"{job.id}  byte-lm  QUEUED  step 0", "from step 1 on: web 0.5, a=b 0.25"],
    )
    ran = shoal("update", job.name, "--weights", "web=0,a=b=1", "--at-step", "40", "--json")
    assert [one["at_step"] for one in json.loads(ran.out)["spec"]["data"]["changes"]] == [1, 40]
    assert "spec changed to version 3: weights from step 40 on" in shoal("events", job.id).out
    refused = shoal("update", job.name, "--weights", "web=1")
    assert refused.code == 2 and "the sources are 'web', 'a=b'" in refused.err
    for given, words in (
        (["--weights", "web"], "'web' is not NAME=WEIGHT"),
        (["--weights", "web=-1"], "'web=-1' is not NAME=WEIGHT"),
        (["--weights", "web=1,web=2"], "names 'web' twice"),
        (["--at-step", "4"], "--at-step needs --weights"),
        ([], "update needs --code or --weights"),
    ):
        refused = shoal("update", job.name, *given)
        assert refused.code == 2 and words in refused.err
