"""engine/warm_memory.py in a process of its own: what is freed is made again without touching a page for the first
time."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import resource, torch
from shoal_workers.engine.warm_memory import keep_freed_memory
keep_freed_memory()

SIZES = [8] * 6

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def make():
    return [torch.empty(size << 20, dtype=torch.uint8).fill_(1) for size in SIZES]

for _ in range(3):
    make()
before = faults()
made = make()
print(faults() - before)
"""
PAGES_OF_ALL = 48 << 20 >> 12


def test_freed_memory_is_used_again() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    assert int(done.stdout) < PAGES_OF_ALL / 20
