"""The machine that measured the figures, in words."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import version
from pathlib import Path


def describe() -> dict[str, str]:
    return {
        "cpu": f"{len(os.sched_getaffinity(0))} cores, {_cpu_model()}",
        "memory": f"{_memory_gib():.0f} GiB",
        "system": f"{platform.system()} {platform.release().split('-')[0]}, Python {platform.python_version()}",
        "software": f"torch {version('torch')}, ray {version('ray')}, gloo, 1 thread per process",
    }


def _cpu_model() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found.group(1) if found else platform.machine()


def _memory_gib() -> float:
    found = re.search(r"^MemTotal:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(found.group(1)) / 2**20 if found else 0.0
