"""The spec of tests that re-form groups from snapshots in memory: one after each step, and no checkpoint on the way."""

from typing import Any


def snapshot_spec(steps: int) -> dict[str, Any]:
    """For four workers at most: each of them then has one micro-batch of a step."""
    return {
        "batch": {"global_size": 8, "micro_size": 2},
        "optimizer": {"lr": 0.02},
        "schedule": {"warmup_steps": 2},
        "stop": {"steps": steps},
        "checkpoint": {"every_steps": 100},
        "validation": {"samples": 0},
        "elasticity": {"max_workers": 4},
        "snapshot": {"budget": 1.0},
        "seed": 3,
    }
