"""Memory of a node of eight workers with the defaults of a spec: snapshots in memory, and a checkpoint on disk.

    python bench/scale/default_memory.py --millions 100

Eight processes with the real engine and gloo train a language model, fully sharded, in one memory cgroup (v1) without a
limit. Its peak counts every page once, also those of shared memory, and the page cache. The peak is read, and set back,
in four parts of one life:

    start      built, formed, and the first step
    training   two more steps; a snapshot after each, and a checkpoint on disk
    killed     one worker is killed; seven form a group from the snapshots and train one step
    resumed    eight new workers read the checkpoint and train one step

Predicted is what the planner says for eight workers. `in use` is what the cgroup holds at the end of a part without the
page cache of files. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Started as a script from any directory: the shared modules are found beside this folder.
sys.path.extend(str(Path(__file__).parents[2] / name) for name in ("bench", "tests", "tools"))

from kit.processes.fleet import Fleet, Job
from kit.processes.warm import Zygote
from measurements.machine import describe
from shoal_service.planner import plan
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.language_model import LM_TASK

_GIB = 1 << 30
_RANKS = 8
_CGROUPS = Path("/sys/fs/cgroup/memory")
_ENTER = ["/bin/sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"']
"""A command that enters the cgroup, its next argument, and then becomes the rest."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the life, in bytes."""

    name: str
    peak: int
    in_use: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, default=100, help="parameters of the model")
    given = parser.parse_args()
    spec = _spec(given.millions)
    predicted = plan(parse_spec(spec), _RANKS).host.alone * _RANKS
    machine = describe()
    print(f"{machine['cpu']}, {machine['memory']}; {_RANKS} workers, fp32, AdamW, {given.millions} M parameters")
    print(f"predicted for the workers: {predicted / _GIB:.2f} GiB\n")
    print("| part | peak, GiB | in use at its end, GiB |\n|---|---:|---:|")
    parts = []
    for part in _life(spec):
        parts.append(part)
        print(f"| {part.name} | {part.peak / _GIB:.2f} | {part.in_use / _GIB:.2f} |", flush=True)
    print(json.dumps({"millions": given.millions, "predicted": predicted, "parts": [asdict(part) for part in parts]}))


def _life(spec: dict[str, Any]) -> Iterator[Part]:
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        yield from _trained(spec, Path(folder))
        yield from _resumed(spec, Path(folder))


def _trained(spec: dict[str, Any], folder: Path) -> Iterator[Part]:
    with _node(spec, folder) as (job, group):
        workers = job.workers(_RANKS)
        first, victim = workers[:2]
        first.strike("forward", 1, "hold")
        first.strike("forward", 3, "hold")
        for worker in workers:
            worker.call("prepare")
        job.start(workers)
        first.reached()
        yield _part(group, "start")
        first.call("go")
        first.reached()
        job.wait_until_committed(workers, 2)
        yield _part(group, "training")
        victim.kill()
        assert victim.died()
        first.call("go")
        survivors = [first, *workers[2:]]
        exits = job.interrupt(survivors)
        source = job.in_memory(exits, survivors)
        first.strike("forward", source.step + 1, "hold")
        job.start(survivors, restore_snapshot=source, restore_from=None)
        first.reached()
        yield _part(group, "killed")


def _resumed(spec: dict[str, Any], folder: Path) -> Iterator[Part]:
    with _node(spec, folder) as (job, group):
        workers = job.workers(_RANKS)
        workers[0].strike("forward", 3, "hold")
        for worker in workers:
            worker.call("prepare")
        job.start(workers)
        workers[0].reached()
        yield _part(group, "resumed")


@contextmanager
def _node(spec: dict[str, Any], folder: Path) -> Iterator[tuple[Job, Path]]:
    """A job whose workers are in one new cgroup, with a directory of its own in shared memory."""
    group = _CGROUPS / f"shoal-bench-{os.getpid()}"
    group.mkdir()
    try:
        with (
            tempfile.TemporaryDirectory(prefix="shoal-bench-", dir="/dev/shm") as memory,
            tempfile.TemporaryDirectory(prefix="shoal-bench-") as sockets,
        ):
            zygote = Zygote([*_ENTER, str(group)])
            fleet = Fleet(Path(sockets), zygote)
            try:
                yield Job(fleet, spec, folder / "job", Path(memory)), group
            finally:
                fleet.close()
                zygote.close()
    finally:
        group.rmdir()


def _part(group: Path, name: str) -> Part:
    """The peak since the last part."""
    peak = group / "memory.max_usage_in_bytes"
    lines = (line.split() for line in (group / "memory.stat").read_text().splitlines())
    held = {key: int(value) for key, value in lines}
    part = Part(name, int(peak.read_text()), held["rss"] + held["shmem"])
    peak.write_text("0")
    return part


def _spec(millions: int) -> dict[str, Any]:
    dim, hidden = 1024, 2752
    block = 4 * dim * dim + 3 * dim * hidden
    return {
        "name": "default-memory",
        "task": LM_TASK,
        "model": {
            "dim": dim,
            "num_layers": round(millions * 1_000_000 / block),
            "num_heads": 16,
            "hidden_dim": hidden,
            "seq_len": 16,
        },
        "data": {"corpus": "python-stdlib"},
        "batch": {"global_size": _RANKS, "micro_size": 1},
        "stop": {"steps": 10},
        "checkpoint": {"every_steps": 2},
        "validation": {"samples": 0},
        "elasticity": {"max_workers": _RANKS},
    }


if __name__ == "__main__":
    main()
