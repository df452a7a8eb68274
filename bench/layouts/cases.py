"""The cases for the comparison with the planner: two small models, and layouts of 1 to 8 processes with every axis."""

from __future__ import annotations

from typing import Any

WORLD = 8
_COMMON: dict[str, Any] = {
    "data": {"corpus": "python-stdlib"},
    "batch": {"global_size": 8, "micro_size": 1},
    "schedule": {"warmup_steps": 1},
    "checkpoint": {"every_steps": None},
    "validation": {"samples": 0},
    "snapshot": {"enabled": False},
    "elasticity": {"max_workers": WORLD},
}
Model = dict[str, int]
TIMED_MODEL: Model = {"dim": 256, "num_layers": 8, "num_heads": 8, "seq_len": 128}
COUNTED_MODEL: Model = {**TIMED_MODEL, "dim": 512}
"""Large enough that a rank's part of every weight and activation is a memory mapping of its own, also with eight ranks:
malloc keeps the holes of smaller blocks, and they would be counted."""

Fixed = dict[str, Any]
"""A `parallelism` section; the product of its axes is the world size. Defaults: `recompute` none, `shard` full."""

REALITY: tuple[Fixed, ...] = (
    {"dp_shard": 1},
    {"dp_shard": 2},
    {"dp_shard": 2, "shard": "optimizer"},
    {"dp_shard": 2, "shard": "gradients"},
    {"dp_replicate": 2, "dp_shard": 1},
    {"tp": 2},
    {"cp": 2},
    {"pp": 2, "schedule": "1f1b"},
    {"pp": 2, "schedule": "gpipe"},
    {"pp": 2, "schedule": "interleaved_1f1b"},
    {"pp": 2, "schedule": "zbv"},
    {"dp_shard": 2, "recompute": "full"},
    {"dp_shard": 2, "recompute": "selective"},
    {"dp_shard": 3},
    {"dp_shard": 4},
    {"dp_shard": 4, "shard": "optimizer"},
    {"dp_replicate": 2, "dp_shard": 2},
    {"tp": 4},
    {"pp": 4, "schedule": "1f1b"},
    {"dp_shard": 2, "tp": 2},
    {"pp": 2, "tp": 2, "schedule": "1f1b"},
    {"pp": 2, "dp_shard": 2, "schedule": "1f1b"},
    {"dp_shard": 2, "cp": 2},
    {"dp_shard": 8},
    {"dp_shard": 4, "tp": 2},
    {"pp": 2, "dp_shard": 2, "tp": 2, "schedule": "1f1b"},
)
"""The layouts of the planner's table."""

TECHNIQUES: tuple[tuple[str, tuple[Fixed, ...]], ...] = (
    ("activation checkpointing", tuple({"dp_shard": 2, "recompute": mode} for mode in ("none", "selective", "full"))),
    ("ZeRO", tuple({"dp_shard": 4, "shard": level} for level in ("optimizer", "gradients", "full"))),
)
"""Each list is ordered from the largest to the smallest memory."""

OFFLOAD: tuple[Fixed, ...] = tuple({"dp_shard": 2, "offload": offload} for offload in (False, True))


def spec_of(model: Model, *, steps: int, **changes: Any) -> dict[str, Any]:
    return {**_COMMON, "model": model, "stop": {"steps": steps}, **changes}


def world_of(fixed: Fixed) -> int:
    world = 1
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"):
        world *= fixed.get(axis, 1)
    return world


def parallelism(fixed: Fixed) -> Fixed:
    return {"dp_shard": 1, "recompute": "none", "shard": "full", **fixed}
