"""Twelve ways in which a program ends, all at the same place: `here(rank, group)` is called by every rank.

The variable END of the environment names the end. `zero` ... `execv` end rank 1, and its file END.import none of them.
"""

import os
import signal
import sys
import threading

import torch
import torch.distributed as dist

END = os.environ["END"]
if END == "import":
    import no_such_module  # noqa: F401


def here(rank):
    if END == "collective" and rank == 0:
        dist.recv(torch.ones(1), 1)
    if rank == 1:
        end()


def end():
    match END:
        case "zero":
            raise SystemExit(0)
        case "exception":
            raise ValueError("no such sample")
        case "thread":
            threading.Thread(target=threading.Event().wait).start()
            raise ValueError("no such sample")
        case "signal":
            os.kill(os.getpid(), signal.SIGALRM)
        case "os_exit":
            os._exit(3)
        case "text":
            raise SystemExit("no data")
        case "interrupt":
            raise KeyboardInterrupt
        case "memory":
            bytearray(1 << 60)
        case "collective":
            dist.recv(torch.ones(1), 0)
        case "outside":
            threading.Event().wait()
        case "execv":
            os.execv(sys.executable, [sys.executable, "-c", "raise SystemExit('no such program')"])
