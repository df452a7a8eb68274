"""Jobs on two real Ray clusters: placed by name, moved on request, and started elsewhere when their cluster is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kit.processes.server import until
from kit.worlds.tiny_jobs import holds
from shoal_workers.contract.job import JobState

Submit = Callable[..., Any]


@pytest.mark.matrix
def test_each_cluster_trains_the_job_that_names_it_and_no_job_spans_two(fleet: Any, submit: Submit) -> None:
    runs = {name: submit(name, steps=10, strikes=holds(5)) for name in ("east", "west")}
    for name, run in runs.items():
        run.wait_at("step-5-0")
        run.pids()
        assert run.clusters_of_workers() == {name}, "both train at the same time"
    for run in runs.values():
        run.release("step-5-0")
        job = run.finish()
        assert job.status.attempt == 1 and run.client.incidents(run.id) == ()
        run.assert_losses_of_the_undisturbed_run()


@pytest.mark.matrix
def test_a_job_that_may_run_anywhere_grows_within_one_cluster_only(fleet: Any, submit: Submit) -> None:
    """Both have four CPUs; it would take eight."""
    batch = {"global_size": 10, "micro_size": 1}  # a micro-batch for each worker
    run = submit("any", workers=8, min_workers=1, steps=10, strikes=holds(5), waves=[4], batch=batch)
    run.wait_at("step-5-0")
    run.pids()
    assert len(run.clusters_of_workers()) == 1 and run.world_sizes()[-1] <= 4
    run.release("step-5-0")
    run.finish()


def move(run: Any, to: str) -> None:
    """Returns when the supervisor knows it: the step that it is in is the last one there."""
    run.client.move(run.id, to)
    run.wait_for(JobState.PAUSING)


@pytest.mark.first
def test_a_job_that_is_moved_to_the_other_cluster_and_back_loses_no_step(fleet: Any, submit: Submit) -> None:
    run = submit("east", steps=30, strikes=holds(6, 14))
    run.wait_at("step-6-0")
    run.pids()
    assert run.clusters_of_workers() == {"east"}
    move(run, "west")
    run.release("step-6-0")
    run.wait_at("step-14-0")
    run.wait_for_step(13)
    assert run.clusters_of_workers() == {"west"} and run.now().spec.worker.cluster == "west"
    move(run, "east")
    run.release("step-14-0")
    job = run.finish()

    assert job.status.attempt == 3 and job.status.steps_lost == 0
    assert [event.data["start_step"] for event in run.events("generation.formed")] == [0, 6, 14]
    assert run.client.incidents(run.id) == ()
    run.assert_losses_of_the_undisturbed_run()
    until(lambda: fleet.attempts() == [], "no supervisor is left in either cluster")


WAIT_S = 6.0


@pytest.mark.matrix
def test_a_job_whose_cluster_is_lost_starts_in_the_other_one_from_its_checkpoint(fleet: Any, submit: Submit) -> None:
    run = submit("any", steps=20, strikes=holds(11), elasticity={"wait_s": WAIT_S})
    run.wait_at("step-11-0")
    run.pids()
    [name] = run.clusters_of_workers()
    lost, other = (fleet.east, fleet.west) if name == "east" else (fleet.west, fleet.east)
    run.wait_for_step(10)
    lost.lose()
    run.release("step-11-0")
    run.wait_for_event("generation.formed", 2)
    until(lambda: run.clusters_of_workers() == {other.name}, "it trains in the other cluster")
    job = run.finish()

    assert job.status.attempt == 2 and job.status.steps_lost == 10 - 8
    assert [event.data["start_step"] for event in run.events("generation.formed")] == [0, 8]
    run.assert_losses_of_the_undisturbed_run()
    lost.start()
    fleet.wait_for("east", "west")
    assert fleet.attempts() == [] and run.now().status.state is JobState.SUCCEEDED


@pytest.mark.matrix
def test_a_pinned_job_whose_cluster_is_lost_stays_and_says_so_until_it_is_back(fleet: Any, submit: Submit) -> None:
    run = submit("west", steps=20, strikes=holds(11), elasticity={"wait_s": WAIT_S})
    run.wait_at("step-11-0")
    run.wait_for_step(10)
    fleet.west.lose()
    run.release("step-11-0")
    until(lambda: "west" in run.now().status.note, "its status says so")
    note = run.now().status.note
    assert "worker.cluster" in note and "shoal move" in note, note
    assert run.now().status.attempt == 1 and len(run.events("job.stays_in_cluster")) == 1
    fleet.west.start()
    job = run.finish()
    assert job.status.attempt == 2
    run.assert_losses_of_the_undisturbed_run()
    assert fleet.attempts() == []
