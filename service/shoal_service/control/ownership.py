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
from shoal_service.store import Lease, Store

_log = logging.getLogger(__name__)

_STATE, _START = 0, 19
"""Indexes of fields of /proc/PID/stat after the command's name."""
_NO_SCOPE = "none"


def own_name() -> str:
    """The unique name of this process."""
    return f"{socket.gethostname()}-{os.getpid()}-{_scope()}-{_started(os.getpid()) or 0}"


def is_gone(name: str) -> bool:
    """Return whether the process with this name ran on this machine and has ended; False if it ran on another
    machine."""
    parts = name.rsplit("-", 3)
    if len(parts) != 4 or not parts[1].isdecimal() or not parts[3].isdecimal():
        return False
    _, pid, scope, start = parts
    return scope == _scope() != _NO_SCOPE and _started(int(pid)) != int(start)


class LeaseWatch:
    """Watches whether another owner renews the lease, by this process's own monotonic time: wall clocks differ, and are
    set.

    The expiry in the database is a wall-clock time, and decides only about an owner that this process has not seen long
    enough: it is not waited for after a clock was set back, and no clock that was set forward takes a lease from an
    owner that renews it (as Kubernetes elects its leaders).
    """

    def __init__(self) -> None:
        self._seen: Lease | None = None
        self._changed_mono = 0.0
        self._is_renewed = False

    def see(self, lease: Lease, mono: float) -> None:
        """Takes the lease of another owner, as the database has it now."""
        if lease != self._seen:
            self._is_renewed = self._seen is not None and self._seen.owner == lease.owner
            self._seen, self._changed_mono = lease, mono

    def is_alive(self, ttl_s: float, mono: float) -> bool:
        """Return whether the lease was seen to be renewed within this time."""
        return self._is_renewed and mono - self._changed_mono < ttl_s

    def is_silent(self, ttl_s: float, mono: float) -> bool:
        """Return whether the lease was first seen, or last renewed, at least `ttl_s` seconds ago."""
        return self._seen is not None and mono - self._changed_mono >= ttl_s


def acquired(
    store: Store, config: ControlConfig, before: Lease | None, watch: LeaseWatch, *, now: float, mono: float
) -> Lease | None:
    """Acquires the lease: renews or takes it. None while another control plane, which may be alive, holds it."""
    other, ttl_s = store.read_lease(), config.lease_ttl_s
    if other is not None and other.owner != config.owner:
        watch.see(other, mono)
        if is_gone(other.owner) or store.is_owner_gone(other.owner) or watch.is_silent(ttl_s, mono):
            store.release_lease(other.owner)
        elif watch.is_alive(ttl_s, mono):
            return None
    lease = store.acquire_lease(config.owner, ttl_s=ttl_s, now=now)
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
    """When the process with that pid started; None if there is none, or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[_STATE] in "ZX" else int(fields[_START])
