"""The node's fork server: its processes behave like new interpreters, and none of them is left when it ends."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shoal_workers.forkserver import PRELOAD, idle, launch, preload, py_executable
from shoal_workers.forkserver.server import MAX_WAITING

pytestmark = pytest.mark.dist

_SCRIPT = """
import json, os, random, sys
is_forked = "shoal_workers.engine.engine" in sys.modules
import numpy
print("to stderr", file=sys.stderr, flush=True)
print(json.dumps({
    "argv": sys.argv, "cwd": os.getcwd(), "pid": os.getpid(), "parent": os.getppid(), "is_forked": is_forked,
    "name": __name__, "path": sys.path[:2], "env": dict(os.environ), "group": os.getpgid(0),
    "numbers": [random.random(), numpy.random.rand()], "is_preloaded": "extra.part" in sys.modules,
    "whole_path": sys.path,
}), flush=True)
sys.exit(3)
"""


class Raylet:
    """A shell that starts the given commands one after the other, as a raylet starts workers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder / "raylet"
        (folder / "script.py").write_text(_SCRIPT)
        self.extra = folder / "sources" / "extra"
        self.extra.mkdir(parents=True)
        (self.extra / "__init__.py").touch()
        (self.extra / "part.py").touch()
        self.preload = preload("extra.part", self.extra)
        self.shell = subprocess.Popen(["bash"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(
        self, *, raylet: str | None = None, option: str = "", program: ModuleType = launch, **environment: str
    ) -> dict[str, Any]:
        """The script's description of its own process."""
        assert self.shell.stdin is not None and self.shell.stdout is not None
        environment = {PRELOAD: self.preload, **environment}
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())
        script = self.folder / "script.py"
        isolated = "-I -S" if program is launch else ""
        self.shell.stdin.write(
            f"cd {self.folder}; {variables} {sys.executable} {isolated} {program.__file__} {option} {script} "
            f"--raylet-name={raylet or self.name} 'two words' 2>{self.folder}/stderr\n"
        )
        self.shell.stdin.flush()
        return dict(json.loads(self.shell.stdout.readline()))

    def kill(self) -> None:
        assert self.shell.stdin is not None and self.shell.stdout is not None
        self.shell.kill()
        self.shell.wait()
        self.shell.stdin.close()
        self.shell.stdout.close()


@pytest.fixture(scope="module")
def raylet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Raylet]:
    raylet = Raylet(tmp_path_factory.mktemp("r"))
    yield raylet
    raylet.kill()


def test_a_process_has_the_requested_arguments_and_environment(raylet: Raylet) -> None:
    answer = raylet.start(PYTHONPATH="/some/where", COLOUR="green")
    assert answer["is_forked"]
    assert answer["name"] == "__main__"
    assert answer["argv"] == [str(raylet.folder / "script.py"), f"--raylet-name={raylet.name}", "two words"]
    assert answer["cwd"] == str(raylet.folder)
    assert answer["path"] == [str(raylet.folder), "/some/where"]
    assert answer["env"]["COLOUR"] == "green"
    assert answer["group"] == answer["pid"], "ending the group of one ends no other"
    assert (raylet.folder / "stderr").read_text() == "to stderr\n"


def test_the_server_has_also_imported_what_the_environment_names(raylet: Raylet) -> None:
    answer = raylet.start()
    assert answer["is_forked"] and answer["is_preloaded"]
    assert str(raylet.extra.parent) not in answer["whole_path"]


@pytest.mark.matrix
def test_a_launcher_that_does_not_wait_starts_interpreters_until_the_server_is_warm(tmp_path: Path) -> None:
    raylet = Raylet(tmp_path)
    try:
        first = raylet.start(option=launch.IF_WARM)
        assert not first["is_forked"] and first["argv"][-1] == "two words"
        server = raylet.start()["parent"]  # waits for the server that the first launch has started
        later = raylet.start(option=launch.IF_WARM)
        assert later["is_forked"] and later["parent"] == server
    finally:
        raylet.kill()


def test_another_version_of_what_is_preloaded_has_another_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["script.py", "--raylet-name=/tmp/raylet"]
    monkeypatch.setenv(PRELOAD, preload("extra.part", tmp_path))
    address = launch.address_of(argv)
    (tmp_path / "part.py").touch()
    monkeypatch.setenv(PRELOAD, preload("extra.part", tmp_path))
    assert launch.address_of(argv) != address


def test_processes_share_no_state(raylet: Raylet) -> None:
    first, second = raylet.start(COLOUR="green"), raylet.start()
    assert first["parent"] == second["parent"], "of the same server"
    assert "COLOUR" not in second["env"]
    assert not set(first["numbers"]) & set(second["numbers"])


def test_without_a_raylets_socket_an_interpreter_is_started(raylet: Raylet, tmp_path: Path) -> None:
    assert not raylet.start(raylet=str(tmp_path / ("long" * 40)))["is_forked"]
    assert not raylet.start(raylet=str(tmp_path / "missing" / "raylet"))["is_forked"]


