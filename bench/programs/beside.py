"""What runs beside a script under Shoal that does next to nothing: the CPU of every process of the machine's service,
cluster and job, as a share of one core.

    python bench/programs/beside.py [--seconds 20] [--workers 2]

The script's ranks meet in a barrier ten times a second. What is left is paid by every job; on a machine of few cores a
step is longer by about that share.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

from main import adopt_orphans, describe, under_shoal

IDLE = """
import os, time
import torch.distributed as dist

dist.init_process_group("gloo")
for step in range(1, 100000):
    dist.barrier()
    time.sleep(0.1)
    if dist.get_rank() == 0:
        with open(os.environ["STAMPS"], "a") as file:
            file.write(f"{time.time()} {step}\\n")
"""
_MIN_SHARE = 0.0005
_SETTLED_S = 3.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    adopt_orphans()
    print(describe(), flush=True)
    with tempfile.TemporaryDirectory(prefix="shoal-beside-", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        for name in ("checkpoints", "code"):
            (folder / name).mkdir()
        (folder / "code" / "idle.py").write_text(IDLE)
        program = {"script": {"file": "idle.py"}}
        with under_shoal(folder, options.workers, program, code=folder / "code") as training:
            training.wait_for_step(20)
            time.sleep(_SETTLED_S)  # what the start has left to do
            before, start = _descendants(), time.monotonic()
            time.sleep(options.seconds)
            after, seconds = _descendants(), time.monotonic() - start
    shares = [(cpu_s - before[pid][0], name) for pid, (cpu_s, name) in after.items() if pid in before]
    for cpu_s, name in sorted(shares, reverse=True):
        if cpu_s / seconds >= _MIN_SHARE:
            print(f"{cpu_s / seconds:7.2%}  {name}")
    print(f"{sum(cpu_s for cpu_s, _ in shares) / seconds:7.2%}  together")


def _descendants() -> dict[int, tuple[float, str]]:
    """CPU seconds and command of each process that this one has started, or that one of those has."""
    parents: dict[int, int] = {}
    found: dict[int, tuple[float, str]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(") ")[2].split()
            words = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has ended
        parents[int(path.name)] = int(fields[1])
        found[int(path.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), words[:100]
    return {pid: one for pid, one in found.items() if _is_below(pid, parents)}


def _is_below(pid: int, parents: dict[int, int]) -> bool:
    while pid in parents:
        pid = parents[pid]
        if pid == os.getpid():
            return True
    return False


if __name__ == "__main__":
    main()
