"""Stacks of a training thread: of this process, and of a stopped one by the real py-spy."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shoal_workers import stacks

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
        found, module = stacks.own_stack()
    finally:
        end.set()
        thread.join()
    names = [frame.function for frame in found]
    assert names[-1] == "<lambda>" and "forward" in names and "run" not in names
    assert module == "1.0"
    assert any(frame.file.startswith("site-packages/torch/nn/modules/") for frame in found)


def test_without_a_training_thread_there_are_no_frames() -> None:
    assert stacks.own_stack() == ((), "")


def test_a_stopped_process_is_read_from_outside(stopped: int) -> None:
    if stacks.py_spy() is None:
        pytest.skip("py-spy is not installed")
    try:
        found = stacks.stack_of(stopped)
    except stacks.StackUnavailable as error:
        pytest.skip(f"no permission to read another process: {error}")
    assert [(frame.function, frame.file) for frame in found] == [("stuck", "<string>")]


def test_a_process_that_is_gone_is_named() -> None:
    with pytest.raises(stacks.StackUnavailable, match="py-spy"):
        stacks.stack_of(2**22 + 1)
    assert stacks.of_worker(os.getpid()) == f"process {os.getpid()} has ended"  # it is no worker


def test_a_process_that_a_signal_has_stopped_is_known_as_stopped(stopped: int) -> None:
    os.waitpid(stopped, os.WUNTRACED)  # until the signal has arrived
    assert stacks.is_stopped(stopped)
    assert not stacks.is_stopped(os.getpid())
    assert not stacks.is_stopped(1 << 22)