def test_a_request_whose_client_has_gone_starts_no_process_and_does_not_end_the_server(raylet: Raylet) -> None:
    server = raylet.start()["parent"]
    [address] = [path for path in raylet.folder.glob("raylet.shoal-????????") if _serves(server, path)]
    os.kill(server, signal.SIGSTOP)  # as if it still imported
    (raylet.folder / "orphan.py").write_text(f"open({str(raylet.folder / 'orphan')!r}, 'w').close()")
    request = json.dumps({"argv": [str(raylet.folder / "orphan.py")], "env": {}, "cwd": str(raylet.folder)})
    with launch.connect(str(address)) as connection, open(os.devnull, "r+b") as nothing:  # noqa: PTH123
        socket.send_fds(connection, [request.encode()], [nothing.fileno()] * 3)
    os.kill(server, signal.SIGCONT)
    assert [raylet.start()["parent"] for _ in range(2)] == [server] * 2
    assert not (raylet.folder / "orphan").exists()


def test_silent_and_malformed_clients_neither_block_nor_end_the_server(raylet: Raylet) -> None:
    server = raylet.start()["parent"]
    [address] = [path for path in raylet.folder.glob("raylet.shoal-????????") if _serves(server, path)]
    descriptors = len(os.listdir(f"/proc/{server}/fd"))  # noqa: PTH208
    good = {"argv": ["x"], "env": {}, "cwd": "/"}
    wrong = [b"not JSON", b"[" * 100_000, b"[]", b"{}", b"\xff"] + [
        json.dumps(good | change).encode()
        for change in ({"argv": []}, {"argv": [1]}, {"argv": "x"}, {"env": {"A": 1}}, {"env": []}, {"cwd": None})
    ]
    with launch.connect(str(address)), open(os.devnull, "r+b") as nothing:  # noqa: PTH123
        for message in wrong:
            with launch.connect(str(address)) as connection:
                socket.send_fds(connection, [message], [nothing.fileno()] * 3)
                assert connection.recv(32) == b""
        with launch.connect(str(address)) as connection:
            connection.send(json.dumps(good).encode())
            assert connection.recv(32) == b"", "without streams"
        answer = raylet.start()
        assert answer["is_forked"] and answer["parent"] == server
        assert len(os.listdir(f"/proc/{server}/fd")) <= descriptors + 1, "only the silent client's"  # noqa: PTH208


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_client_of_another_user_is_refused(raylet: Raylet) -> None:
    server = raylet.start()["parent"]
    [address] = [path for path in raylet.folder.glob("raylet.shoal-????????") if _serves(server, path)]
    outsider = f"""
import json, os, socket
os.setuid(65534)  # before it connects: the kernel notes the user at that moment
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect({str(address)!r})
request = json.dumps({{"argv": ["x"], "env": {{}}, "cwd": "/"}}).encode()
socket.send_fds(connection, [request], [0, 1, 2])
try:
    print(connection.recv(32))
except ConnectionResetError:  # the server has not read the request
    print(b"")
"""
    folders = [raylet.folder, *raylet.folder.parents]
    modes = [(folder, folder.stat().st_mode) for folder in folders if folder.stat().st_uid == 0]
    try:
        for folder, mode in modes:
            folder.chmod(mode | 0o011)
        address.chmod(0o666)
        found = subprocess.run([sys.executable, "-I", "-S", "-c", outsider], capture_output=True, text=True)
    finally:
        for folder, mode in modes:
            folder.chmod(mode)
        address.chmod(0o600)
    assert found.stdout == "b''\n", found.stderr
    assert raylet.start()["parent"] == server


def test_of_too_many_silent_clients_the_oldest_is_disconnected(raylet: Raylet) -> None:
    server = raylet.start()["parent"]
    [address] = [path for path in raylet.folder.glob("raylet.shoal-????????") if _serves(server, path)]
    silent = [launch.connect(str(address)) for _ in range(MAX_WAITING + 2)]
    try:
        assert [connection.recv(32) for connection in silent[:2]] == [b"", b""]
        assert raylet.start()["parent"] == server
    finally:
        for connection in silent:
            connection.close()


@pytest.mark.matrix
def test_a_killed_server_is_restarted(raylet: Raylet) -> None:
    before = raylet.start()["parent"]
    server = os.pidfd_open(before)
    os.kill(before, signal.SIGKILL)
    assert _ends(server)
    after = raylet.start()
    assert after["is_forked"]
    assert after["parent"] != before


_LEAVES_CHILDREN = """
import json, os, signal, subprocess, sys
sleep = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(1000)"]
here = subprocess.Popen(sleep, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
session = subprocess.Popen(sleep, start_new_session=True, env={}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
reader, writer = os.pipe()
if os.fork() == 0:
    os.setsid()
    daemon = os.fork()
    if daemon:
        os.write(writer, str(daemon).encode())
        os._exit(0)
    os.close(1)
    signal.pause()
daemon = int(os.read(reader, 32))
os.wait()
print(json.dumps({"children": [here.pid, session.pid, daemon], "parent": os.getppid(), "pid": os.getpid()}), flush=True)
signal.pause()
"""


