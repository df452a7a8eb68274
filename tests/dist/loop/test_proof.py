"""The proof of a loop beside its first steps: what it leaves behind, what it says, and what it is spared."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kit.processes.server import until
from shoal_workers.contract.layout import replicated
from shoal_workers.contract.messages import ExitKind
from shoal_workers.forkserver.orphans import parents

FILE = "tests/kit/loops/traces.py"


def run(make_job: Any, how: str, directory: Path, world_size: int = 2) -> tuple[list[str], list[int]]:
    """What a job that ends well has logged of its proof, and the pids of its workers."""
    directory.mkdir(exist_ok=True)
    spec = {"loop": {"file": FILE, "args": [how, str(directory)]}, "elasticity": {"max_workers": 2}}
    job = make_job(f"job-{how}", task=None, **spec)
    workers = job.workers(world_size)
    for worker in workers:
        worker.call("call", "shoal_workers.actor_process:use_named_temporary_directory")
        worker.call("call", "shoal_workers.forkserver.orphans:adopt_orphans")
    job.start(workers, layout=replicated(world_size))
    ends = [worker.exit() for worker in workers]
    assert [(end.kind, end.step) for end in ends] == [(ExitKind.FINISHED, 4)] * world_size, ends
    pids = [worker.pid for worker in workers]
    assert {pid: parent for pid, parent in parents().items() if parent in pids} == {}, "trials have ended"
    lines = [line.text for worker in workers for line in worker.new_logs() if "proven" in line.text]
    return lines, pids


def test_a_trial_writes_no_file_and_a_loop_that_must_write_is_said_to_be_unproven_once(
    make_job: Any, tmp_path: Path
) -> None:
    lines, pids = run(make_job, "anyone", tmp_path / "anyone")
    assert sorted(path.name for path in (tmp_path / "anyone").iterdir()) == sorted(map(str, pids))
    [line] = lines
    assert "the loop was not proven: a trial has failed: " in line and "Permission denied" in line
    lines, pids = run(make_job, "guarded", tmp_path / "guarded")
    assert [path.name for path in (tmp_path / "guarded").iterdir()] == [str(pids[0])]
    assert lines == [], "it is proven"


def test_a_loop_that_is_read_ahead_is_proven(make_job: Any, tmp_path: Path) -> None:
    assert run(make_job, "reads ahead", tmp_path)[0] == []


def test_a_group_that_breaks_leaves_no_process_of_a_trial(make_job: Any, tmp_path: Path) -> None:
    spec = {"loop": {"file": FILE, "args": ["waits", str(tmp_path)]}, "elasticity": {"max_workers": 1}}
    job = make_job("job-waits", task=None, **spec)
    [worker] = job.workers(1)
    worker.call("call", "shoal_workers.forkserver.orphans:adopt_orphans")
    generation = job.start([worker], layout=replicated(1))
    until(lambda: len(_below(worker.pid)) >= 4, "a reader of the worker; the trials, one that waits, and its reader")
    worker.call("interrupt", generation)
    assert worker.exit().kind is ExitKind.INTERRUPTED
    until(lambda: not _below(worker.pid), "none is left, nor its exit status")


def _below(pid: int) -> set[int]:
    """All processes below this one."""
    below, known = set[int](), parents()
    while more := {child for child, parent in known.items() if parent in {pid, *below}} - below:
        below |= more
    return below


def test_a_trial_sends_no_message(make_job: Any, tmp_path: Path) -> None:
    posts: list[str] = []

    class Webhook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posts.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(204)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Webhook) as server:
        (tmp_path / "port").write_text(str(server.server_port))
        threading.Thread(target=server.serve_forever).start()
        try:
            lines, _ = run(make_job, "posts", tmp_path)
        finally:
            server.shutdown()
    assert sorted(posts) == [str(step) for step in range(4) for _ in range(4)], "one for each micro-batch"
    assert lines == [], "it is proven"


@pytest.mark.parametrize("how", ["connects", "datagrams", "asyncio"])
def test_a_trial_connects_only_to_its_group_and_to_read_by_http(make_job: Any, tmp_path: Path, how: str) -> None:
    kind = socket.SOCK_DGRAM if how == "datagrams" else socket.SOCK_STREAM
    received: list[bytes] = []
    with socket.socket(socket.AF_INET, kind) as receiver:
        receiver.bind(("127.0.0.1", 0))
        (tmp_path / "port").write_text(str(receiver.getsockname()[1]))
        if kind == socket.SOCK_STREAM:
            receiver.listen(100)
        assert run(make_job, how, tmp_path)[0] == [], "it is proven"
        receiver.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                if kind == socket.SOCK_DGRAM:
                    received.append(receiver.recv(100))
                else:
                    with receiver.accept()[0] as connection:
                        connection.settimeout(10.0)
                        received.append(connection.recv(100))
    assert sorted(received) == sorted(b"%d;" % step for step in range(4) for _ in range(4)), "one per micro-batch"


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("large", "it has 50,000,004 parameters, and up to 50,000,000 are tried"),
        ("other", "a trial has ended: exit status 3"),
    ],
)
def test_a_loop_that_cannot_be_tried_trains_and_says_why_it_is_not_proven(
    make_job: Any, tmp_path: Path, how: str, why: str
) -> None:
    [line] = run(make_job, how, tmp_path, world_size=1)[0]
    assert line.strip().endswith(f"the loop was not proven: {why}")


def test_what_is_proven_is_remembered_for_the_same_program_and_arguments(make_job: Any, tmp_path: Path) -> None:
    proofs, num_files = tmp_path / "proofs", []
    for number, how in enumerate(("none", "none", "other arguments")):
        spec = {"loop": {"file": FILE, "args": [how, str(tmp_path)]}, "elasticity": {"max_workers": 2}}
        job = make_job(f"job-{number}", task=None, **spec)
        [worker] = job.workers(1)
        worker.call("call", "os:environ.update", {"SHOAL_PROOFS": str(proofs)})
        [end] = job.run([worker], layout=replicated(1))
        assert end.kind is ExitKind.FINISHED, end
        num_files.append(len(list(proofs.glob("*.json"))))
    assert num_files == [1, 1, 2]
    assert all('"outcome":"proven"' in path.read_text("utf-8") for path in proofs.glob("*.json"))
