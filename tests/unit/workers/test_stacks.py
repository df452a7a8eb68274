"""Processes of a node: stacks of threads, what a killed worker leaves, the lock of the node, and the path of code."""

import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing.util import get_temp_dir
from pathlib import Path

import pytest
import torch

import shoal_workers
from shoal_workers import stacks
from shoal_workers.actor_process import use_named_temporary_directory
from shoal_workers.data.prepare import PreparePhase, PrepareProgress
from shoal_workers.node_lock import node_lock

ACTOR = """
import time

class WorkerActor:
    def run(self, wait):
        wait()
"""
PROGRAM = """
import sys, time
sys.path.insert(0, sys.argv[1])
import runpy
actor = runpy.run_path(sys.argv[1] + "/shoal_workers/actor.py")
def stuck():
    print("stuck", flush=True)
    while True:
        time.sleep(100)
actor["WorkerActor"]().run(stuck)
"""


@pytest.fixture
def actor_file(tmp_path: Path) -> Path:
    """A file with the name of the worker's actor, whose `run` calls what it is given."""
    path = tmp_path / "shoal_workers" / "actor.py"
    path.parent.mkdir()
    path.write_text(ACTOR)
    return path


@pytest.fixture
def stopped(actor_file: Path, tmp_path: Path) -> Iterator[int]:
    """The pid of a process that is in `run`, and stopped."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "stuck\n"
        os.kill(process.pid, signal.SIGSTOP)
        try:
            yield process.pid
        finally:
            process.kill()


def test_the_frames_below_run_are_the_training_threads(actor_file: Path) -> None:
    began, end = threading.Event(), threading.Event()

    class Block(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            began.set()
            end.wait()
            return x

    model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Sequential(Block()))
    namespace: dict[str, type] = {}
    exec(compile(ACTOR, str(actor_file), "exec"), namespace)
    run = namespace["WorkerActor"]().run
    thread = threading.Thread(target=run, args=(lambda: model(torch.zeros(1)),))
    thread.start()
    try:
        assert began.wait(60)
        found, module = stacks.read_local_stack()
    finally:
        end.set()
        thread.join()
    names = [frame.function for frame in found]
    assert names[-1] == "<lambda>" and "forward" in names and "run" not in names
    assert module == "1.0"
    assert any(frame.file.startswith("site-packages/torch/nn/modules/") for frame in found)


def test_without_a_training_thread_there_are_no_frames() -> None:
    assert stacks.read_local_stack() == ((), "")


def test_a_stopped_process_is_read_from_outside(stopped: int) -> None:
    if stacks.find_py_spy() is None:
        pytest.skip("py-spy is not installed")
    try:
        found = stacks.read_stack(stopped)
    except stacks.StackUnavailable as error:
        pytest.skip(f"no permission to read another process: {error}")
    assert [(frame.function, frame.file) for frame in found] == [("stuck", "<string>")]


def test_a_process_that_is_gone_is_named() -> None:
    with pytest.raises(stacks.StackUnavailable, match="py-spy"):
        stacks.read_stack(2**22 + 1)
    assert stacks.of_worker(os.getpid()) == f"process {os.getpid()} has ended"  # it is no worker


def test_a_process_that_a_signal_has_stopped_is_known_as_stopped(stopped: int) -> None:
    os.waitpid(stopped, os.WUNTRACED)  # until the signal has arrived
    assert stacks.is_stopped(stopped)
    assert not stacks.is_stopped(os.getpid())
    assert not stacks.is_stopped(1 << 22)


def test_the_temporary_directories_of_dead_workers_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    monkeypatch.delitem(config, "tempdir", raising=False)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    prefix = f"pymp-shoal-{Path('/proc/self/ns/pid').stat().st_ino}-"
    (tmp_path / f"{prefix}{dead.pid}-abc").mkdir()
    (tmp_path / f"{prefix}{os.getppid()}-abc").mkdir()
    (tmp_path / f"pymp-shoal-1-{dead.pid}-abc").mkdir()
    use_named_temporary_directory()
    names = {path.name.rpartition("-")[0] for path in tmp_path.iterdir()}
    assert names == {f"{prefix}{os.getpid()}", f"{prefix}{os.getppid()}", f"pymp-shoal-1-{dead.pid}"}
    assert Path(get_temp_dir()).parent == tmp_path and f"-{os.getpid()}-" in get_temp_dir()


_PATIENCE_S = 60.0


def test_a_process_that_waits_sees_the_progress_of_the_holder(tmp_path: Path) -> None:
    path = tmp_path / "text.lock"
    seen: queue.Queue[str] = queue.Queue()

    def wait() -> None:
        with node_lock(path, seen.put):
            seen.put("locked")

    with node_lock(path, seen.put) as say:
        waiter = threading.Thread(target=wait)
        waiter.start()
        assert seen.get(timeout=_PATIENCE_S) == "", "nothing is known yet"
        say("tokenising 45 %")
        assert seen.get(timeout=_PATIENCE_S) == "tokenising 45 %"
    assert seen.get(timeout=_PATIENCE_S) == "locked"
    waiter.join()
    assert seen.empty()


def test_a_free_lock_is_taken_without_a_word(tmp_path: Path) -> None:
    seen: list[str] = []
    with node_lock(tmp_path / "text.lock", seen.append):
        assert seen == []


def test_a_waiting_preparation_is_described_with_the_progress_of_the_other_process() -> None:
    known = PrepareProgress(PreparePhase.WAITING, of_holder="tokenising 45 %")
    assert known.describe() == "another process prepares the text: tokenising 45 %"
    assert PrepareProgress(PreparePhase.WAITING).describe() == "another process prepares the text"


ROOT = Path(shoal_workers.__path__[0]).parent
_PROGRAM = """
import sys
sys.path.insert(0, {root!r})
from shoal_workers.forkserver.code_path import admit_code, leave_out_code, restore_code
leave_out_code()
import secrets
print(hasattr(secrets, "token_hex"))
if {is_script}:
    del sys.modules["secrets"]
    sys.path.insert(0, "folder")
    restore_code()
else:
    print(admit_code())
import secrets, resource, yaml, mine
print(hasattr(secrets, "token_hex"), hasattr(resource, "getrusage"), hasattr(yaml, "safe_load"), mine.VALUE)
"""


def _run(folder: Path, *, is_script: bool) -> list[str]:
    for name in ("secrets", "resource", "yaml", "mine"):
        (folder / f"{name}.py").write_text("VALUE = 7\n")
    program = folder / "elsewhere" / "program.py"
    program.parent.mkdir()
    program.write_text(_PROGRAM.format(root=str(ROOT), is_script=is_script))
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=folder,
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_a_task_or_loop_gets_its_modules_but_for_names_that_are_taken(tmp_path: Path) -> None:
    assert _run(tmp_path, is_script=False) == ["True", "['resource', 'secrets', 'yaml']", "True True True 7"]


def test_a_script_gets_all_of_its_modules(tmp_path: Path) -> None:
    assert _run(tmp_path, is_script=True) == ["True", "False False False 7"]
