"""A hostile task on a real cluster tries what job code should not reach; the table of docs/security.md has the answers.

embedded   `shoal serve` as a user who is not root, with everything of its cluster
isolated   `shoal serve --isolate` as root: workers and gateway as two other users
apart      `shoal serve --cluster` as one user, Ray as another, `shoal join` as a third one: as the containers of
           deploy/, which tests/unit/deploy/test_user_code.py reads. Here they also see each other's processes.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kit.processes.other_users import NOBODY, needs_root, open_directory, reachable_python
from kit.processes.server import _MAIN, SECRET, SERVICE_SECRETS, Server, until
from kit.reach import ROWS, expected
from shoal_service.core.access import new_token
from shoal_workers.contract.job import JobState

TASKS = Path(__file__).parents[2] / "kit" / "ray_tasks"
_SERVER, _RAY, _GATEWAY = 64001, 64002, 64003
"""Users without an entry in /etc/passwd."""
_CLUSTER = """
import sys
from pathlib import Path
from shoal_service.cluster.embedded_cluster import EmbeddedCluster
from shoal_service.cluster.isolation import Account
state, home, uid = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
cluster = EmbeddedCluster(state, num_cpus=4, account=Account("ray-user", uid, uid, home))
try:
    print(cluster.start(), flush=True)
    sys.stdin.read()
finally:
    cluster.stop()
