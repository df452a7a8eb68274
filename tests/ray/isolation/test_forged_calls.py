"""Code of a job calls the supervisor of its job as if it were the control plane."""

from __future__ import annotations

import json

from shoal_service.signing.calls import CallRefused, Refusal

from shoal_api.client import Client
from shoal_workers.contract.job import JobState


def refused(call: str, refusal: Refusal) -> list[str]:
    return ["CallRefused", str(CallRefused(call, refusal))]


def test_forged_calls_are_refused_and_recorded_and_the_job_trains_on(submit, client: Client) -> None:
    run = submit(workers=2, min_workers=2, task="forger:Forger")
    job = run.finish()
    assert job.status.state is JobState.SUCCEEDED
    lines = [line.text for line in client.logs(run.id)]
    answers = {name: said for name, *said in (json.loads(line[7:]) for line in lines if line.startswith("FORGED "))}
    assert answers == {
        "cancel": refused("direct", Refusal.UNSIGNED),
        "shrink": refused("direct", Refusal.UNSIGNED),
        "acknowledge": refused("pull", Refusal.UNSIGNED),
        "stacks": refused("stacks", Refusal.UNSIGNED),
        "release": refused("release", Refusal.UNSIGNED),
        "own key": refused("direct", Refusal.FORGED),
        "other job": refused("release", Refusal.FORGED),
    }
    events = run.events("supervisor.call_refused")
    assert sorted((event.data["call"], event.data["refusal"]) for event in events) == [
        ("direct", "forged"),
        ("direct", "unsigned"),
        ("pull", "unsigned"),
        ("release", "forged"),
        ("release", "unsigned"),
        ("stacks", "unsigned"),
    ]
    assert run.world_sizes() == [2] and client.incidents(run.id) == () and job.status.steps_lost == 0
    run.assert_undisturbed_losses()
