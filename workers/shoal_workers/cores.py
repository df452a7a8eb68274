"""How many cores this process may use: its affinity, and the quotas of its control groups. Called by `data.prepare` and
by the server that starts a cluster.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from shoal_workers.cgroups import MOUNT, PROC, ControlGroup, groups_of


def allowed_cores(proc: Path = PROC, mount: Path = MOUNT) -> int:
    """At least one; a quota of 2.5 cores is 2."""
    quotas = [quota for group in groups_of("cpu", proc, mount) if (quota := _quota(group)) is not None]
    return max(1, int(min([len(os.sched_getaffinity(0)), *quotas])))


def _quota(group: ControlGroup) -> float | None:
    """Cores; None: the group is not there, or has no limit."""
    with suppress(OSError, ValueError):
        if group.is_v2:
            quota, period = (group.directory / "cpu.max").read_text().split()
        else:
            quota = (group.directory / "cpu.cfs_quota_us").read_text()
            period = (group.directory / "cpu.cfs_period_us").read_text()
        if int(quota) > 0:  # "max" is a ValueError, -1 no limit
            return int(quota) / int(period)
    return None
