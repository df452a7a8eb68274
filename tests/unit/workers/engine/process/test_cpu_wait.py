"""A thread that is ready to run and has no CPU knows it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal_workers.engine.process.use_meter import CpuWait


@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="the kernel does not tell: no /proc/self/schedstat"
)
def test_the_time_without_a_cpu_grows_while_another_program_uses_it() -> None:
    before = os.sched_getaffinity(0)
    wait, cpu = CpuWait(), min(before)
    hog = subprocess.Popen(
        [sys.executable, "-c", "print('busy', flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
    )
    try:
        assert hog.stdout is not None and hog.stdout.readline() == b"busy\n"
        os.sched_setaffinity(hog.pid, {cpu})
        os.sched_setaffinity(0, {cpu})
        wait.take()
        begun = time.thread_time()
        while time.thread_time() - begun < 0.05:
            pass
        assert wait.take() > 0.01
    finally:
        os.sched_setaffinity(0, before)
        hog.kill()
        hog.wait()
        hog.stdout.close()
        wait.close()
    assert wait.seconds() == 0.0
