"""The job that the demo trains, and where it is hurt. Package data in the form of code: it works from a wheel too.

The sizes are those of examples/byte-lm.yaml; a test keeps the two alike.
"""

from __future__ import annotations

from typing import Any

KILL_AT_STEP = 20
"""The shard is killed when the run has reported this step."""
KILL_RANK = 2
"""Neither the first rank nor the last: a survivor on both sides has to move."""
WORKERS = 4
TOLERANCE = 1e-4
"""Largest difference of the losses at any step, against the undisturbed run, that is still called equal (fp32)."""

DEMO_SPEC: dict[str, Any] = {
    "name": "byte-lm",
    "model": {"dim": 128, "num_layers": 4, "num_heads": 4, "seq_len": 128},
    "data": {"corpus": "python-stdlib", "max_bytes": 8_000_000},
    "batch": {"global_size": 32, "micro_size": 4},
    "optimizer": {"lr": 3e-3},
    "schedule": {"warmup_steps": 10},
    "stop": {"steps": 120},
    "elasticity": {"min_workers": 2, "max_workers": WORKERS},
    "worker": {"cpus": 1},
    "checkpoint": {"every_steps": 10},
    "validation": {"samples": 128},
    "seed": 1,
}
