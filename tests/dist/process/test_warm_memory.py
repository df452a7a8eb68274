"""engine/process/warm_memory.py in a separate process: freed memory is allocated again without touching a new page."""

from __future__ import annotations

import subprocess

from kit.processes.warm import warm_python

PROGRAM = """
import resource, torch
from shoal_workers.engine.process.warm_memory import MemoryToucher, keep_freed_memory
keep_freed_memory()

SIZES = [2] * 24

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def make():
    return [torch.empty(size << 20, dtype=torch.uint8).fill_(1) for size in SIZES]

{warm}
before = faults()
made = make()
print(faults() - before)
"""
PAGES_OF_ALL = 48 << 20 >> 12


def test_freed_memory_is_reused() -> None:
    """A small allocation between freed blocks can cost some new blocks of the 24; without the settings all are new."""
    assert _pages_touched("for _ in range(3): make()") < PAGES_OF_ALL / 2


def test_touched_memory_is_used_by_the_first_allocation() -> None:
    assert _pages_touched("MemoryToucher(48 << 20).finish()") < PAGES_OF_ALL / 20
    assert _pages_touched("MemoryToucher(0).finish()") > PAGES_OF_ALL / 2


def _pages_touched(warm: str) -> int:
    """While 24 blocks are made and filled, after that."""
    program = PROGRAM.replace("{warm}", warm)
    done = subprocess.run([warm_python(), "-c", program], capture_output=True, text=True, check=True, timeout=60)
    return int(done.stdout)


def test_large_blocks_return_to_the_kernel_although_small_ones_between_them_stay() -> None:
    program = """
import torch
from pathlib import Path
from shoal_workers.engine.process.warm_memory import keep_freed_memory
keep_freed_memory()

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) << 12

def fill(size):
    return torch.empty(size, dtype=torch.uint8).fill_(1)

fill(8 << 20)
before, kept = resident(), []
for _ in range(16):
    blocks = []
    for _ in range(4):
        blocks.append(fill(8 << 20))
        kept.append(fill(128 << 10))
    del blocks
print(resident() - before)
"""
    done = subprocess.run([warm_python(), "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert int(done.stdout) < 2 * (16 * 4 * 128 << 10) + (4 << 20)


def test_large_blocks_of_a_small_model_are_kept() -> None:
    """After some rounds: glibc places the first blocks one after the other, with small ones between them."""
    program = """
import resource, torch
from shoal_workers.engine.process.warm_memory import keep_freed_memory
keep_freed_memory(40 << 20)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for _ in range(40):
    torch.empty(24 << 20, dtype=torch.uint8).fill_(1)
before = faults()
torch.empty(24 << 20, dtype=torch.uint8).fill_(1)
print(faults() - before)
"""
    done = subprocess.run([warm_python(), "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert int(done.stdout) < (24 << 20 >> 12) / 20


def test_freed_memory_returns_to_the_kernel_on_request() -> None:
    program = """
import resource, torch
from pathlib import Path
from shoal_workers.engine.process.warm_memory import keep_freed_memory, return_freed_memory
keep_freed_memory()

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) << 12

def make():
    return [torch.empty(2 << 20, dtype=torch.uint8).fill_(1) for _ in range(24)]

made = make()
full = resident()
del made
kept = resident()
return_freed_memory()
print(full - kept, full - resident())
"""
    done = subprocess.run([warm_python(), "-c", program], capture_output=True, text=True, check=True, timeout=60)
    freed, returned = map(int, done.stdout.split())
    assert freed < 8 << 20
    assert returned > 40 << 20


def test_touching_stops_when_the_memory_is_needed() -> None:
    program = """
import resource
from shoal_workers.engine.process.warm_memory import MemoryToucher, keep_freed_memory
keep_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
MemoryToucher(2 << 30).stop()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([warm_python(), "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert int(done.stdout) < 1 << 20, "in KiB; all would be 4 GiB, or half of what the machine has to spare"


def test_touching_stops_when_others_have_taken_the_memory() -> None:
    """Half of what was left is gone at the second look, taken by another worker, say."""
    program = """
import resource
from shoal_workers.engine.process.warm_memory import MemoryToucher, keep_freed_memory
keep_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
left = iter([1 << 40, 1 << 40, 1 << 39])
MemoryToucher(128 << 20, lambda: next(left)).finish()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([warm_python(), "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert 30 << 10 < int(done.stdout) < 40 << 10, "in KiB: sixteen blocks of 2 MiB, of 128"
