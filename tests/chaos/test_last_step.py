"""Deaths after the last step: the model that was trained is kept, and nothing that lies in memory is computed again."""

from __future__ import annotations

from typing import Any

import pytest

from shoal_api.client import Client
from shoal_workers.contract.job import EndReason, JobState


def _submit(submit: Any, **validation: Any) -> Any:
    return submit(
        workers=1,
        steps=20,
        task="validated:Validated",
        checkpoint={"every_steps": 100},
        validation={"samples": 4, "every_steps": 100},
        data_more={"validation": validation},
    )


@pytest.mark.matrix
def test_a_final_validation_that_always_crashes_costs_no_step_and_keeps_the_model(submit) -> None:
    run = _submit(submit, deaths=1000)
    job = run.finish(JobState.FAILED)
    assert job.status.reason == EndReason.VALIDATION_FAILED
    assert (job.status.step, job.status.checkpoint_step, job.status.steps_lost) == (20, 20, 0)
    assert "step-000000000020-a1-g1 committed" in job.status.message
    assert [event.data["step"] for event in run.events("generation.forming")] == [0, 20, 20]
    [committed] = run.events("checkpoint.committed")
    assert committed.seq < run.events("worker.lost")[0].seq, "committed before the validation"


def test_a_death_in_the_final_validation_is_an_incident_that_closes(submit, client: Client) -> None:
    run = _submit(submit, deaths=1)
    job = run.finish()
    assert (job.status.checkpoint_step, job.status.steps_lost) == (20, 0) and job.status.val_loss is not None
    [incident] = client.incidents(run.id)
    assert incident.closed and incident.steps_lost == 0 and incident.recovery_s is not None
    assert len(run.events("checkpoint.committed")) == 1, "it is not saved a second time"
