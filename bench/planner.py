"""CPU seconds that the planner takes for all layouts of large worlds.

    python bench/planner.py [--trials 3]

For the examples of 70 B and 671 B parameters on 1,024 and on 16,384 H100: the CPU seconds to enumerate, predict and
rank every legal layout (median of the trials, the first one included), the number of layouts, and the best one. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import yaml

from shoal_service.planner import rank
from shoal_service.planner.gpus import PROFILES
from shoal_workers.contract.checks.spec_errors import parse_spec

_EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
_LIMITS_S = {1024: 1.0, 16384: 1.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=3)
    trials = parser.parse_args().trials
    print(json.dumps(measure_planner(trials)))


def measure_planner(trials: int) -> dict[str, Any]:
    """Measures the planner. The result is written as JSON."""
    figures = [
        _measure(name, world_size, trials) for name in ("llama-70b", "moe-671b") for world_size in sorted(_LIMITS_S)
    ]
    return {"planner": figures, "passed": all(figure["seconds"] < figure["limit_s"] for figure in figures)}


def _measure(name: str, world_size: int, trials: int) -> dict[str, Any]:
    spec = parse_spec(yaml.safe_load((_EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8")))
    seconds = []
    for _ in range(trials):
        start = time.process_time()
        found = rank(spec, world_size, PROFILES["h100"])
        seconds.append(time.process_time() - start)
    best = found.predictions[0]
    figure = {
        "spec": name,
        "gpus": world_size,
        "seconds": round(statistics.median(seconds), 3),
        "limit_s": _LIMITS_S[world_size],
        "layouts": found.num_layouts,
        "fitting": found.num_fitting,
        "best": best.name,
        "step_s": round(best.step_s, 3),
        "mfu": round(best.mfu, 3),
    }
    print(f"{name} on {world_size:,}: {figure['seconds']} s for {found.num_layouts:,} layouts", flush=True)
    return figure


if __name__ == "__main__":
    main()
