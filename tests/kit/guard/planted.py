"""Tests with a planted fault each, for a pytest whose output a test reads: kit/guard/guard.py, tests/conftest.py."""

import ctypes
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest


def _wait_for_ever() -> None:
    threading.Event().wait()


def test_leaves_a_process() -> None:
    """Its parent has ended, so no process waits for it."""
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    middle = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"
    subprocess.run([sys.executable, "-c", middle, *sleep], check=True)


@pytest.fixture
def child() -> Iterator[None]:
    program = [sys.executable, "-S", "-c", "def in_the_child(): input()\nin_the_child()"]
    with subprocess.Popen(program, stdin=subprocess.PIPE) as process:
        yield
        process.communicate(b"\n")


@pytest.mark.timeout(2)
@pytest.mark.usefixtures("child")
def test_hangs_beside_another_process() -> None:
    _wait_for_ever()


@pytest.mark.timeout(1)
def test_hangs_in_native_code() -> None:
    """It holds the GIL and goes on waiting after a signal, so no signal handler of Python's runs."""
    mutex = ctypes.create_string_buffer(256)
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)
