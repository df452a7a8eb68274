"""The gradient log: bytes on the wire, share of the step time, and the time that a replay takes.

    python bench/gradient_log.py [--trials 3] [--steps 40] [--tokens 2048 384]

The model with 10 M parameters on 4 ranks of 2 nodes, all on this machine, with the log on and off in turns. A step's
time is the median of the steps after warm-up, and the cost the median over the trials of (on - off) / off. Because
other load disturbs it, the share of CPU seconds that both sides of the log spend in a step is given as well. Bytes are
those of gradients, commits and whole copies, against the bytes of the reduced gradients. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

# Started as a script from any directory: the shared modules are found beside this folder.
sys.path.extend(str(Path(__file__).parents[1] / name) for name in ("bench", "tests", "tools"))

from kit.processes.fleet import Fleet, Job, RemoteWorker
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import GroupFormed, SnapshotCost, StepReport
from shoal_workers.snapshot_store.log.entry_slots import STEPS_PER_COPY
from shoal_workers.snapshot_store.transfer.requests import Part, Request, Verb, call
from shoal_workers.snapshot_store.transfer.wire import connect

_WARM_UP_STEPS = 8
_WORLD = 4
_SHAPES = {2048: (8, 256, 2), 384: (12, 32, 3)}
"""Tokens of a step -> samples, length of a sample, samples of a micro-batch."""
_EXAMPLE = Path(__file__).parents[1] / "examples" / "lm-10m.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 384], choices=sorted(_SHAPES))
    arguments = parser.parse_args()
    answer: dict[str, Any] = {"machine": f"{os.cpu_count()} cores, torch threads 1, gloo", "ranks": _WORLD}
    for tokens in arguments.tokens:
        trials: dict[str, list[dict[str, Any]]] = {"off": [], "auto": []}
        for number in range(arguments.trials):
            for mode, results in trials.items():
                results.append(_run(tokens, mode, arguments.steps))
                shown = ", ".join(f"{name} {value}" for name, value in results[-1].items())
                print(f"{tokens} tokens, trial {number + 1}, log {mode}: {shown}", flush=True)
        answer[str(tokens)] = _summary(trials)
    print(json.dumps(answer))


def _summary(trials: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    pairs = list(zip(trials["off"], trials["auto"], strict=True))
    on = trials["auto"]
    return {
        "step_ms_off": round(statistics.median(t["step_ms"] for t in trials["off"]), 1),
        "step_ms_on": round(statistics.median(t["step_ms"] for t in on), 1),
        "cost": round(statistics.median(b["step_ms"] / a["step_ms"] - 1 for a, b in pairs), 4),
        "cpu_share": round(statistics.median(t["log_share"] for t in on), 4),
        "wire": round(statistics.median(t["wire"] for t in on), 3),
        "replay_ms": round(statistics.median(t["replay_ms"] for t in on), 1),
        "replayed_steps": on[-1]["replayed_steps"],
    }


def _run(tokens: int, mode: str, steps: int) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder,
        tempfile.TemporaryDirectory(prefix="shoal-bench-", dir="/dev/shm") as memory,
    ):
        fleet = Fleet(Path(folder))
        try:
            job = Job(fleet, _spec(tokens, mode, steps), Path(folder) / "job", Path(memory))
            workers = [*job.workers(_WORLD // 2, "n1"), *job.workers(_WORLD // 2, "n2")]
            for worker in workers:
                worker.call("prepare")
            job.start(workers, buddy_of=lambda rank: workers[(rank + _WORLD // 2) % _WORLD])
            ends = [worker.exit(timeout_s=600.0) for worker in workers]
            assert [end.kind for end in ends] == [ExitKind.FINISHED] * _WORLD, [end.error for end in ends]
            return _figures(workers, steps, is_logged=mode == "auto")
        finally:
            fleet.close()


def _figures(workers: list[RemoteWorker], steps: int, *, is_logged: bool) -> dict[str, Any]:
    reports = [item for worker in workers for item in worker.poll()]
    times = [item.step_s for item in reports if isinstance(item, StepReport) and item.step > _WARM_UP_STEPS]
    figures: dict[str, Any] = {"step_ms": round(1000 * statistics.median(times), 1)}
    if not is_logged:
        return figures
    (formed,) = [item for item in reports if isinstance(item, GroupFormed)]
    shares = [item.log_share for item in reports if isinstance(item, SnapshotCost) and item.log_lag_steps is not None]
    sent = sum(sum(worker.call("sent_bytes")) for worker in workers)
    figures["log_share"] = round(shares[-1], 4)
    figures["wire"] = round(sent / (4 * formed.num_parameters * (steps - 1)), 3)
    figures["replay_ms"], figures["replayed_steps"] = _replay(workers[_WORLD // 2], steps)
    return figures


def _replay(buddy: RemoteWorker, newest: int) -> tuple[float, int]:
    """How long the buddy of rank 0 takes to make its newest part, and from how many entries."""
    with connect(buddy.snapshot_server, "key", check=lambda: None, patience_s=60.0) as wire:
        parts = call(wire, Request(verb=Verb.LIST)).snapshot_parts
        assert any((part.rank, part.step) == (0, newest) for part in parts), parts
        start_s = time.perf_counter()
        call(wire, Request(verb=Verb.FIND, part=Part(generation=parts[-1].generation, rank=0, step=newest)))
        seconds = time.perf_counter() - start_s
    copies = {part.step for part in parts if part.rank == 0}
    return round(1000 * seconds, 1), (newest - 1) % STEPS_PER_COPY if len(copies) > 1 else 0


def _spec(tokens: int, mode: str, steps: int) -> dict[str, Any]:
    spec: dict[str, Any] = yaml.safe_load(_EXAMPLE.read_text())
    size, length, micro = _SHAPES[tokens]
    spec["model"] = spec["model"] | {"seq_len": length}
    spec["batch"] = {"global_size": size, "micro_size": micro}
    spec["stop"] = {"steps": steps}
    spec["elasticity"] = {"min_workers": 1, "max_workers": _WORLD}
    spec["checkpoint"] = {"every_steps": 10 * steps}
    spec["validation"] = {"samples": 0}
    spec["snapshot"] = {"gradient_log": mode}
    return spec


if __name__ == "__main__":
    main()
