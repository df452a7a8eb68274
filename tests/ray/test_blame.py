"""Faults of a worker's node and of its memory, through the whole service: the job ends as if nothing had happened, and
no retry of the user's is charged."""

from __future__ import annotations

import pytest

from shoal_api.client import Client
from shoal_service.views import CheckpointState
from shoal_workers.contract.job import IncidentCause


@pytest.mark.matrix
def test_a_bit_that_flips_in_one_replica_is_found_and_no_later_checkpoint_is_used(submit, client: Client) -> None:
    run = submit(
        workers=3,
        min_workers=3,
        parallelism={"dp_replicate": 3},
        checkpoint={"every_steps": 2},
        health={"checksum_every_steps": 4},
        strikes=[{"at": "step", "rank": 1, "n": 6, "do": "flip"}],
    )
    run.finish()
    [incident] = client.incidents(run.id)
    assert (incident.cause, incident.ranks) == (IncidentCause.CORRUPTED, (1,)), incident
    assert incident.steps_lost == 4, "found after step 8, back to step 4"
    run.assert_undisturbed_losses()
    damaged = {one.step for one in client.checkpoints(run.id) if one.state is CheckpointState.DAMAGED}
    deleted = {one.step for one in client.checkpoints(run.id) if one.state is CheckpointState.DELETED}
    events = [event.data["name"] for event in run.events("checkpoint.damaged")]
    found = {int(name.split("-")[1]) for name in events}
    assert {6} <= found <= {6, 8}, "that of step 8 may not have been committed when the sums were compared"
    assert {6, 8} & (damaged | deleted)
    assert run.job.status.attempt == 1


def test_a_disk_that_fails_under_one_rank_replaces_its_worker_and_charges_no_retry(submit, client: Client) -> None:
    run = submit(workers=3, retry={"max_failures": 0}, strikes=[{"at": "step", "rank": 1, "n": 7, "do": "disk"}])
    job = run.finish()
    [incident] = client.incidents(run.id)
    assert (incident.cause, incident.ranks) == (IncidentCause.WORKER_FAULT, (1,)), incident
    assert "Input/output error" in incident.message and "operating system failed" in incident.message
    assert (job.status.attempt, job.status.failure) == (1, None)
    assert len(run.events("node.suspected")) == 1
    run.assert_undisturbed_losses()
