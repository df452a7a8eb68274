"""Processes that are started before their actors: Ray uses exactly these, for the supervisor and for the workers."""

from __future__ import annotations

import os
import subprocess
import time

import pytest

from kit.processes.server import Server

_START_AHEAD = """
import io, os, sys, time, zipfile, ray
from pathlib import Path
from shoal_service.cluster import gcs
from shoal_service.gateway.ray_cluster import prestart
from shoal_service.gateway.ray_cluster import RayCluster
from shoal_service.supervisor.config import SupervisorConfig
from shoal_service.supervisor.journal import JOURNAL_NAMESPACE, GcsJournal
from shoal_service.supervisor.workers import processes
from shoal_workers.contract.checks.spec_errors import parse_spec

class Supervisor:
    def process(self):
        return os.getpid()
    def start_worker(self, environment):
        self.worker = ray.remote(num_cpus=1, runtime_env=environment)(Supervisor).remote()
        return ray.get(self.worker.process.remote())

def idle():
    found = set()
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if file.read_bytes().startswith(b"ray::IDLE") and job_id in (file.parent / "environ").read_bytes():
                found.add(int(file.parent.name))
        except OSError:
            pass
    return found

def idle_after(number):
    deadline = time.monotonic() + 60
    while len(idle()) < number and time.monotonic() < deadline:
        time.sleep(0.05)
    return idle()

archive = io.BytesIO()
with zipfile.ZipFile(archive, "w") as zipped:
    zipped.writestr("own_module.py", f"MADE = {sys.argv[2]!r}")
ray.init(sys.argv[1], namespace="ahead", log_to_driver=False, logging_level="ERROR")
job_id = b"RAY_JOB_ID=" + ray.get_runtime_context().get_job_id().encode()
config = SupervisorConfig(
    job_id="ahead", attempt=1, spec=parse_spec({"data": {"corpus": "python-stdlib"}, "stop": {"steps": 1}}),
    checkpoint_root="/nowhere", granted=1, epoch=1, spec_version=1,
    code_uri=RayCluster.upload_code(None, "ahead", 1, archive.getvalue()),
)
node = next(node for node in gcs.nodes() if node.is_alive)
prestart(node, processes.serialized_supervisor_environment(config), number=1, keep_s=60)
[first] = idle_after(1)
prestart(
    node, processes.serialized_worker_environment(config), number=1, keep_s=60, working_dir=config.code_uri
)
second = idle_after(2) - {first}
environment = processes.supervisor_environment(config)
supervisor = ray.remote(num_cpus=0, runtime_env=environment, lifetime="detached", name="ahead")(Supervisor).remote()
print("supervisor", ray.get(supervisor.process.remote()) == first)
print("worker", {ray.get(supervisor.start_worker.remote(processes.worker_environment(config)))} == second)
ray.kill(supervisor)
GcsJournal(gcs.GcsKeyValueStore(JOURNAL_NAMESPACE), "ahead", 1).delete()
"""


@pytest.mark.matrix
def test_supervisors_and_workers_use_the_processes_that_were_started_for_them(shoal_server: Server) -> None:
    assert shoal_server.note is not None
    ran = subprocess.run(
        [shoal_server.python, "-c", _START_AHEAD, shoal_server.note["address"], str(time.time())],
        env={**os.environ, **shoal_server.ray_environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.stdout.splitlines() == ["supervisor True", "worker True"], ran.stdout + ran.stderr
    shoal_server.wait_until_free()