"""


@dataclass
class World:
    server: Server
    checkpoints: Path
    gateway_token: Path
    gateway_pid: Callable[[], int]
    secrets: dict[str, str] = field(default_factory=dict)


@pytest.fixture
def folder() -> Iterator[Path]:
    needs_root()
    with open_directory("shoal-users-") as found:
        yield found


def _given(folder: Path, name: str, uid: int, mode: int = 0o700) -> Path:
    """A directory of this user."""
    path = folder / name
    path.mkdir()
    os.chown(path, uid, uid)
    path.chmod(mode)
    return path


def _put(path: Path, text: str, uid: int) -> Path:
    """A file that this user alone can read."""
    path.parent.mkdir(exist_ok=True)
    os.chown(path.parent, uid, uid)
    path.write_text(text)
    os.chown(path, uid, uid)
    path.chmod(0o600)
    return path


def _serve(server: Server, uid: int, stack: ExitStack) -> None:
    _put(server.state_dir / "server.key", "a key", uid)
    _put(server.state_dir / "webhook-secrets" / "vision", "a secret", uid)
    stack.callback(server.sweep)
    server.start()


def _own_gateway(server: Server) -> int:
    [pid] = [pid for pid, command in server.processes().items() if "gateway.process" in command]
    return pid


def _embedded(folder: Path, python: Path, stack: ExitStack) -> World:
    state = _given(folder, "state", NOBODY)
    program = reachable_python(python, folder, user=f"{NOBODY}:{NOBODY}")
    environment = {**SERVICE_SECRETS, "HOME": str(_given(folder, "home", NOBODY))}
    server = Server(program, state, ["--num-cpus=4"], environment)
    _serve(server, NOBODY, stack)
    return World(server, state / "checkpoints", state / "default-gateway-token", lambda: _own_gateway(server))


def _isolated(folder: Path, python: Path, stack: ExitStack) -> World:
    state, jobs = _given(folder, "state", 0), folder / "jobs"
    environment = {**SERVICE_SECRETS, "SHOAL_ISOLATE_DIR": str(jobs)}
    server = Server(reachable_python(python, folder), state, ["--isolate", "--num-cpus=4"], environment)
    _serve(server, 0, stack)
    return World(server, jobs / "checkpoints", state / "default-gateway-token", lambda: _own_gateway(server))


def _apart(folder: Path, python: Path, stack: ExitStack) -> World:
    state = _given(folder, "state", _SERVER)
    checkpoints = _given(folder, "checkpoints", _RAY, 0o2770)
    os.chown(checkpoints, _RAY, _SERVER)
    tokens = {uid: folder / f"secrets-{uid}" / "cluster-token" for uid in (_SERVER, _GATEWAY)}
    token = new_token()
    for uid, path in tokens.items():
        _put(path, token, uid)
    environment = {**SERVICE_SECRETS, "SHOAL_CLUSTER_TOKEN_FILE": str(tokens[_SERVER]), "HOME": str(state)}
    environment |= {"SHOAL_CHECKPOINT_URL": str(checkpoints)}
    server = Server(
        reachable_python(python, folder, user=f"{_SERVER}:{_SERVER}"), state, ["--cluster=default"], environment
    )
    _serve(server, _SERVER, stack)

    ray_state = _given(folder, "ray", 0)
    command = [reachable_python(python, folder), "-c", _CLUSTER, ray_state, _given(folder, "ray-home", _RAY), str(_RAY)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SHOAL_", "PYTHON"))}
    log = stack.enter_context((folder / "ray.log").open("wb"))
    cluster = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=kept, text=True)
    assert cluster.stdin is not None and cluster.stdout is not None
    stack.callback(cluster.stdout.close)
    stack.callback(cluster.wait, timeout=60)
    stack.callback(cluster.stdin.close)
    address = cluster.stdout.readline().strip()
    assert address, (folder / "ray.log").read_text()

    access = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": (ray_state / "ray-token").read_text()}
    access |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "HOME": "/"}
    user = f"{_GATEWAY}:{_GATEWAY},{_RAY}"
    command = [reachable_python(python, folder, user=user), "-c", _MAIN, "join"]
    command += [f"http://127.0.0.1:{server.port}", f"--token-file={tokens[_GATEWAY]}", f"--ray-address={address}"]
    log = stack.enter_context((folder / "gateway.log").open("wb"))
    gateway = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**kept, **access}, cwd="/"
    )
    stack.callback(gateway.wait, timeout=60)
    stack.callback(gateway.terminate)

    return World(server, checkpoints, tokens[_GATEWAY], lambda: gateway.pid, {"cluster token": token})


_START = {"embedded": _embedded, "isolated": _isolated, "apart": _apart}


def _submit_victim(world: World) -> str:
    with world.server.client as client:
        job = client.submit(
            {
                "name": "neighbour",
                "task": "hostile:Victim",
                "code": {"working_dir": str(TASKS), "env": {"NEIGHBOURS_OWN": "its secret"}},
                "batch": {"global_size": 4, "micro_size": 2},
                "checkpoint": {"every_steps": 5},
                "stop": {"steps": 1_000_000},
            }
        )
        until(lambda: any(one.state.value == "committed" for one in client.checkpoints(job.id)), "it has a checkpoint")
        return job.id


def _attack(world: World, neighbour: str) -> dict[str, tuple[bool, str]]:
    server = world.server
    assert server.process is not None
    secrets = {"of the server": SECRET, "admin token": server.token, **world.secrets}
    targets = {
        "url": f"http://127.0.0.1:{server.port}",
        "cluster": "default",
        "neighbour": neighbour,
        "checkpoints": str(world.checkpoints),
        "files": {
            "state-dir": str(server.state_dir),
            "database": str(server.state_dir / "shoal.db"),
            "admin-token": str(server.token_file),
            "gateway-token": str(world.gateway_token),
            "webhook-secrets": str(server.state_dir / "webhook-secrets" / "vision"),
            "tls-key": str(server.state_dir / "server.key"),
        },
        "processes": {"server-process": server.process.pid, "gateway-process": world.gateway_pid()},
        "secrets": {name: secret[::-1] for name, secret in secrets.items()},
    }
    with server.client as client:
        job = client.submit(
            {
                "name": "hostile",
                "task": "hostile:Task",
                "code": {"working_dir": str(TASKS), "env": {"HOSTILE_TARGETS": json.dumps(targets)}},
                "batch": {"global_size": 4, "micro_size": 2},
                "stop": {"steps": 2},
            }
        )
        ended = client.wait(job.id, timeout_s=240)
        lines = [line.text for line in client.logs(job.id)]
        assert ended.status.state is JobState.SUCCEEDED, (ended.status, lines)
        found = [json.loads(line.removeprefix("HOSTILE ")) for line in lines if line.startswith("HOSTILE ")]
        return {name: (is_reached, how) for name, is_reached, how in found}


@pytest.mark.parametrize("shape", ["isolated", "embedded", "apart"])
@pytest.mark.cells(1, 1)
def test_job_code_reaches_what_the_table_says_and_nothing_else(shape: str, folder: Path, wheel_python: Path) -> None:
    with ExitStack() as stack:
        world = _START[shape](folder, wheel_python, stack)
        world.server.wait_for_cluster()
        neighbour = _submit_victim(world)
        found = _attack(world, neighbour)
        print(shape, json.dumps(found, indent=1))
        (Path(folder) / "found.json").write_text(json.dumps(found, indent=1))
        wrong = {name: found[name] for name, is_reached in expected(shape).items() if found[name][0] != is_reached}
        assert wrong == {}
        assert found.keys() == {name for row in ROWS for name in row.attempts}
        with world.server.client as client:
            assert client.cancel(neighbour)
            client.wait(neighbour, timeout_s=120)
            words = client.overview_of_all().exposure
            assert "admin-token" in words if shape == "embedded" else words == ""
        assert world.server.stop() == 0
