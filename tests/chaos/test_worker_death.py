"""Workers are killed, preempted, or stuck in native code. Survivors keep their processes; the losses do not change."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from kit.processes.os_processes import is_alive
from kit.processes.ray_nodes import Nodes
from kit.processes.server import Server
from kit.worlds.tiny_jobs import holds
from shoal_api.client import Client
from shoal_service.core.attempt.state.timeouts import Timeouts
from shoal_workers.contract.job import IncidentCause, JobState

_DOOMED = "127.0.0.9"
_WORKER_CPUS = 3
"""Two workers fit on the session's node, and one on the node that dies."""


@pytest.fixture
def doomed(shoal_server: Server) -> Iterator[Nodes]:
    """A second node of the session's cluster."""
    nodes = Nodes(shoal_server.state_dir, python=shoal_server.python)
    nodes.add(_DOOMED, num_cpus=_WORKER_CPUS)
    yield nodes
    nodes.end_added()


@pytest.mark.first
def test_a_killed_worker_and_a_lost_node_change_no_loss(submit, client: Client, doomed: Nodes) -> None:
    run = submit(workers=3, min_workers=2, steps=24, worker={"cpus": _WORKER_CPUS}, strikes=holds(5, 14, 20))
    run.wait_at("step-5-0")
    first = run.pids()
    victim = next(rank for rank, pid in first.items() if rank and doomed.ip_of(pid) != _DOOMED)
    os.kill(first[victim], signal.SIGKILL)
    run.wait_for_event("incident.opened")
    run.release("step-5-0")
    run.wait_at("step-14-0")
    run.wait_for_step(13)
    before = run.pids()
    lost = [rank for rank, pid in before.items() if doomed.ip_of(pid) == _DOOMED]
    doomed.remove(_DOOMED)
    run.wait_for_event("incident.opened", 2)
    run.release("step-14-0")
    run.wait_at("step-20-0")
    run.wait_for_step(19)
    survivors = {pid for rank, pid in before.items() if rank not in lost}
    assert survivors <= set(run.pids().values()), "they keep their processes"
    run.release("step-20-0")
    job = run.finish()

    killed, left = client.incidents(run.id)
    assert (killed.cause, killed.ranks, killed.closed) == (IncidentCause.WORKER_DIED, (victim,), True)
    assert killed.message.endswith("was killed by signal 9 (SIGKILL)"), 'not Ray\'s "died unexpectedly"'
    assert (left.cause, list(left.ranks), left.closed) == (IncidentCause.NODE_DIED, lost, True)
    assert (killed.state_source, left.state_source) == ("memory", "memory") and job.status.steps_lost <= 2
    run.assert_undisturbed_losses()


@pytest.mark.matrix
def test_a_killed_worker_costs_few_steps_and_the_group_grows_back(submit, client: Client) -> None:
    run = submit(
        workers=3,
        steps=24,
        strikes=[
            {"at": "step", "rank": 0, "n": 3, "do": "hold"},
            {"at": "step", "rank": 1, "n": 7, "do": "kill"},
            {"at": "step", "rank": 0, "n": 10, "do": "hold"},
            {"at": "step", "rank": 0, "n": 20, "do": "hold"},
        ],
    )
    run.wait_at("step-3-0")
    before = run.pids()
    assert sorted(before) == [0, 1, 2]
    run.release("step-3-0")

    run.wait_at("step-10-0")
    after = run.pids()
    assert [after[0], after[1]] == [before[0], before[2]], "survivors keep their processes"
    run.wait_for_event("worker.started", 4)
    run.wait_for_event("generation.switching")
    run.release("step-10-0")

    run.wait_at("step-20-0")
    grown = run.pids()
    assert [grown[rank] for rank in range(2)] == [after[rank] for rank in range(2)]
    assert grown[2] not in before.values()
    run.release("step-20-0")
    job = run.finish()

    assert run.world_sizes() == [3, 2, 3]
    [incident] = client.incidents(run.id)
    assert incident.cause is IncidentCause.WORKER_DIED and incident.closed
    assert incident.message.endswith("was killed by signal 9 (SIGKILL)"), 'not Ray\'s "died unexpectedly"'
    assert incident.ranks == (1,) and len(incident.worker_ids) == 1 and incident.node_id
    assert (incident.from_workers, incident.to_workers) == (3, 2)
    assert incident.state_source == "memory"
    assert incident.steps_lost == 0  # killed in step 7: the snapshot of step 6 was complete
    durations = (
        incident.quiesce_s,
        incident.plan_s,
        incident.form_s,
        incident.restore_s,
        incident.first_step_s,
        incident.recovery_s,
    )
    assert all(seconds is not None for seconds in durations), incident
    assert incident.detect_s is not None and incident.detect_s < 30, "from the death itself, not from the last poll"
    assert job.status.incidents == 1
    assert job.status.steps_lost == 0
    run.assert_undisturbed_losses()


def test_below_min_workers_a_job_waits_and_resumes_without_a_request(submit, client: Client) -> None:
    run = submit(
        min_workers=2,
        strikes=[{"at": "step", "rank": 1, "n": 6, "do": "kill"}, {"at": "prepare", "n": 3, "do": "hold"}],
    )
    job = run.wait_for(JobState.WAITING)
    assert job.status.reason == "min_workers_unreachable"
    assert "1 of 2 workers" in job.status.message
    assert job.status.deadline is not None and job.status.deadline > time.time() + 1000
    assert job.status.workers == 0
    run.wait_at("prepare-3")
    run.release("prepare-3")
    run.finish()

    assert run.world_sizes() == [2, 2]
    [incident] = client.incidents(run.id)
    assert (incident.from_workers, incident.to_workers, incident.closed) == (2, 2, True)
    run.assert_undisturbed_losses()


@pytest.mark.matrix
def test_a_preempted_worker_is_replaced_at_a_step_boundary_and_no_step_is_lost(submit, client: Client) -> None:
    run = submit(steps=24, strikes=holds(5, 16))
    run.wait_at("step-5-0")
    before = run.pids()
    os.kill(before[1], signal.SIGTERM)
    run.wait_for_event("worker.started", 3)
    run.wait_for_event("generation.switching")
    run.release("step-5-0")
    run.wait_at("step-16-0")
    after = run.pids()
    run.release("step-16-0")
    job = run.finish()

    assert after[0] == before[0] and after[1] != before[1]
    assert set(run.world_sizes()) == {2}, "it trains on until there is another one to take its place"
    assert job.status.steps_lost == 0 and client.incidents(run.id) == ()
    run.assert_undisturbed_losses()


@pytest.mark.matrix
def test_a_worker_stuck_in_native_code_is_evicted_within_its_deadlines(submit, client: Client) -> None:
    """It holds the interpreter's lock, so it handles no interrupt, answers no poll and stamps no progress.
    In step 8, since it takes 30 s instead of the floor's 10 s before five steps are measured."""
    run = submit(
        strikes=[{"at": "step", "rank": 1, "n": 8, "do": "block"}],
        health={"hang_factor": 3.0, "hang_floor_s": 10.0},
    )
    run.wait_at("step-8-1")
    stuck = run.pids()
    run.finish()

    incident = client.incidents(run.id)[0]
    assert incident.cause is IncidentCause.HUNG and incident.ranks == (1,) and incident.closed
    assert incident.detect_s is not None and incident.detect_s >= 10.0
    assert incident.quiesce_s is not None and incident.quiesce_s < Timeouts().quiesce_s + 60
    assert incident.steps_lost == 0 and incident.state_source == "memory"
    assert not is_alive(stuck[1])
    run.assert_undisturbed_losses()
