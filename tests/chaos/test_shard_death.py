"""Shards die by SIGKILL, at a rank and step that the strike names. Survivors keep their processes; no loss changes."""

from __future__ import annotations

from shoal_api.client import Client
from shoal_workers.contract.job import IncidentCause


def test_a_killed_shard_costs_few_steps_and_the_group_grows_back(submit, client: Client) -> None:
    run = submit(
        workers=4,
        steps=24,
        strikes=[
            {"at": "step", "rank": 0, "n": 3, "do": "hold"},
            {"at": "step", "rank": 2, "n": 7, "do": "kill"},
            {"at": "step", "rank": 0, "n": 10, "do": "hold"},
            {"at": "step", "rank": 0, "n": 20, "do": "hold"},
        ],
    )
    run.wait_at("step-3-0")
    before = run.pids()
    assert sorted(before) == [0, 1, 2, 3]
    run.release("step-3-0")

    run.wait_at("step-10-0")
    after = run.pids()
    assert [after[0], after[1], after[2]] == [before[0], before[1], before[3]], "survivors keep their processes"
    run.wait_for_event("worker.started", 5)
    run.wait_for_event("generation.switching")
    run.release("step-10-0")

    run.wait_at("step-20-0")
    grown = run.pids()
    assert [grown[rank] for rank in range(3)] == [after[rank] for rank in range(3)]
    assert grown[3] not in before.values()
    run.release("step-20-0")
    job = run.finish()

    assert run.world_sizes() == [4, 3, 4]
    [incident] = client.incidents(run.id)
    assert incident.cause is IncidentCause.SHARD_DIED and incident.closed
    assert incident.ranks == (2,) and len(incident.shard_ids) == 1 and incident.node_id
    assert (incident.from_workers, incident.to_workers) == (4, 3)
    assert incident.state_source == "checkpoint"
    assert incident.steps_lost == 6 - 4  # killed in step 7, restored from step 4
    durations = (
        incident.quiesce_s, incident.plan_s, incident.form_s, incident.restore_s, incident.first_step_s,
        incident.recovery_s,
    )  # fmt: skip
    assert all(seconds is not None for seconds in durations), incident
    assert incident.recovery_s < 10
    assert job.status.incidents == 1
    assert job.status.steps_lost == 2, "growing back loses no step"
    run.assert_undisturbed_losses()
