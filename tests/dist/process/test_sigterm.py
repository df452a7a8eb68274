"""A worker reacts to SIGTERM by itself; what its task forks ends on SIGTERM, as everywhere."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.dist

_PROGRAM = """
import os, signal, threading
from multiprocessing import Pool, Process
from shoal_workers.actor_process import on_sigterm

on_sigterm(lambda: print("a notice", flush=True))

def build_dataset():
    with Pool(2) as pool:  # left while its processes wait for work
        found = pool.apply(int, ("7",))
    child = Process(target=signal.pause)
    child.start()
    child.terminate()
    child.join()
    print(found, child.exitcode, flush=True)

thread = threading.Thread(target=build_dataset)
thread.start()
thread.join()
os.kill(os.getpid(), signal.SIGTERM)
print(signal.pthread_sigmask(signal.SIG_BLOCK, ()), flush=True)
"""


def test_forked_children_end_on_sigterm_and_the_worker_does_not() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == [f"7 {-signal.SIGTERM}", "a notice", "set()"]
