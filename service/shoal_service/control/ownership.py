"""Names of control planes, which tell another one on the same machine whether their process is certainly gone.

    HOST-PID-PLACE-START     place: the machine's boot and the pid namespace; start: the process's, in clock ticks

A lease outlives its owner by up to its time to live. One that was killed and started again need not wait for itself.
"""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path

_STATE, _START = 0, 19
"""Fields of /proc/PID/stat after the command's name."""
_NOWHERE = "nowhere"


def own_name() -> str:
    """Of this process; unique."""
    return f"{socket.gethostname()}-{os.getpid()}-{_place()}-{_started(os.getpid()) or 0}"


def is_gone(name: str) -> bool:
    """True only if a process of that name lived here, and does not any more. Of other machines nobody here can say."""
    parts = name.rsplit("-", 3)
    if len(parts) != 4 or not parts[1].isdecimal() or not parts[3].isdecimal():
        return False
    _, pid, place, start = parts
    return place == _place() != _NOWHERE and _started(int(pid)) != int(start)


def _place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        namespace = Path("/proc/self/ns/pid").readlink()
    except OSError:
        return _NOWHERE
    return hashlib.sha256(f"{boot}{namespace}".encode()).hexdigest()[:8]


def _started(pid: int) -> int | None:
    """When the living process of that pid began; None: there is none, or it only waits to be asked for its end."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[_STATE] in "ZX" else int(fields[_START])
