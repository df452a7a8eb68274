"""Tests that never end, for a pytest that is interrupted: they start what the tests of this repository start.

READY=FILE pytest interrupted_run.py::NAME        FILE appears once all of it runs
"""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from kit.postgres import running_postgres
from kit.processes.chromium import chromium

_SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


def _ready() -> None:
    Path(os.environ["READY"]).write_text(" ")
    time.sleep(600)


def test_with_children() -> None:
    """One in a session of its own, one whose parent has ended, and a fork that executes no other program."""
    subprocess.Popen(_SLEEP, start_new_session=True)
    middle = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"
    subprocess.run([sys.executable, "-c", middle, *_SLEEP], check=True)
    fork = os.fork()
    if fork == 0:
        time.sleep(600)
    Path(os.environ["READY"]).with_name("fork").write_text(str(fork))
    _ready()


def test_with_a_browser_and_a_database() -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(chromium(os.environ["CHROMIUM"], os.environ["CHROMEDRIVER"])).open("about:blank")
        stack.enter_context(running_postgres())
        _ready()
