"""`submit --from`, `extend` and `retry` against a real server and store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    assert ran.code != 0 and "100 are done. Give more than 100" in ran.err
    assert "QUEUED  step 100 of 150" in shoal("extend", done.id, "--steps", "150").out
    assert service.store.get_job(done.id).spec.stop.steps == 150
