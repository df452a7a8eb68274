"""Nodes die, are drained or are suspected; the head dies and restarts; the whole cluster dies. The losses do not
change."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from kit.processes.server import PATIENCE_S, until
from kit.worlds.tiny_jobs import holds
from shoal_api.client import Client


@pytest.fixture
def client(arena) -> Iterator[Client]:
    """A client of a cluster of three nodes and a head without CPUs."""
    arena.mend()
    with arena.server.client as client:
        yield client


def test_a_drain_moves_the_job_off_the_node_without_losing_a_step(client: Client, arena, submit) -> None:
    run = submit(to=client, workers=3, steps=24, strikes=holds(5, 16))
    run.wait_at("step-5-0")
    leaver = max(client.workers(run.id), key=lambda worker: worker.rank)
    drained = client.drain(leaver.node_id, reason="new disks", deadline_s=600.0)
    assert drained.drain is not None and drained.drain.deadline is not None
    try:
        run.wait_for_event("worker.started", 4)
        run.wait_for_event("generation.switching")
        run.release("step-5-0")
        run.wait_at("step-16-0")
        workers = [worker for worker in client.workers(run.id) if worker.rank is not None]
        assert workers and leaver.node_id not in {worker.node_id for worker in workers}
        run.release("step-16-0")
        job = run.finish()
    finally:
        assert client.undo_drain(leaver.node_id).drain is None
    assert job.status.steps_lost == 0 and client.incidents(run.id) == ()
    run.assert_undisturbed_losses()


@pytest.mark.matrix
def test_a_worker_requested_from_a_dead_head_holds_no_cpu(client: Client, arena) -> None:
    """Ray starts it when there is room, and will never use it: see `forkserver.idle`."""
    nodes, server = arena.nodes, arena.server
    driver = subprocess.Popen(
        [server.python, "-c", _ASK_TOO_MUCH, nodes.address],
        env={**os.environ, **server.ray_environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with driver:
        assert driver.stdin is not None and driver.stdout is not None
        assert driver.stdout.readline() == "asked\n"
        nodes.kill_head()
        until(nodes.is_head_alive, "the head is back")
        until(lambda: client.cluster().connected, "the control plane has found it")
        driver.stdin.close()
        assert driver.wait(PATIENCE_S) == 0
    until(lambda: (seen := client.cluster()).cpus_free == seen.cpus_total, "no CPU is held")


_ASK_TOO_MUCH = """
import sys, ray
from shoal_workers.forkserver import py_executable

class Actor:
    def make(self, num, **options):
        return [ray.remote(Actor).options(lifetime="detached", **options).remote() for _ in range(num)]

ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
guarded = {"num_cpus": 1, "runtime_env": {"py_executable": py_executable(fork=False)}}
head = ray.get_runtime_context().get_node_id()
[asker] = Actor().make(1, num_cpus=0, label_selector={"ray.io/node-id": "!" + head})  # who asks a raylet that lives on
holders = ray.get(asker.make.remote(6, **guarded))
ray.get([holder.make.remote(0) for holder in holders])
waiting = ray.get(asker.make.remote(3, **guarded))
print("asked", flush=True)
sys.stdin.read()
for actor in [*waiting, *holders, asker]:
    ray.kill(actor)
"""


@pytest.mark.matrix
def test_a_dead_cluster_is_restarted_and_the_job_continues_from_its_checkpoint(client: Client, arena, submit) -> None:
    run = submit(to=client, workers=2, steps=20, strikes=holds(11))
    run.wait_at("step-11-0")
    run.wait_for_event("checkpoint.committed", 2)
    for ip in arena.nodes.ips():
        arena.nodes.remove(ip)
    run.release("step-11-0")
    job = run.finish()

    assert job.status.steps_lost <= 10 - 8, "the checkpoint of step 8 was committed"
    forming = run.events("generation.forming")[-1].data
    assert forming["source"] == "checkpoint" and forming["restore"].startswith("step-000000000008")
    run.assert_undisturbed_losses()
