"""On a real cluster: a running job is changed and extended, goes on after its end, and as a new job."""

from __future__ import annotations

import pytest

from kit.worlds.tiny_jobs import holds
from shoal_api.client import Client
from shoal_service.views import JobPatch, SchedulePatch


@pytest.mark.matrix
def test_a_job_is_extended_while_it_trains_and_after_its_end_and_goes_on_as_another_one(submit, client: Client) -> None:
    run = submit(workers=2, stop={"steps": 6}, checkpoint={"every_steps": 5}, strikes=holds(3))
    run.wait_at("step-3-0")
    client.extend(run.id, 10)
    client.patch(run.id, JobPatch(schedule=SchedulePatch(steps=50)))
    run.wait_for_event("generation.switching", 1)
    run.release("step-3-0")
    job = run.finish()
    assert job.status.step == 10 and job.status.attempt == 1 and job.status.steps_lost == 0
    changed = [event.data for event in run.events("generation.settings")]
    assert changed[0]["step"] == 3 and "stop.steps 6 -> 10" in [text for one in changed for text in one["changes"]]

    client.extend(run.id, 14)
    job = run.finish()
    assert (job.status.state, job.status.step, job.status.attempt) == ("SUCCEEDED", 14, 2)
    run.assert_undisturbed_losses()

    other = submit(workers=1, stop={"steps": 14}, continue_from={"job": run.id, "step": 5})
    assert other.finish().status.step == 14
    assert [event.data["start_step"] for event in other.events("generation.formed")] == [5]
    mine, theirs = other.losses(), run.losses()
    assert sorted(mine) == list(range(6, 15))
    assert all(abs(mine[step] - theirs[step]) <= 1e-5 * abs(theirs[step]) for step in mine)
