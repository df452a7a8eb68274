"""Memory of each worker while a large model starts: building, drawing its part of the weights, and the first step.

    python bench/scale/big_start.py --millions 1000 500
    python bench/scale/big_start.py --resume 125 250

Eight processes with the real engine and gloo, one model after the other, fully sharded; each process is a new
interpreter. Measured is VmHWM, the kernel's peak of the resident pages of a process, with everything that it has
imported. A worker's shard is 16 bytes for each of its parameters: weight, gradient and two moments. A model whose first
step does not fit into the free memory of this machine is only started. `whole`: the same model from a task without
`deferred_init`, which each worker builds in full.

`resume`: two steps and a checkpoint on disk, then new interpreters that restore it and train one step. Each of these is
in a cgroup of its own that allows 1.3 shards + 1 GiB, page cache included, where this user may make one: a process that
needs more is killed, and the bench fails.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from shoal_workers.checkpoint.commit import marker_of, write_marker
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.language_model import LM_TASK
from shoal_workers.contract.layout import fully_sharded
from shoal_workers.contract.messages import Assignment, ExitKind, Phase
from shoal_workers.contract.worker_reports import SavedPart
from shoal_workers.engine.engine import Engine
from shoal_workers.engine.group.store.server import StoreServer
from shoal_workers.engine.process.outbox import Outbox
from shoal_workers.engine.task_program import TaskProgram

RANKS = 8
_GIB = 1 << 30
_PATIENCE_S = 900.0
_SAVED_STEP = 2
_CGROUPS = Path("/sys/fs/cgroup/memory")
_BYTES = 16
"""Bytes that a parameter takes: weight, gradient, two moments."""
_STEP_BYTES = 17
"""Bytes that a parameter takes in the first step: its state, the optimizer's temporaries and the gathered blocks."""
_BASE_BYTES = 450 << 20
"""Bytes of a process that has imported everything."""


@dataclass(frozen=True, slots=True)
class Peak:
    """One process, up to some moment."""

    bytes: int
    seconds: float
    """Since the group began to form."""


@dataclass(frozen=True, slots=True)
class _Task:
    """What the processes of one group do."""

    spec: dict[str, Any]
    folder: str
    first_step: int = 0
    """The step that is complete when the first step of this group begins."""
    restore_from: str | None = None
    steps: bool = True
    """The group also makes the first step, and not only the start."""
    saves: bool = False
    """Trains to the end and saves a checkpoint there."""
    limit_bytes: int | None = None
    """Limit of the cgroup of each process."""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--millions", type=int, nargs="+", default=[1000, 500], help="parameters of the models")
    arguments.add_argument("--whole", type=int, nargs="*", default=[200], help="the same, built whole by each worker")
    arguments.add_argument("--resume", type=int, nargs="+", help="only these, trained, saved and restored from disk")
    given = arguments.parse_args()
    if given.resume:
        _resume(given.resume)
        return
    print(f"{RANKS} workers, fully sharded, fp32, AdamW; {os.cpu_count()} cores; GiB per worker, of the largest one\n")
    print("| parameters | built | shard | imports | started | after s | first step | after s | 1.3 shards + 1 GiB |")
    print("|---:|---|---:|---:|---:|---:|---:|---:|---:|")
    for millions, is_whole in [*((one, False) for one in given.millions), *((one, True) for one in given.whole)]:
        print(_row(millions, is_whole=is_whole), flush=True)


