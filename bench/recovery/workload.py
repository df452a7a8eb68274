"""What every system trains on 4 workers: the byte-level language model of examples/lm-10m.yaml (10 M parameters), or
one of 85 M parameters with the block sizes of GPT-2 small.

A step has 12 samples, one micro-batch of 3 for each of 4 workers. With 3 workers the peers train 4 samples per worker;
Shoal, whose micro-batches never change, distributes 4 micro-batches over 3 ranks. A step takes about half a second on 2
cores, so that a recovery is long compared to a step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from measurements.trial import Size

WORKERS = 4
GLOBAL_BATCH = 12
CHECKPOINT_EVERY_STEPS = 10
_MODELS: dict[Size, dict[str, int]] = {
    Size.SMALL: {},
    Size.LARGE: {"dim": 768, "num_layers": 12, "num_heads": 12, "num_kv_heads": 12},
}
_EXAMPLE = Path(__file__).parents[2] / "examples" / "lm-10m.yaml"


def workload(*, steps: int, params: Size) -> dict[str, Any]:
    """The spec with model, data, batch, optimizer and schedule. The peers set their elasticity in their own options."""
    spec: dict[str, Any] = yaml.safe_load(_EXAMPLE.read_text())
    spec["model"] = spec["model"] | {"seq_len": 32} | _MODELS[params]
    spec["batch"] = {"global_size": GLOBAL_BATCH, "micro_size": 3}
    spec["schedule"] = {"name": "constant", "warmup_steps": 50}
    spec["stop"] = {"steps": steps}
    spec["elasticity"] = {"min_workers": 1, "max_workers": WORKERS}
    spec["checkpoint"] = {"every_steps": CHECKPOINT_EVERY_STEPS}
    spec["validation"] = {"samples": 0}
    return spec
