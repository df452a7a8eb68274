"""Users scale, pause and end a job while it trains. A planned change loses no step."""

from __future__ import annotations

from kit.worlds.tiny_jobs import holds
from shoal_api.client import Client
from shoal_workers.contract.job import JobState


def test_scaling_down_and_up_and_a_pause_switch_at_step_boundaries(submit, client: Client, shoal_server) -> None:
    run = submit(workers=3, strikes=holds(5, 9, 14))
    run.wait_at("step-5-0")
    before = run.pids()
    job = client.scale(run.id, max_workers=2)
    assert job.spec.elasticity.max_workers == 2
    run.wait_for_event("generation.switching", 1)
    run.release("step-5-0")

    run.wait_at("step-9-0")
    assert run.pids() == {0: before[0], 1: before[1]}
    client.scale(run.id, min_workers=3, max_workers=3)  # a minimum is met, however little it gains so near the end
    run.wait_for_event("generation.switching", 2)
    run.release("step-9-0")

    run.wait_at("step-14-0")
    grown = run.pids()
    assert (grown[0], grown[1]) == (before[0], before[1]) and len(grown) == 3
    assert client.pause(run.id).status.state is JobState.PAUSING
    run.wait_for_event("generation.switching", 3)
    run.release("step-14-0")
    job = run.wait_for(JobState.PAUSED)
    assert job.status.step == 14
    shoal_server.wait_until_free()
    assert not set(grown.values()) & set(shoal_server.processes()), "a pause frees the workers"

    client.resume(run.id)
    job = run.finish()
    assert run.world_sizes() == [3, 2, 3, 3]
    first, smaller, larger, resumed = (event.data["start_step"] for event in run.events("generation.formed"))
    # the event is seen before the request has reached every worker: on a busy machine some steps pass meanwhile
    assert first == 0 and 5 <= smaller < 9 <= larger < 14 == resumed
    assert job.status.observed_generation == job.spec_version
    assert (job.status.attempt, job.status.steps_lost) == (2, 0) and client.incidents(run.id) == ()
    run.assert_undisturbed_losses()


def test_a_running_job_is_cancelled_in_mid_step(submit, client: Client, shoal_server) -> None:
    run = submit(strikes=holds(3))
    run.wait_at("step-3-0")
    client.cancel(run.id)
    job = run.finish(JobState.CANCELLED)
    assert job.status.step == 2
    shoal_server.wait_until_free()
