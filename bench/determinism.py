"""What deterministic mode costs: the step time of the 10 M parameter example with and without it, by world size.

    python bench/determinism.py [--worlds 1 2 4] [--trials 3] [--steps 8] [--seq-len 256]

Both modes run `python -m shoal_workers.run` under torchrun and take turns, so that noise of the machine reaches both. A
run's step time is the median of its steps after warm-up, and the ratio (with / without) is the median over the trials.
The table also has the ratio of the fastest steps, which other load disturbs least. The benchmark fails if the printed
losses of two deterministic runs differ. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
from pathlib import Path
from typing import Any

import yaml

from under_torchrun import run_engine

_WARM_UP_STEPS = 2
_ROOT = Path(__file__).parent.parent


def main() -> None:
    arguments = _arguments()
    print("| world size | without, fastest | with, fastest | cost, fastest | cost, median |\n|---|---|---|---|---|")
    rows: list[dict[str, Any]] = []
    losses: set[tuple[str, ...]] = set()
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        for world_size in arguments.worlds:
            trials = []
            for number in range(arguments.trials):
                trial = {}
                for deterministic in (False, True) if number % 2 else (True, False):
                    run = Path(folder) / f"{world_size}-{number}-{deterministic}"
                    run.mkdir()
                    trial[deterministic], seen = _run(run, world_size, deterministic, arguments)
                    if deterministic:
                        losses.add(seen)
                trials.append(trial)
            rows.append(_row(world_size, trials))
            print(_line(rows[-1]), flush=True)
    if len(losses) != 1:
        raise SystemExit(f"the losses differ between runs of deterministic mode: {losses}")
    print(
        json.dumps(
            {
                "rows": rows,
                "trials": arguments.trials,
                "batch": [arguments.global_size, arguments.micro_size],
                "machine": f"{os.cpu_count()}-core VM, {platform.machine()}, torch threads 1, gloo",
            }
        )
    )


def _row(world_size: int, trials: list[dict[bool, list[float]]]) -> dict[str, Any]:
    best = {mode: min(min(trial[mode]) for trial in trials) for mode in (False, True)}
    ratios = [statistics.median(trial[True]) / statistics.median(trial[False]) for trial in trials]
    return {
        "world_size": world_size,
        "without_ms": round(1000 * best[False], 1),
        "with_ms": round(1000 * best[True], 1),
        "ratio_of_fastest": round(best[True] / best[False], 3),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


def _line(row: dict[str, Any]) -> str:
    fastest, median = (100 * (row[name] - 1) for name in ("ratio_of_fastest", "ratio"))
    return (
        f"| {row['world_size']} | {row['without_ms']:.0f} ms | {row['with_ms']:.0f} ms | "
        f"{fastest:+.1f} % | {median:+.1f} % |"
    )


def _run(folder: Path, world_size: int, deterministic: bool, arguments: argparse.Namespace) -> tuple[list[float], Any]:
    """Runs one trial. Returns the seconds of each step after warm-up, and the losses as printed."""
    spec = yaml.safe_load((_ROOT / "examples" / "lm-10m.yaml").read_text())
    spec["batch"] = {"global_size": arguments.global_size, "micro_size": arguments.micro_size}
    spec["stop"] = {"steps": arguments.steps}
    spec["model"]["seq_len"] = arguments.seq_len
    spec["elasticity"] = {"min_workers": 1, "max_workers": max(arguments.worlds)}
    spec["checkpoint"] = {"every_steps": None}
    spec["validation"] = {"samples": 0}
    spec["deterministic"] = deterministic
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(spec))
    run = run_engine(path, folder / "ck", world_size)
    return list(run.step_s[_WARM_UP_STEPS:-1]), run.losses  # the last step saves


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--global-size", type=int, default=8, help="samples per step")
    parser.add_argument("--seq-len", type=int, default=256, help="tokens of a sample")
    parser.add_argument("--micro-size", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