def _row(millions: int, *, is_whole: bool) -> str:
    spec = _spec(millions, is_whole=is_whole)
    available = _meminfo("MemAvailable")
    needed = millions * 1_000_000 * (4 * RANKS if is_whole else 4) + RANKS * _BASE_BYTES
    if needed > 0.9 * available:
        return f"| {millions} M | skipped: {needed / _GIB:.1f} GiB of {available / _GIB:.1f} GiB |"
    steps = not is_whole and millions * 1_000_000 * _STEP_BYTES + RANKS * _BASE_BYTES < 0.9 * available
    with tempfile.TemporaryDirectory() as folder:
        ends = _run(_Task(spec, folder, steps=steps))
    imports, started, num_parameters, stepped = ends.imports, ends.started, ends.num_parameters, ends.stepped
    shard = num_parameters * _BYTES / RANKS
    cells = [
        f"{num_parameters / 1e6:,.0f} M",
        "whole" if is_whole else "in parts",
        f"{shard / _GIB:.2f}",
        f"{imports / _GIB:.2f}",
        f"{started.bytes / _GIB:.2f}",
        f"{started.seconds:.0f}",
        f"{stepped.bytes / _GIB:.2f}" if stepped else "-",
        f"{stepped.seconds:.0f}" if stepped else "-",
        f"{(1.3 * shard + _GIB) / _GIB:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def _resume(sizes: list[int]) -> None:
    print(f"{RANKS} workers, fully sharded, fp32, AdamW; {os.cpu_count()} cores; GiB per worker, of the largest one\n")
    print(
        "| parameters | shard | trained and saved | restored | after s | first step | after s | cgroup peak "
        "| at its limit | 1.3 shards + 1 GiB |"
    )
    print("|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for millions in sizes:
        print(_resume_row(millions), flush=True)


def _resume_row(millions: int) -> str:
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        trained = _run(_Task(_spec(millions, steps=_SAVED_STEP), folder, saves=True))
        (directory,) = {part.directory for part in trained.parts}
        write_marker(directory, marker_of(trained.parts, job_id="bench", attempt=1, now=0.0))
        shard = trained.num_parameters * _BYTES / RANKS
        goal = int(1.3 * shard + _GIB)
        spec = _spec(millions, steps=_SAVED_STEP + 1)
        ends = _run(_Task(spec, folder, first_step=_SAVED_STEP, restore_from=directory, limit_bytes=goal))
    assert ends.stepped is not None
    cells = [
        f"{trained.num_parameters / 1e6:,.0f} M",
        f"{shard / _GIB:.2f}",
        f"{trained.saved_bytes / _GIB:.2f}",
        f"{ends.started.bytes / _GIB:.2f}",
        f"{ends.started.seconds:.0f}",
        f"{ends.stepped.bytes / _GIB:.2f}",
        f"{ends.stepped.seconds:.0f}",
        f"{ends.group.peak_bytes / _GIB:.2f}" if ends.group else "no cgroup",
        f"{ends.group.num_failed} times" if ends.group else "-",
        f"{goal / _GIB:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


@dataclass(frozen=True, slots=True)
class _GroupPeak:
    """The peak of one cgroup: anonymous memory and page cache."""

    peak_bytes: int
    num_failed: int
    """How often the limit was reached, and cache was given back."""


@dataclass(frozen=True, slots=True)
class _Ends:
    """Largest peaks of the processes of one group."""

    imports: int
    started: Peak
    num_parameters: int
    stepped: Peak | None
    saved_bytes: int
    parts: list[SavedPart]
    group: _GroupPeak | None


def _run(task: _Task) -> _Ends:
    context = multiprocessing.get_context("spawn")
    ranks: list[tuple[Any, Connection]] = []
    with _cgroups(task.limit_bytes) as groups:
        try:
            for rank in range(RANKS):
                ours, theirs = multiprocessing.Pipe()
                process = context.Process(target=_serve, args=(theirs, task, rank))
                process.start()
                if groups:
                    (groups[rank] / "cgroup.procs").write_text(str(process.pid))
                theirs.close()
                ranks.append((process, ours))
            ports_and_imports = [_answer(connection) for _, connection in ranks]
            for _, connection in ranks:
                connection.send(ports_and_imports[0][0])
            started = [_answer(connection) for _, connection in ranks]
            stepped = [_answer(connection)[0] for _, connection in ranks] if task.steps and not task.saves else []
            saved = [_answer(connection) for _, connection in ranks] if task.saves else []
            peaks = [_group_peak(group) for group in groups]
        finally:
            for process, _ in ranks:
                process.kill()
                process.join()
    return _Ends(
        imports=max(imports for _, imports in ports_and_imports),
        started=max((peak for peak, _ in started), key=lambda peak: peak.bytes),
        num_parameters=started[0][1],
        stepped=max(stepped, key=lambda peak: peak.bytes) if stepped else None,
        saved_bytes=max((peak for peak, _ in saved), default=0),
        parts=[part for _, parts in saved for part in parts],
        group=max(peaks, key=lambda peak: peak.peak_bytes, default=None),
    )


@contextmanager
def _cgroups(limit_bytes: int | None) -> Iterator[list[Path]]:
    """One for each rank; none if no limit is wanted, or if this user cannot make one (only cgroup v1 is tried)."""
    made: list[Path] = []
    try:
        if limit_bytes is not None:
            with suppress(OSError):
                for rank in range(RANKS):
                    group = _CGROUPS / f"shoal-bench-{os.getpid()}-{rank}"
                    group.mkdir()
                    made.append(group)
                    (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
        yield made if len(made) == RANKS else []
    finally:
        for group in made:
            group.rmdir()


def _group_peak(group: Path) -> _GroupPeak:
    names = ("memory.max_usage_in_bytes", "memory.failcnt")
    return _GroupPeak(*(int((group / name).read_text()) for name in names))


def _answer(connection: Connection) -> Any:
    if not connection.poll(_PATIENCE_S):
        raise RuntimeError(f"a rank has not answered within {_PATIENCE_S:.0f} s")
    return connection.recv()


def _serve(connection: Connection, task: _Task, rank: int) -> None:
    """Sends (port, peak of the imports); gets the port of rank 0; sends the peaks. It is killed afterwards."""
    began = 0.0
    sys.path.insert(0, str(Path(__file__).parent / "task"))

    def enter(phase: Phase, step: int) -> None:
        program = engine._program
        assert isinstance(program, TaskProgram)
        runtime = program.runtime
        if phase is Phase.FORWARD and step == task.first_step and not sent:
            assert runtime is not None
            sent.append(True)
            connection.send((Peak(_peak_bytes(), time.monotonic() - began), runtime.num_parameters))
            if not task.steps:
                time.sleep(_PATIENCE_S)  # until it is killed
        elif not task.saves and phase is not Phase.OPTIMIZER and step == task.first_step + 1 and len(sent) == 1:
            sent.append(True)
            connection.send((Peak(_peak_bytes(), time.monotonic() - began), 0))
            time.sleep(_PATIENCE_S)

    sent: list[bool] = []
    outbox = Outbox(f"rank-{rank}")
    engine = Engine(
        parse_spec(task.spec),
        checkpoint_root=f"{task.folder}/checkpoints",
        outbox=outbox,
        store=StoreServer("127.0.0.1", task.folder),
        on_phase=enter,
    )
    engine.prepare()
    connection.send((engine.store_port, _peak_bytes()))
    store_port = connection.recv()
    began = time.monotonic()
    ended = engine.run(
        Assignment(
            job_id="bench",
            attempt=1,
            generation=2 if task.restore_from else 1,
            rank=rank,
            layout=fully_sharded(RANKS),
            store_host="127.0.0.1",
            store_port=store_port,
            restore_from=task.restore_from,
            collective_timeout_s=_PATIENCE_S,
            store_timeout_s=_PATIENCE_S,
        )
    )
    assert ended.kind is ExitKind.FINISHED, ended.error
    reports = outbox.poll(0, 0.0, engine.progress).reports
    connection.send((_peak_bytes(), [report for report in reports if isinstance(report, SavedPart)]))
    time.sleep(_PATIENCE_S)


def _spec(millions: int, *, steps: int = 1, is_whole: bool = False) -> dict[str, Any]:
    dim = 1024
    block = 4 * dim * dim + 3 * dim * 2752
    return {
        "name": "big-start",
        "task": "whole_lm:WholeLM" if is_whole else LM_TASK,
        "model": {
            "dim": dim,
            "num_layers": round(millions * 1_000_000 / block),
            "num_heads": 16,
            "hidden_dim": 2752,
            "seq_len": 16,
        },
        "data": {"corpus": "python-stdlib"},
        "batch": {"global_size": RANKS, "micro_size": 1},
        "stop": {"steps": steps},
        "checkpoint": {"every_steps": None if steps == 1 else 100 * steps},
        "validation": {"samples": 0},
        "elasticity": {"max_workers": RANKS},
        "snapshot": {"enabled": False},
    }


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) << 10


def _meminfo(name: str) -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) << 10


if __name__ == "__main__":
    main()
