"""Names of control planes, from which another one on the same machine can tell that the owner of a lease has ended.

    HOST-PID-SCOPE-START     scope: the machine's boot and the pid namespace; start: of the process, in clock ticks

A lease outlives its owner by up to its time to live. A control plane that was killed and started again does not wait
for its own old lease. Called by the control loop and by `shoal serve`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from pathlib import Path

from shoal_service.control.config import ControlConfig
from shoal_service.store.lease import Lease
from shoal_service.store.store import Store

_log = logging.getLogger(__name__)

_STATE, _START = 0, 19
"""Fields of /proc/PID/stat after the command's name."""
_NO_SCOPE = "none"


def own_name() -> str:
    """The unique name of this process."""
    return f"{socket.gethostname()}-{os.getpid()}-{_scope()}-{_started(os.getpid()) or 0}"


def is_gone(name: str) -> bool:
    """True only if a process of that name ran on this machine and has ended. False for other machines: unknown."""
    parts = name.rsplit("-", 3)
    if len(parts) != 4 or not parts[1].isdecimal() or not parts[3].isdecimal():
        return False
    _, pid, scope, start = parts
    return scope == _scope() != _NO_SCOPE and _started(int(pid)) != int(start)


def acquired(store: Store, config: ControlConfig, before: Lease | None, now: float) -> Lease | None:
    """The lease, renewed or taken; None while another control plane, which may be alive, holds it."""
    lease = store.acquire_lease(config.owner, ttl_s=config.lease_ttl_s, now=now)
    other = store.current_lease() if lease is None else None
    if other is not None and (is_gone(other.owner) or store.has_left(other.owner)):
        store.release_lease(other.owner)
        lease = store.acquire_lease(config.owner, ttl_s=config.lease_ttl_s, now=now)
    if lease is not None and before is None:
        fields = {"epoch": lease.epoch, "before": other.owner if other is not None else ""}
        _log.info("lease.taken", extra=fields)
    return lease


def _scope() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        namespace = Path("/proc/self/ns/pid").readlink()
    except OSError:
        return _NO_SCOPE
    return hashlib.sha256(f"{boot}{namespace}".encode()).hexdigest()[:8]


def _started(pid: int) -> int | None:
    """When the process with that pid started; None: there is none, or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[_STATE] in "ZX" else int(fields[_START])
