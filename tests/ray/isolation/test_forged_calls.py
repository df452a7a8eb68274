"""Code of a job acts as if it were the control plane, or the supervisor of another job."""

from __future__ import annotations

import json

from shoal_api.client import Client
from shoal_workers.contract.job import JobState


def test_a_supervisor_has_no_calls_and_its_token_opens_nothing_but_its_attempt(submit, client: Client) -> None:
    """Job code can read the token of its own attempt in Ray's tables. It could falsify its own reports before, too."""
    run = submit(workers=2, min_workers=2, task="forger:Forger")
    job = run.finish()
    assert job.status.state is JobState.SUCCEEDED
    lines = [line.text for line in client.logs(run.id)]
    answers = dict(json.loads(line[7:]) for line in lines if line.startswith("FORGED "))
    assert answers == {
        "calls": [],
        "without a token": 401,
        "with a made up token": 401,
        "cancel with its own token": 403,
        "read with its own token": 403,
        "another job with its own token": 403,
        "another attempt with its own token": 403,
    }
    assert run.world_sizes() == [2] and client.incidents(run.id) == () and job.status.steps_lost == 0
    run.assert_undisturbed_losses()
