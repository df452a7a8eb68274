"""Makes this process one that may read and compute, and leaves no trace: for trials of a program beside the job.

    files        Linux's Landlock refuses all writes outside of one directory, also those of C libraries (landlock(7))
    connections  those that were inherited are replaced: the death of the worker shows on them at once
    output       dropped; loggers that send it elsewhere are told to be off
    messages     HTTP requests of Python's own client that are more than reading, and mail, are refused: webhooks
    the machine  a low priority, and the first to be killed if memory is short; dies with the worker

Cannot be undone: call it in a process that was forked for it.
"""

from __future__ import annotations

import ctypes
import http.client
import logging
import multiprocessing
import os
import signal
import struct
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _BENEATH = 1, 1
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_FIRST_WRITES = sum(1 << bit for bit in (1, *range(4, 13)))
"""Write, remove, and make of any kind. Version 2 adds links (13), version 3 truncation (14)."""
_WRITABLE = ("/dev",)
"""Shared memory, and what drops what is written."""
_NICENESS = 5
"""Not more: the worker may already wait for it on a machine that is busy with others."""
_LOGGERS = {"WANDB_MODE": "disabled", "COMET_MODE": "disabled", "NEPTUNE_MODE": "debug", "CLEARML_OFFLINE_MODE": "1"}
_READING = ("GET", "HEAD", "OPTIONS")
_FOLDERS = ("TMPDIR", "MLFLOW_TRACKING_URI", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "MPLCONFIGDIR")


def confine(directory: Path, *, parent: int, kept: int) -> None:
    """Call it while the process has one thread.

    Args:
        directory: where it may write.
        parent: the process that has forked this one.
        kept: a file descriptor that stays open.

    Raises:
        OSError: this kernel has no Landlock.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before
        os._exit(1)
    os.setsid()
    os.nice(_NICENESS)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  (names are numbers)
        with suppress(OSError):
            if int(name) not in (kept, nothing):
                os.fstat(int(name))
                # Not closed: an object that is deleted later would close another file of the same number.
                os.dup2(nothing, int(name))
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115  (as long as the process lives)
    logging.disable(logging.CRITICAL)
    os.environ.update({**_LOGGERS, **dict.fromkeys(_FOLDERS, str(directory))})
    tempfile.tempdir, sys.dont_write_bytecode = str(directory), True
    # Processes that read ahead put sockets there; that of the worker cannot be written.
    multiprocessing.current_process()._config["tempdir"] = str(directory)  # type: ignore[attr-defined]
    _send_nothing()
    _write_only_below(str(directory), *_WRITABLE)


def _send_nothing() -> None:
    """Data may be read over a network, so connections are allowed. requests, urllib and boto use this client."""
    put_request = http.client.HTTPConnection.putrequest

    def read_only(connection: http.client.HTTPConnection, method: str, *arguments: Any, **options: Any) -> None:
        if method.upper() not in _READING:
            raise ConnectionRefusedError(f"a trial of a loop sends no {method} to {connection.host}")
        put_request(connection, method, *arguments, **options)

    def refuse_mail(event: str, arguments: tuple[object, ...]) -> None:
        if event == "smtplib.connect":
            raise ConnectionRefusedError("a trial of a loop sends no mail")

    http.client.HTTPConnection.putrequest = read_only  # type: ignore[assignment,method-assign]
    sys.addaudithook(refuse_mail)


def _write_only_below(*directories: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)

    def call(number: int, *arguments: object) -> int:
        if (result := libc.syscall(number, *arguments)) < 0:
            raise OSError(ctypes.get_errno(), "the kernel has no Landlock, so the trial could write files")
        return int(result)

    version = call(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION_FLAG)
    writes = _FIRST_WRITES | (1 << 13 if version > 1 else 0) | (1 << 14 if version > 2 else 0)
    rules = call(_CREATE_RULESET, struct.pack("Q", writes), ctypes.c_size_t(8), 0)
    for directory in directories:
        folder = os.open(directory, os.O_PATH | os.O_CLOEXEC)
        call(_ADD_RULE, rules, _BENEATH, struct.pack("=Qi", writes, folder), 0)
        os.close(folder)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call(_RESTRICT_SELF, rules, 0)
    os.close(rules)
