"""RayFleet against a real cluster: a worker killed while Ray creates it, deleted code, a node that is gone."""

from __future__ import annotations

import os
import subprocess
import time

import pytest

from kit.processes.server import Server


def _printed(server: Server, script: str, *arguments: str) -> list[str]:
    """The words that a driver of the server's cluster prints."""
    assert server.note is not None
    ran = subprocess.run(
        [server.python, "-c", script, server.note["address"], *arguments],
        env={**os.environ, **server.ray_environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout.split()


_GIVE_UP_WHILE_RAY_CREATES_IT = """
import asyncio, sys, time, ray
from shoal_service.core.attempt.messages import StartWorker
from shoal_service.supervisor.config import SupervisorConfig
from shoal_service.supervisor.workers.ray_fleet import RayFleet
from shoal_workers.contract.ids import NAMESPACE
from shoal_workers.contract.checks.spec_errors import parse_spec

NAME = "shoal/given-up/1/worker-0"

async def give_up(fleet):
    starting = asyncio.create_task(fleet.start(StartWorker(0, NAME)))
    await asyncio.sleep(0)  # it waits for Ray now
    starting.cancel()
    await asyncio.create_task(fleet.kill(0))  # as the executor does: the one that was given up has its turn first

def is_known():
    try:
        return bool(ray.get_actor(NAME, namespace=NAMESPACE))
    except ValueError:
        return False

ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
spec = parse_spec({"data": {"corpus": "python-stdlib"}, "stop": {"steps": 1}})
fleet = RayFleet(SupervisorConfig(
    job_id="given-up", attempt=1, spec=spec, checkpoint_root="/nowhere", granted=1, epoch=1, spec_version=1,
))
asyncio.run(give_up(fleet))
fleet._actors._creators.shutdown()
deadline = time.monotonic() + 30
while is_known() and time.monotonic() < deadline:
    time.sleep(0.05)
print("left behind" if is_known() else "gone")
"""


def test_a_worker_that_is_killed_while_ray_creates_it_does_not_remain(shoal_server: Server) -> None:
    assert _printed(shoal_server, _GIVE_UP_WHILE_RAY_CREATES_IT) == ["gone"]
    shoal_server.wait_until_free()


_START_AFTER_RAY_DELETED_THE_CODE = """
import asyncio, io, sys, zipfile, ray
from shoal_service.cluster.gcs import GcsKeyValueStore
from shoal_service.gateway.ray_cluster import RayCluster
from shoal_service.core.attempt.messages import StartWorker
from shoal_service.supervisor.config import SupervisorConfig
from shoal_service.supervisor.journal import JOURNAL_NAMESPACE, GcsJournal
from shoal_service.supervisor.workers.ray_fleet import RayFleet
from shoal_workers.contract.checks.spec_errors import parse_spec

archive = io.BytesIO()
with zipfile.ZipFile(archive, "w") as zipped:
    zipped.writestr("own_module.py", f"MADE = {sys.argv[2]!r}")  # new to the node, so that it has no cached copy
ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
uri = RayCluster.upload_code(None, "deleted-code", 1, archive.getvalue())
GcsKeyValueStore(None).delete(uri.encode())
spec = parse_spec({"data": {"corpus": "python-stdlib"}, "stop": {"steps": 1}})
fleet = RayFleet(SupervisorConfig(
    job_id="deleted-code", attempt=1, spec=spec, checkpoint_root="/nowhere", granted=1, epoch=1, spec_version=1,
    code_uri=uri,
))

async def start():
    await fleet.start(StartWorker(0, "shoal/deleted-code/1/worker-0"))
    answer = await fleet.prepare(0)
    await fleet.kill(0)
    return answer

print(type(asyncio.run(start())).__name__)
GcsJournal(GcsKeyValueStore(JOURNAL_NAMESPACE), "deleted-code", 1).delete()
"""


@pytest.mark.matrix
def test_a_worker_starts_although_ray_has_deleted_the_code_of_its_job(shoal_server: Server) -> None:
    """A head that was started again counts no actors from before, and deletes a package with the next that dies."""
    assert _printed(shoal_server, _START_AFTER_RAY_DELETED_THE_CODE, str(time.time())) == ["WorkerInfo"]
    shoal_server.wait_until_free()


_START_ON_A_NODE_THAT_IS_GONE = """
import asyncio, sys, ray
from shoal_service.core.attempt.messages import StartWorker
from shoal_service.supervisor.config import SupervisorConfig
from shoal_service.supervisor.protocols import WorkerDied
from shoal_service.supervisor.workers.ray_fleet import RayFleet
from shoal_workers.contract.checks.spec_errors import parse_spec

ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
spec = parse_spec({"data": {"corpus": "python-stdlib"}, "stop": {"steps": 1}})
fleet = RayFleet(SupervisorConfig(
    job_id="gone-node", attempt=1, spec=spec, checkpoint_root="/nowhere", granted=1, epoch=1, spec_version=1,
))

async def start():
    try:
        await fleet.start(StartWorker(0, "shoal/gone-node/1/worker-0", only_on="f" * 56))
        await fleet.prepare(0)
    except WorkerDied as error:
        print(error.cause.value)

asyncio.run(start())
"""


def test_a_start_on_a_node_that_ray_no_longer_has_is_the_death_of_that_node(shoal_server: Server) -> None:
    assert _printed(shoal_server, _START_ON_A_NODE_THAT_IS_GONE) == ["node_died"]
