"""Program of one rank: what makes the host wait for the device, step by step.

    python host_waits.py ANSWER_FILE DEVICE CASE...

On a GPU torch warns of each wait. On a CPU what would wait on a GPU is counted: what gives Python numbers, or a tensor
whose shape depends on values. The optimizer is SGD, because AdamW reads numbers that are on the host anyway.

The answer is, by case, a list of steps; each step is a list of [operation, file:line of the innermost frame in Shoal's
engine]. The first steps are left out, in which the engine compares more.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import waiting_tasks
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.layout import Layout
from shoal_workers.contract.messages import Assignment, ExitKind, Phase
from shoal_workers.engine.engine import Engine
from shoal_workers.engine.group.store.server import StoreServer
from shoal_workers.engine.process.outbox import Outbox
from shoal_workers.snapshot_store.store import SnapshotStore

STEPS, FIRST = 12, 7
"""Steps of a run, and the first one that counts."""
MICRO_BATCHES = 4
_WAITING = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2")
_READING = ("tolist", "numpy", "cpu")


class Waits:
    """The waits since the program has begun, and where micro-batches begin among them."""

    def __init__(self) -> None:
        self.all: list[list[str]] = []
        self._begun: dict[int, int] = {}

    def enter(self, phase: Phase, step: int) -> None:
        """The engine begins a phase: the first forward pass is where a step begins."""
        if phase is Phase.FORWARD:
            self._begun.setdefault(step, len(self.all))

    def note(self, operation: str) -> None:
        stack = traceback.extract_stack()
        frames = [frame for frame in stack if "shoal_workers" in frame.filename]
        place = "elsewhere"
        if frames:
            place = f"{frames[-1].filename.rpartition('shoal_workers/')[2]}:{frames[-1].lineno}"
        self.all.append([operation, place])

    def steps(self) -> list[list[list[str]]]:
        """Returns the waits of each step, from its first micro-batch to that of the next."""
        firsts = [self._begun[step] for step in range(FIRST, STEPS)]
        return [self.all[a:b] for a, b in itertools.pairwise(firsts)]


class _Counted(TorchDispatchMode):
    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in _WAITING:
            self._waits.note(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def _readings(waits: Waits) -> Iterator[None]:
    """Methods of a tensor that call no operation on a CPU."""
    plain = {name: getattr(torch.Tensor, name) for name in _READING}

    def noted(name: str) -> Any:
        def method(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
            waits.note(name)
            return plain[name](tensor, *arguments, **named)

        return method

    for name in _READING:
        setattr(torch.Tensor, name, noted(name))
    try:
        yield
    finally:
        for name, method in plain.items():
            setattr(torch.Tensor, name, method)


@contextmanager
def watched(waits: Waits, device: str) -> Iterator[None]:
    if device == "cpu":
        with _Counted(waits), _readings(waits):
            yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: (
            waits.note("synchronize") if "synchroniz" in str(message) else None
        )
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def spec_of(case: str, device: str) -> dict[str, Any]:
    kind, _, more = case.partition("-")
    spec: dict[str, Any] = {
        "name": "waits",
        "batch": {"global_size": 4 * MICRO_BATCHES, "micro_size": 4},
        "stop": {"steps": STEPS},
        "checkpoint": {"every_steps": None},
        "validation": {"samples": 0},
        "worker": {"gpus": int(device == "cuda")},
        "snapshot": {"budget": 1e-9},
        "seed": 3,
    }
    if kind == "loop":
        return {
            "name": "waits",
            "loop": {"file": "host_waits.py"},
            **{key: spec[key] for key in ("worker", "snapshot", "seed")},
        }
    spec |= {
        "task": "waiting_tasks:Waiting",
        "model": {"kind": kind},
        "optimizer": {"name": "sgd", "lr": 0.01, "clip_norm": 1.0},
    }
    return {**spec, "parallelism": {"shard": "none"}} if more == "whole" else spec


def loop(run: Any) -> None:
    """A loop of the user's own, with BatchNorm."""
    torch.manual_seed(1)
    model = waiting_tasks.Normed().to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    for batch in run.batches(waiting_tasks.Samples(), global_size=4 * MICRO_BATCHES, micro_size=4):
        run.backward(F.cross_entropy(model(batch["x"]), batch["y"]))
        if run.steps(optimizer, clip=1.0) and run.step == STEPS:
            return


def run_case(case: str, device: str) -> list[list[list[str]]]:
    spec = parse_spec(spec_of(case, device))
    with tempfile.TemporaryDirectory(prefix="shoal-waits-", dir="/dev/shm") as folder:
        names = {"job_id": "waits", "attempt": 1, "worker_id": "a", "node_id": "a", "key": "key", "root": Path(folder)}
        snapshots = SnapshotStore(**names)
        store = StoreServer("127.0.0.1", "key")
        outbox = Outbox("a")
        is_loop, waits = case.startswith("loop"), Waits()
        engine = Engine(
            spec,
            checkpoint_root=f"{folder}/checkpoints",
            outbox=outbox,
            store=store,
            snapshot_store=snapshots,
            on_phase=waits.enter,
            loop=loop if is_loop else None,
        )
        assignment = Assignment(
            job_id="waits",
            attempt=1,
            generation=1,
            rank=0,
            layout=Layout(),
            store_host=store.host,
            store_port=store.port,
            restore_from=None,
        )
        try:
            with watched(waits, device):
                ended = engine.run(assignment)
        finally:
            engine.close()
            outbox.close()
            snapshots.close()
        if ended.kind is not ExitKind.FINISHED:
            raise SystemExit(f"{case}: {ended.error and (ended.error.traceback or ended.error.message)}")
        return waits.steps()


def main() -> None:
    answer_file, device, *cases = sys.argv[1:]
    torch.set_num_threads(1)
    answer = {case: run_case(case, device) for case in cases}
    Path(answer_file).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()
