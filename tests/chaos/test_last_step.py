"""Deaths after the last step: the model that was trained is kept, and nothing that lies in memory is computed again."""

from __future__ import annotations

from typing import Any

from shoal_api.client import Client


def _submit(submit: Any, **validation: Any) -> Any:
    return submit(
        workers=1,
        steps=20,
        task="validated:Validated",
        checkpoint={"every_steps": 100},
        validation={"samples": 4, "every_steps": 100},
        data_more={"validation": validation},
    )


def test_a_death_in_the_final_validation_is_an_incident_that_closes(submit, client: Client) -> None:
    run = _submit(submit, deaths=1)
    job = run.finish()
    assert (job.status.checkpoint_step, job.status.steps_lost) == (20, 0) and job.status.val_loss is not None
    incidents = client.incidents(run.id)
    assert len(incidents) == 1, run.incident_lines()
    [incident] = incidents
    assert incident.closed and incident.steps_lost == 0 and incident.recovery_s is not None
    assert len(run.events("checkpoint.committed")) == 1, "it is not saved a second time"
