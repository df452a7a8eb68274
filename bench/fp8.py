"""Losses in fp8 beside those of bf16: `make bench-fp8`, two minutes.

    python bench/fp8.py [--steps 300]

A small built-in model on this machine's Python files, two workers, with torchao's emulation on CPUs. For bf16 and both
kinds of scales: the loss at some steps, the mean of the last 50, and the largest difference of a step from bf16. Then
the job with tensorwise scales again, with a worker killed in the middle. The exit status is 0 if the last 50 steps of
each differ from bf16 by at most TOLERANCE, and if the kill changes no loss. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from kit.processes.fleet import Fleet, Job
from kit.processes.warm import close_shared_zygote
from shoal_workers.contract.layout import fully_sharded

TOLERANCE = 0.02
"""Largest difference of the mean loss of the last steps, relative."""
_LAST = 50
_SPEC: dict[str, Any] = {
    "task": "shoal_workers.tasks.lm:LanguageModel",
    "data": {"corpus": "python-stdlib"},
    "model": {"dim": 64, "num_layers": 2, "num_heads": 4, "hidden_dim": 192, "seq_len": 64},
    "batch": {"global_size": 8, "micro_size": 2},
    "optimizer": {"lr": 0.003, "clip_norm": 1.0},
    "schedule": {"warmup_steps": 20},
    "precision": "bf16",
    "checkpoint": {"every_steps": None},
    "validation": {"samples": 0},
    "snapshot": {"budget": 1.0},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        fleet = Fleet(root / "fleet")
        try:
            runs = {"bf16": _train(fleet, root / "bf16", {}, steps)}
            runs |= {
                scales: _train(fleet, root / scales, {"fp8": scales}, steps) for scales in ("tensorwise", "rowwise")
            }
            killed = _train(fleet, root / "killed", {"fp8": "tensorwise"}, steps, kill_at=steps // 2)
        finally:
            fleet.kill_all()
            fleet.close()
            close_shared_zygote()
    result = compare(runs, killed)
    print(json.dumps(result))
    sys.exit(not result["passed"])


def _train(fleet: Fleet, root: Path, changes: dict[str, Any], steps: int, kill_at: int = 0) -> dict[int, float]:
    """The losses by step. `kill_at`: the step in which a worker is killed; 0: none."""
    memory = root.with_name(f"{root.name}-memory")
    memory.mkdir()
    job = Job(fleet, {**_SPEC, "stop": {"steps": steps}, **changes}, root, memory)
    workers = job.workers(3 if kill_at else 2)
    group, spare = workers[:2], workers[2:]
    if kill_at:
        group[1].strike("backward", kill_at, "kill")
        job.start(group)
        assert group[1].died()
        group = [group[0], *spare]
        job.finish(group, restore_snapshot=job.in_memory(job.interrupt(workers[:1]), group))
    else:
        job.finish(group, layout=fully_sharded(2), restore_from=None)
    losses: dict[int, float] = job.losses(group)
    return losses


def compare(runs: dict[str, dict[int, float]], killed: dict[int, float]) -> dict[str, Any]:
    """Print the table, and return what the exit status depends on."""
    bf16, steps = runs["bf16"], max(runs["bf16"])
    shown = sorted({step for step in (1, 50, 100, 200, 300, steps) if step in bf16})
    print(
        f"{'loss at step':14}" + "".join(f"{step:>9}" for step in shown) + f"{f'last {_LAST}':>10} largest difference"
    )
    differences = {}
    for name, losses in runs.items():
        last = mean(losses[step] for step in losses if step > steps - _LAST)
        differences[name] = last / mean(bf16[step] for step in bf16 if step > steps - _LAST) - 1
        largest = max(abs(losses[step] - bf16[step]) for step in bf16)
        print(f"{name:14}" + "".join(f"{losses[step]:9.4f}" for step in shown) + f"{last:10.4f} {largest:8.4f}")
    is_same = killed == runs["tensorwise"]
    print(f"tensorwise, a worker killed in the middle: {'the same losses' if is_same else 'OTHER LOSSES'}")
    passed = is_same and all(abs(difference) <= TOLERANCE for difference in differences.values())
    return {"steps": steps, "differences": differences, "kill_changes_nothing": is_same, "passed": passed}


if __name__ == "__main__":
    main()