class Leaving:
    """Raylets of one node whose processes start children that nobody ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.raylets: list[Raylet] = []
        self.pids: list[int] = []

    def start(self, program: ModuleType = launch, option: str = "") -> dict[str, Any]:
        folder = self._folder / str(len(self.raylets))
        folder.mkdir()
        self.raylets.append(Raylet(folder))
        (folder / "script.py").write_text(_LEAVES_CHILDREN)
        first = self.raylets[0]
        same = {PRELOAD: first.preload}  # with another one the node has another server
        started = self.raylets[-1].start(raylet=first.name, program=program, option=option, **same)
        self.pids += [started["pid"], *started["children"]]
        return started


@pytest.fixture
def leaving(tmp_path: Path) -> Iterator[Leaving]:
    leaving = Leaving(tmp_path)
    yield leaving
    for pid in leaving.pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for raylet in leaving.raylets:
        raylet.kill()


def test_children_of_a_killed_process_end_in_whatever_session(leaving: Leaving) -> None:
    other = leaving.start()
    for program in (launch, idle):
        killed = leaving.start(program)
        opened = [os.pidfd_open(pid) for pid in killed["children"]]
        os.kill(killed["pid"], signal.SIGKILL)
        ended = [_ends(child) for child in opened]
        assert all(ended), program
        states = [_state_of(pid) for pid in other["children"]]
        assert states == ["S"] * len(states), "those of another process live on"


def test_the_server_and_its_processes_outlive_the_interpreter_whose_launcher_started_it(leaving: Leaving) -> None:
    """The launcher does not wait for the server that it starts, and becomes the guardian of an interpreter."""
    interpreter = leaving.start(option=launch.IF_WARM)
    forked = leaving.start()
    guardian = os.pidfd_open(interpreter["parent"])
    os.kill(interpreter["pid"], signal.SIGKILL)
    assert _ends(guardian)
    lives = [_state_of(pid) for pid in (forked["parent"], forked["pid"], *forked["children"])]
    assert lives == ["S"] * len(lives)


def test_an_actor_ends_with_its_raylet(tmp_path: Path) -> None:
    raylet = Raylet(tmp_path)
    server = os.pidfd_open(raylet.start()["parent"])
    raylet.kill()
    assert _ends(server)
    assert not list(tmp_path.glob("raylet.shoal-????????"))


def test_changed_code_has_another_address(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["script.py", "--raylet-name=/tmp/raylet"]
    address = launch.address_of(argv)
    assert address.startswith("/tmp/raylet.shoal-")
    assert launch.address_of(argv) == address
    monkeypatch.setattr(launch, "code_version", lambda: (1, 1))
    assert launch.address_of(argv) != address


@pytest.mark.parametrize(("fork", "start"), [(True, ["-I", "-S", launch.__file__]), (False, [idle.__file__])])
def test_a_shell_can_run_the_command_for_ray(fork: bool, start: list[str]) -> None:
    executable = py_executable(fork=fork)
    assert executable is not None
    answer = subprocess.run(["bash", "-c", f"echo {executable}"], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == [sys.executable, *start]


def test_a_new_interpreter_has_the_requested_arguments(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    asked = [sys.executable, idle.__file__, str(script), "two words"]
    done = subprocess.run(asked, capture_output=True, text=True, cwd=tmp_path)
    seen = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (3, "to stderr\n")
    assert (seen["argv"], seen["name"]) == ([str(script), "two words"], "__main__")
    assert seen["path"][0] == str(tmp_path)
    assert str(Path(idle.__file__).parent) not in seen["path"]


@pytest.mark.parametrize(
    ("titles", "is_ended"),
    [
        (["ray::IDLE"], True),
        (["python", "ray::IDLE"], True),
        (["ray::IDLE", "ray::WorkerActor.__init__", "ray::IDLE"], False),
        (["python"], False),
    ],
)
def test_an_unused_worker_ends(titles: list[str], is_ended: bool) -> None:
    """The last title stays. That of an actor lasts until it was seen."""
    program = (
        "import sys, threading; from ray._raylet import setproctitle; from shoal_workers.forkserver import idle\n"
        f"titles = {titles}\n"
        "setproctitle(titles[0])\n"
        "idle.end_when_idle(patience_s=2.0)\n"
        "[watch] = [thread for thread in threading.enumerate() if thread.name == 'shoal-idle']\n"
        "for title in titles[1:]:\n"
        "    setproctitle(title)\n"
        "    if 'Actor' in title:\n"
        "        watch.join()\n"
        "print(flush=True)\n"
        "sys.stdin.read()\n"
        "sys.exit(7)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        if is_ended:
            assert process.wait(60) == 0
        else:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(3.0)
            process.stdin.close()
            assert process.wait(60) == 7


def _serves(server: int, address: Path) -> bool:
    return str(address) in Path(f"/proc/{server}/cmdline").read_text().split("\0")


def _state_of(pid: int) -> str:
    """The letter with which the kernel names the state of a process; empty: there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except FileNotFoundError:
        return ""


def _ends(process: int) -> bool:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    try:
        return bool(poll.poll(60_000))
    finally:
        os.close(process)
