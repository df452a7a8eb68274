"""What links two real Ray clusters to the service breaks while both train: no step is lost, each report counts once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kit.processes.server import until
from kit.worlds.tiny_jobs import holds

Submit = Callable[..., Any]


def train_on_both(submit: Submit) -> dict[str, Any]:
    """A job in each cluster, at its fifth step."""
    runs = {name: submit(name, steps=30, strikes=holds(5, 25)) for name in ("east", "west")}
    for run in runs.values():
        run.wait_at("step-5-0")
        run.pids()
    return runs


def go_on(runs: dict[str, Any]) -> None:
    """To the 25th step, whatever the service says."""
    for run in runs.values():
        run.release("step-5-0")
    for run in runs.values():
        run.wait_at("step-25-0", with_service=False)


def finish(runs: dict[str, Any]) -> None:
    """The jobs end as if nothing had been: no incident, the same workers, every event and step once."""
    for run in runs.values():
        run.wait_for_step(24)
        run.release("step-25-0")
        job = run.finish()
        assert job.status.attempt == 1 and job.status.steps_lost == 0 and run.world_sizes() == [2]
        assert run.client.incidents(run.id) == ()
        run.assert_losses_of_the_undisturbed_run()


@pytest.mark.matrix
def test_gateways_that_are_killed_and_started_again_while_jobs_train(fleet: Any, submit: Submit) -> None:
    runs = train_on_both(submit)
    pids = {name: run.pids() for name, run in runs.items()}
    for cluster in fleet.clusters:
        cluster.join.kill()
    go_on(runs)
    for cluster in fleet.clusters:
        cluster.start()
        cluster.join.wait_to_say("gateway: joined")
    fleet.wait_for("east", "west")
    assert {name: run.pids() for name, run in runs.items()} == pids
    finish(runs)


@pytest.mark.matrix
def test_a_control_plane_that_is_replaced_while_both_clusters_train(fleet: Any, submit: Submit) -> None:
    runs = train_on_both(submit)
    pids = {name: run.pids() for name, run in runs.items()}
    second = fleet.make_server().start()
    fleet.server.kill()
    go_on(runs)
    fleet.lead_to(second)
    for run in runs.values():
        run.client = second.client
    fleet.wait_for("east", "west")
    assert {name: run.pids() for name, run in runs.items()} == pids
    finish(runs)


@pytest.mark.matrix
@pytest.mark.parametrize("also_supervisors", [True, False])
def test_a_gateway_that_is_cut_off_by_the_network_while_jobs_train(
    fleet: Any, submit: Submit, also_supervisors: bool
) -> None:
    """Packets are dropped, and arrive after all at the end, late and again."""
    runs = train_on_both(submit)
    west = fleet.west
    cut_off = [west.link, west.home] if also_supervisors else [west.link]
    for proxy in cut_off:
        proxy.hold()
    fleet.wait_for("east")
    go_on(runs)
    runs["east"].wait_for_step(24)
    if not also_supervisors:
        runs["west"].wait_for_step(24)
    for proxy in cut_off:
        proxy.release()
    fleet.wait_for("east", "west")
    assert fleet.west.join.is_alive
    finish(runs)
    until(lambda: fleet.attempts() == [], "no supervisor is left")


@pytest.mark.matrix
def test_links_of_a_cluster_that_are_slow_and_late_while_jobs_train(fleet: Any, submit: Submit) -> None:
    """Reports, directives and answers pass at 100 kB a second, and each piece is 0.3 s late."""
    runs = train_on_both(submit)
    shaped = (fleet.west.link, fleet.west.home)
    for proxy in shaped:
        proxy.shape(1e5, delay_s=0.3)
    try:
        go_on(runs)
        for run in runs.values():
            run.wait_for_step(24)
        assert fleet.west.join.is_alive
        fleet.wait_for("east", "west")
    finally:
        for proxy in shaped:
            proxy.shape()
    finish(runs)
