"""A running job is profiled through the whole service, without a change of its losses; a killed worker ends only the
profile."""

from __future__ import annotations

import gzip
import io
import json

import pytest

from kit.worlds.tiny_jobs import holds
from shoal_api.client import Client
from shoal_service.views import ProfileState
from shoal_workers.contract.profiles import Category


@pytest.mark.matrix
def test_a_profile_of_a_running_job_is_taken_and_downloaded_and_its_losses_are_undisturbed(
    submit, client: Client
) -> None:
    run = submit(min_workers=2, steps=60, step_s=0.2, strikes=holds(4))
    run.wait_at("step-4-0")
    asked = client.request_profile(run.id, steps=3, rank=1)
    assert (asked.number, asked.state) == (1, ProfileState.REQUESTED)
    run.release("step-4-0")
    run.wait_for_event("profile.taken")
    [view] = client.profiles(run.id)
    assert view.state is ProfileState.DONE and view.reason == "" and view.note == ""
    first = view.times[0].step
    assert [one.step for one in view.times] == [first, first + 1, first + 2] and first >= 4
    assert all(one.total_s >= 0.2 and one.seconds[Category.COMPUTE] >= 0.2 for one in view.times), "it sleeps in loss"
    for file in view.files:
        out = io.BytesIO()
        client.save_profile_file(run.id, 1, file.name, out)
        assert len(out.getvalue()) == file.bytes
        document = json.loads(gzip.decompress(out.getvalue()))
        assert document["traceEvents" if file.name.startswith("trace") else "devices"]
    assert len(view.files) == 2
    job = run.finish()
    assert job.status.steps_lost == 0 and client.incidents(run.id) == ()
    run.assert_undisturbed_losses()
