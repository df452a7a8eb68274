"""Host memory of a worker with snapshots and copies for the other node, against the prediction.

    python bench/scale/host_memory.py --millions 25 --steps 60

Four processes with the real engine and gloo, as two nodes of two on this machine, train a model until every slot of the
snapshot store has been used. Measured are VmHWM, the kernel's peak of the resident pages of a process with everything
that it has imported, and RssShmem, those of them in shared memory at the end. From both, the other workers' slots are
subtracted, which each worker maps to read (`snapshot_store/transfer/peer_maps.py`), so every page counts once.
Predicted is what the planner says for one worker. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Started as a script from any directory: the shared modules are found beside this folder.
sys.path.extend(str(Path(__file__).parents[2] / name) for name in ("bench", "tests", "tools"))

from kit.processes.fleet import Fleet, Job, RemoteWorker
from shoal_service.core.layout_plan import HostNeed
from shoal_service.planner import plan
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.language_model import LM_TASK
from shoal_workers.contract.messages import ExitKind

_GIB = 1 << 30
_WORLD = 4
_PATIENCE_S = 900.0
_CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "no snapshots": ({"enabled": False}, False),
    "snapshots, one node": ({}, False),
    "two nodes": ({}, True),
}
"""Settings of `snapshot`, and whether each worker has a buddy on the other node."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Memory of the worker that has the most."""

    peak_bytes: int
    shared_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=25, help="parameters of the model")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--cases", type=int, nargs="+", default=list(range(len(_CASES))), help="numbers of the cases")
    given = parser.parse_args()
    print(f"{_WORLD} workers, fp32, AdamW, {given.millions} M parameters; {os.cpu_count()} cores; GiB per worker\n")
    print("| case | predicted | measured | | in shared memory: predicted | measured | |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    rows = []
    for case, (snapshot, has_buddies) in [list(_CASES.items())[number] for number in given.cases]:
        spec = _spec(given.millions, given.steps, snapshot)
        need = plan(parse_spec(spec), _WORLD).host
        predicted, shared = _predicted(need, has_buddies=has_buddies)
        found = _run(spec, has_buddies=has_buddies)
        rows.append({"case": case, "predicted": predicted, "measured": found.peak_bytes, "shared": found.shared_bytes})
        print(
            f"| {case} | {predicted / _GIB:.2f} | {found.peak_bytes / _GIB:.2f} | "
            f"{_off(predicted, found.peak_bytes)} | {shared / _GIB:.2f} | {found.shared_bytes / _GIB:.2f} | "
            f"{_off(shared, found.shared_bytes)} |",
            flush=True,
        )
    print(json.dumps({"host_memory": rows}))


def _predicted(need: HostNeed, *, has_buddies: bool) -> tuple[int, int]:
    """Bytes of a worker that also keeps the copies of one other, and those of them in shared memory."""
    copies = need.sent + need.kept if has_buddies else 0
    state = need.snapshots  # as large as the snapshots, and in shared memory like them
    return need.alone + copies, state + need.snapshots + copies


def _off(predicted: int, measured: int) -> str:
    return f"{100 * (predicted / measured - 1):+.1f} %" if predicted and measured else "-"


def _run(spec: dict[str, Any], *, has_buddies: bool) -> Measured:
    with (
        tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder,
        tempfile.TemporaryDirectory(prefix="shoal-bench-", dir="/dev/shm") as memory,
    ):
        fleet = Fleet(Path(folder))
        try:
            has_memory = spec["snapshot"].get("enabled", True)
            job = Job(fleet, spec, Path(folder) / "job", Path(memory) if has_memory else None)
            half = _WORLD // 2
            workers = [*job.workers(half, "n1"), *job.workers(half, "n2" if has_buddies else "n1")]
            for worker in workers:
                worker.call("prepare")

            def buddy_of(rank: int) -> RemoteWorker:
                return workers[(rank + half) % _WORLD]

            job.start(workers, buddy_of=buddy_of if has_buddies else None)
            ends = [worker.exit(timeout_s=_PATIENCE_S) for worker in workers]
            assert [end.kind for end in ends] == [ExitKind.FINISHED] * _WORLD, [end.error for end in ends]
            return max((_measured(worker.pid) for worker in workers), key=lambda one: one.peak_bytes)
        finally:
            fleet.close()


def _measured(pid: int) -> Measured:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.endswith(" kB")}
    others = _mapped_to_read(pid)
    return Measured(sizes["VmHWM"] - others, sizes["RssShmem"] - others)


def _mapped_to_read(pid: int) -> int:
    """Resident bytes of slots that the process only reads: shared maps without the right to write."""
    total, is_slot = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            is_slot = values[0] == "r--s" and "/dev/shm/" in line
        elif is_slot and name == "Rss:":
            total += int(values[0]) << 10
    return total


def _spec(millions: int, steps: int, snapshot: dict[str, Any]) -> dict[str, Any]:
    dim, hidden = 512, 1376
    block = 4 * dim * dim + 3 * dim * hidden
    return {
        "name": "host-memory",
        "task": LM_TASK,
        "model": {
            "dim": dim,
            "num_layers": max(1, round(millions * 1_000_000 / block)),
            "num_heads": 8,
            "hidden_dim": hidden,
            "seq_len": 16,
        },
        "data": {"corpus": "python-stdlib"},
        "batch": {"global_size": 2 * _WORLD, "micro_size": 1},
        "stop": {"steps": steps},
        "checkpoint": {"every_steps": None},
        "validation": {"samples": 0},
        "elasticity": {"max_workers": _WORLD},
        "parallelism": {"shard": "full"},
        "snapshot": snapshot,
    }


if __name__ == "__main__":
    main()
