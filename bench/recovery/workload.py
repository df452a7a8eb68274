"""What every system trains: the 10 M parameter byte-level language model of examples/lm-10m.yaml, on 4 processes.

12 samples a step, one micro-batch of 3 for each of 4 workers. 3 workers share 12 samples too: the peers by 4 samples
each, Shoal, whose micro-batches never change, by dealing out 4 micro-batches to 3 ranks. A step takes about half a
second on 2 cores, so that what a recovery costs is not hidden behind what a step costs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

WORKERS = 4
CHECKPOINT_EVERY_STEPS = 10
_EXAMPLE = Path(__file__).parents[2] / "examples" / "lm-10m.yaml"


def workload(*, steps: int) -> dict[str, Any]:
    """A spec that names model, data, batch, optimizer and schedule; how elastic it is, each system says itself."""
    spec: dict[str, Any] = yaml.safe_load(_EXAMPLE.read_text())
    spec["model"] = spec["model"] | {"seq_len": 32}
    spec["batch"] = {"global_size": 12, "micro_size": 3}
    spec["schedule"] = {"name": "constant", "warmup_steps": 50}
    spec["stop"] = {"steps": steps}
    spec["elasticity"] = {"min_workers": 1, "max_workers": WORKERS}
    spec["checkpoint"] = {"every_steps": CHECKPOINT_EVERY_STEPS}
    spec["validation"] = {"samples": 0}
    return spec
