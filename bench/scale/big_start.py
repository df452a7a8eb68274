"""Memory of each worker while a large model starts: building, drawing its part of the weights, and the first step.

    python bench/scale/big_start.py --millions 1000 500

Eight processes with the real engine and gloo, one model after the other, fully sharded; each process is a new
interpreter. Measured is VmHWM, the kernel's peak of the resident pages of a process, with everything that it has
imported. A worker's shard is 16 bytes for each of its parameters: weight, gradient and two moments. A model whose first
step does not fit into the free memory of this machine is only started. `whole`: the same model from a task without
`deferred_init`, which each worker builds in full.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.layout import fully_sharded
from shoal_workers.contract.messages import Assignment, ExitKind, Phase
from shoal_workers.contract.model.lm import LM_TASK
from shoal_workers.engine.engine import Engine
from shoal_workers.engine.group.store.server import StoreServer
from shoal_workers.engine.process.outbox import Outbox

RANKS = 8
_GIB = 1 << 30
_PATIENCE_S = 900.0
_BYTES = 16
"""Of a parameter: weight, gradient, two moments."""
_STEP_BYTES = 17
"""Of a parameter on this machine in the first step: its state, the optimizer's temporaries and the gathered blocks."""
_BASE_BYTES = 450 << 20
"""Of a process that has imported everything."""


@dataclass(frozen=True, slots=True)
class Peak:
    """One process, up to some moment."""

    bytes: int
    seconds: float
    """Since the group began to form."""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--millions", type=int, nargs="+", default=[1000, 500], help="parameters of the models")
    arguments.add_argument("--whole", type=int, nargs="*", default=[200], help="the same, built whole by each worker")
    given = arguments.parse_args()
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
    imports, started, stepped, num_parameters = _run(spec, steps=steps)
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


def _run(spec: dict[str, Any], *, steps: bool) -> tuple[int, Peak, Peak | None, int]:
    """Largest peaks: after the imports, before the first step, after it; and the number of parameters."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks: list[tuple[Any, Connection]] = []
        try:
            for rank in range(RANKS):
                ours, theirs = multiprocessing.Pipe()
                process = context.Process(target=_serve, args=(theirs, spec, folder, rank), kwargs={"steps": steps})
                process.start()
                theirs.close()
                ranks.append((process, ours))
            ports_and_imports = [_answer(connection) for _, connection in ranks]
            for _, connection in ranks:
                connection.send(ports_and_imports[0][0])
            started = [_answer(connection) for _, connection in ranks]
            stepped = [_answer(connection) for _, connection in ranks] if steps else []
        finally:
            for process, _ in ranks:
                process.kill()
                process.join()
    return (
        max(imports for _, imports in ports_and_imports),
        max((peak for peak, _ in started), key=lambda peak: peak.bytes),
        max((peak for peak, _ in stepped), key=lambda peak: peak.bytes) if stepped else None,
        started[0][1],
    )


def _answer(connection: Connection) -> Any:
    if not connection.poll(_PATIENCE_S):
        raise RuntimeError(f"a rank has not answered within {_PATIENCE_S:.0f} s")
    return connection.recv()


def _serve(connection: Connection, spec: dict[str, Any], folder: str, rank: int, *, steps: bool) -> None:
    """Sends (port, peak of the imports); gets the port of rank 0; sends the peaks. It is killed afterwards."""
    began = 0.0
    sys.path.insert(0, str(Path(__file__).parent / "task"))

    def enter(phase: Phase, step: int) -> None:
        runtime = engine._runtime
        if phase is Phase.FORWARD and step == 0 and not sent:
            assert runtime is not None
            sent.append(True)
            connection.send((Peak(_peak_bytes(), time.monotonic() - began), runtime.num_parameters))
            if not steps:
                time.sleep(_PATIENCE_S)  # until it is killed
        elif phase is not Phase.OPTIMIZER and step == 1 and len(sent) == 1:
            sent.append(True)
            connection.send((Peak(_peak_bytes(), time.monotonic() - began), 0))
            time.sleep(_PATIENCE_S)

    sent: list[bool] = []
    engine = Engine(
        parse_spec(spec),
        checkpoint_root=f"{folder}/checkpoints",
        outbox=Outbox(f"rank-{rank}"),
        store=StoreServer("127.0.0.1", folder),
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
            generation=1,
            rank=rank,
            layout=fully_sharded(RANKS),
            store_host="127.0.0.1",
            store_port=store_port,
            restore_from=None,
            collective_timeout_s=_PATIENCE_S,
            store_timeout_s=_PATIENCE_S,
        )
    )
    assert ended.kind is ExitKind.FINISHED, ended.error


def _spec(millions: int, *, is_whole: bool) -> dict[str, Any]:
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
        "stop": {"steps": 1},
        "checkpoint": {"every_steps": None},
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
