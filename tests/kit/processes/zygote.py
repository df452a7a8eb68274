"""Imports torch and the engine once, then forks a ready worker process for every address that it reads from stdin.

A fork is ready after 15 ms, a new interpreter after two seconds. The zygote stays single-threaded, as forks require.
"""

import gc
import os
import runpy
import signal
import sys
from pathlib import Path

import torch._dynamo

import shoal_workers.engine.engine  # noqa: F401

HERE = Path(__file__).parent
TASKS = HERE.parent / "tasks"


def main():
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    sys.path[:0] = [str(TASKS), str(HERE.parents[1])]
    gc.collect()
    gc.freeze()  # a worker's own collection would visit everything that was imported, and copy its pages: 0.4 s
    print("ready", flush=True)
    for address in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            code = 1
            try:
                runpy.run_path(str(HERE / "worker_process.py"), init_globals={"ADDRESS": address.strip()})
                code = 0
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)


main()
