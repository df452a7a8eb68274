"""Confines this process for trials of a user's program: it can read and compute, and writes to one directory only.

    files        Landlock refuses writes outside of that directory, also those of C libraries (landlock(7))
    connections  inherited ones are closed here, so that peers of the worker notice its death at once
    output       dropped, and experiment loggers are switched off
    messages     HTTP requests of Python's own client that do more than read (webhooks), and all other connections of
                 Python code but those of the group (mail, aiohttp, databases, datagrams), are refused
    the machine  low priority; first to be killed if memory is short; killed when the worker dies

Cannot be undone: call it in a process that was forked for it.
"""

from __future__ import annotations

import ctypes
import http.client
import logging
import multiprocessing
import os
import signal
import socket
import struct
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""Numbers of Landlock's system calls."""
_CREATE_RULESET_VERSION, _RULE_PATH_BENEATH = 1, 1
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_WRITES = sum(1 << bit for bit in (1, *range(4, 13)))
"""Rights of version 1 to write a file (1), remove (4, 5) and make any kind of file (6 to 12)."""
_RENAME_ACROSS, _TRUNCATE = 1 << 13, 1 << 14
"""Rights of versions 2 and 3."""
_WRITABLE = ("/dev",)
"""For shared memory, and for devices such as /dev/null."""
_NICENESS = 5
"""Low, because the worker waits for the trials, perhaps on a machine that is busy with other processes."""
_LOGGERS = {"WANDB_MODE": "disabled", "COMET_MODE": "disabled", "NEPTUNE_MODE": "debug", "CLEARML_OFFLINE_MODE": "1"}
_READ_METHODS = ("GET", "HEAD", "OPTIONS")
_SENDING = ("socket.connect", "socket.sendto", "socket.sendmsg")
"""Events of sys.audit; the second argument is the address, None on a connection."""
_GROUP = f"{Path(__file__).parents[1] / 'group'}{os.sep}"
_DIRECTORY_VARIABLES = ("TMPDIR", "MLFLOW_TRACKING_URI", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "MPLCONFIGDIR")


def confine(directory: Path, *, parent: int, kept: int) -> None:
    """Confine this process, which must have one thread only.

    Args:
        directory: the only directory in which the process may write, besides /dev.
        parent: process id of the worker that has forked this process.
        kept: file descriptor that stays open.

    Raises:
        OSError: this kernel has no Landlock.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the worker died before it could be watched
        os._exit(1)
    os.setsid()
    os.nice(_NICENESS)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    null = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  (names are numbers)
        with suppress(OSError):
            if int(name) not in (kept, null):
                os.fstat(int(name))
                # replaced, not closed: otherwise an object that is deleted later could close a new file of this number.
                os.dup2(null, int(name))
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115  (as long as the process lives)
    logging.disable(logging.CRITICAL)
    os.environ.update({**_LOGGERS, **dict.fromkeys(_DIRECTORY_VARIABLES, str(directory))})
    tempfile.tempdir, sys.dont_write_bytecode = str(directory), True
    # processes that read data ahead put their sockets there; the worker's directory cannot be written
    multiprocessing.current_process()._config["tempdir"] = str(directory)  # type: ignore[attr-defined]
    _refuse_messages()
    _write_only_below(str(directory), *_WRITABLE)


def _refuse_messages() -> None:
    """Refuse what Python code could send. C libraries that connect by themselves, as those of gRPC do, are not held."""
    # data may be read over a network: requests, urllib and boto use this client
    put_request = http.client.HTTPConnection.putrequest

    def read_only(connection: http.client.HTTPConnection, method: str, *arguments: Any, **options: Any) -> None:
        if method.upper() not in _READ_METHODS:
            raise ConnectionRefusedError(f"a trial of a loop sends no {method} to {connection.host}")
        put_request(connection, method, *arguments, **options)

    def refuse_others(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _SENDING or arguments[0].family not in (socket.AF_INET, socket.AF_INET6):
            return
        address = arguments[1]
        if address is not None and not _is_allowed(sys._getframe(1)):
            raise ConnectionRefusedError(
                f"a trial of a loop sends nothing to {address[0]}:{address[1]}; it reads by Python's HTTP client only"
            )

    http.client.HTTPConnection.putrequest = read_only  # type: ignore[assignment,method-assign]
    sys.addaudithook(refuse_others)


def _is_allowed(frame: FrameType | None) -> bool:
    """True if the group or an HTTP connection connects in this frame or in one above."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_GROUP):
            return True
        if isinstance(frame.f_locals.get("self"), http.client.HTTPConnection):
            return True
        frame = frame.f_back
    return False


def _write_only_below(*directories: str) -> None:
    """Refuse writes outside of the directories by Landlock. Raises OSError if the kernel has none."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(number: int, *arguments: object) -> int:
        if (result := libc.syscall(number, *arguments)) < 0:
            raise OSError(ctypes.get_errno(), "the kernel has no Landlock, so the trial could write files")
        return int(result)

    version = call(_CREATE_RULESET, None, ctypes.c_size_t(0), _CREATE_RULESET_VERSION)
    writes = _WRITES | (_RENAME_ACROSS if version > 1 else 0) | (_TRUNCATE if version > 2 else 0)
    rules = call(_CREATE_RULESET, struct.pack("Q", writes), ctypes.c_size_t(8), 0)
    for directory in directories:
        descriptor = os.open(directory, os.O_PATH | os.O_CLOEXEC)
        call(_ADD_RULE, rules, _RULE_PATH_BENEATH, struct.pack("=Qi", writes, descriptor), 0)
        os.close(descriptor)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call(_RESTRICT_SELF, rules, 0)
    os.close(rules)
