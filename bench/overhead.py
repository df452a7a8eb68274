"""What Shoal costs without failures: 2 workers under Shoal against the same work in a plain loop under torchrun.

    python bench/overhead.py [--trials 3] [--steps 24] [--sharded]

    plain     bench/plain_loop.py under torchrun: Shoal's model and data set with FSDP2, and no other part of Shoal
    ddp       the same with DistributedDataParallel
    engine    `python -m shoal_workers.run` under torchrun: Shoal's loop without Ray, supervisor and service
    shoal     a job of a real `shoal serve` with its embedded cluster

Both of Shoal's are plain, as a job on CPUs is by default if its state fits; --sharded shards them (`dp_shard: auto`).

The four take turns, so that noise of the machine reaches all of them. A step's time is the median of the steps after
warm-up. A ratio (throughput of Shoal, or of the engine, / throughput of plain or ddp) is the median over
the trials. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

# Started as a script from any directory: the shared modules are found beside this folder.
sys.path.extend(str(Path(__file__).parents[1] / name) for name in ("bench", "tests", "tools"))

from shoal_server import serving
from shoal_workers.contract.job import JobState
from under_torchrun import Run, run_engine, run_plain_loop

_WARM_UP_STEPS = 6
_WORKERS = 2
_HERE = Path(__file__).parent


def main() -> None:
    arguments = _arguments()
    spec = _spec(arguments)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        spec_path = Path(folder) / "spec.yaml"
        spec_path.write_text(yaml.safe_dump(spec))
        shoal_path = Path(folder) / "shoal.yaml"
        # said, not left to the default: `engine` has no planner
        parallelism = {"dp_shard": "auto"} if arguments.sharded else {"shard": "none"}
        shoal_path.write_text(yaml.safe_dump({**spec, "parallelism": parallelism}))
        trials = []
        for number in range(arguments.trials):
            trial = {
                "plain": run_plain_loop(spec_path, _WORKERS).steady_step_s(_WARM_UP_STEPS),
                "ddp": run_plain_loop(spec_path, _WORKERS, options=("--ddp",)).steady_step_s(_WARM_UP_STEPS),
                "engine": _engine(shoal_path, Path(folder) / f"engine-{number}"),
                "shoal": _shoal(shoal_path, Path(folder) / f"shoal-{number}"),
            }
            trials.append(trial)
            shown = ", ".join(f"{name} {1000 * step_s:.1f} ms/step" for name, step_s in trial.items())
            print(f"trial {number + 1}: {shown}", flush=True)
    tokens = spec["batch"]["global_size"] * spec["model"]["seq_len"]
    medians = {name: statistics.median(trial[name] for trial in trials) for name in trials[0]}
    print(
        json.dumps(
            {
                "ratio": round(statistics.median(t["plain"] / t["shoal"] for t in trials), 4),
                "ratio_engine": round(statistics.median(t["plain"] / t["engine"] for t in trials), 4),
                "ratio_ddp": round(statistics.median(t["ddp"] / t["shoal"] for t in trials), 4),
                "ratio_engine_ddp": round(statistics.median(t["ddp"] / t["engine"] for t in trials), 4),
                "tokens_per_s": {name: round(tokens / step_s) for name, step_s in medians.items()},
                "step_ms": {name: round(1000 * step_s, 2) for name, step_s in medians.items()},
                "trials": len(trials),
                "machine": f"{os.cpu_count()} cores, {platform.machine()}, torch threads 1, gloo",
            }
        )
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--global-size", type=int, default=8, help="samples of 256 tokens per step")
    parser.add_argument("--micro-size", type=int, default=2)
    parser.add_argument("--sharded", action="store_true", help="Shoal's state is sharded")
    return parser.parse_args()


def _spec(arguments: argparse.Namespace) -> dict[str, Any]:
    """The example with 10 M parameters on 2 workers; it saves only at the end."""
    spec: dict[str, Any] = yaml.safe_load((_HERE.parent / "examples" / "lm-10m.yaml").read_text())
    spec["batch"] = {"global_size": arguments.global_size, "micro_size": arguments.micro_size}
    spec["stop"] = {"steps": arguments.steps}
    spec["elasticity"] = {"min_workers": _WORKERS, "max_workers": _WORKERS}
    spec["checkpoint"] = {"every_steps": arguments.steps}
    spec["validation"] = {"samples": 0}
    return spec


def _engine(spec_path: Path, checkpoints: Path) -> float:
    return run_engine(spec_path, checkpoints, _WORKERS).steady_step_s(_WARM_UP_STEPS)


def _shoal(spec_path: Path, state_dir: Path) -> float:
    with serving(state_dir, num_cpus=_WORKERS) as server, server.client as client:
        job = client.submit(spec_path)
        done = client.wait(job.id, until=[JobState.SUCCEEDED, JobState.FAILED], timeout_s=600)
        if done.status.state is not JobState.SUCCEEDED:
            raise SystemExit(f"the job ended {done.status.state}: {done.status.message}")
        return Run(tuple(point.step_s for point in client.series(job.id))).steady_step_s(_WARM_UP_STEPS)


if __name__ == "__main__":
    main()
