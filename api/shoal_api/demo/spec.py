"""The job that the demo trains, and where it is hurt. Package data in the form of code: it works from a wheel too.

It is examples/byte-lm.yaml with more frequent checkpoints, so that less is done twice; a test keeps the two alike.
"""

from __future__ import annotations

from typing import Any

KILL_AT_STEP = 25
"""The shard is killed when the run has reported this step."""
KILL_RANK = 2
"""Neither the first rank nor the last: a survivor on both sides has to move."""
WORKERS = 4
TOLERANCE = 1e-4
"""Largest difference of the losses at any step, against the undisturbed run, that is still called equal (fp32)."""

DEMO_SPEC: dict[str, Any] = {
    "name": "byte-lm",
    "model": {"dim": 128, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "seq_len": 128},
    "data": {"corpus": "python-stdlib"},
    "batch": {"global_size": 16, "micro_size": 4},
    "optimizer": {"lr": 4.0e-3},
    "schedule": {"warmup_steps": 10},
    "stop": {"steps": 120},
    "elasticity": {"min_workers": 2, "max_workers": WORKERS},
    "checkpoint": {"every_steps": 10},
    "validation": {"samples": 128},
}


def demo_spec(num_cores: int) -> dict[str, Any]:
    """The spec for a machine: more steps where each is quick, so that a new worker is there before the last one."""
    steps = DEMO_SPEC["stop"]["steps"] * min(4, max(1, num_cores // 2))
    return {**DEMO_SPEC, "stop": {"steps": steps}}
