"""The jobs that the demo trains, and where they are hurt. Package data in the form of code: it works from a wheel too.

It is examples/byte-lm.yaml with more frequent checkpoints, so that less is done twice; a test keeps the two alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
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


class Scenario(StrEnum):
    RECOVERY = "recovery"
    """Sharded data parallel: one of four workers is killed, three go on, a fourth joins them."""
    RELAYOUT = "relayout"
    """The same under pipeline x tensor parallelism: the three that are left go on in another layout, and when there are
    four again, in the first one."""


@dataclass(frozen=True, slots=True)
class Script:
    """What a scenario trains, and what has to be seen."""

    spec: dict[str, Any]
    layouts: tuple[str, ...]
    """In this order, others may be between them; empty: any."""


def script_of(scenario: Scenario, num_cores: int) -> Script:
    """For a machine: see `demo_spec`."""
    spec = demo_spec(num_cores)
    match scenario:
        case Scenario.RECOVERY:
            return Script(spec, ())
        case Scenario.RELAYOUT:
            changes: dict[str, Any] = {"name": "relayout", "parallelism": {"pp": 2, "tp": 2}}
            return Script({**spec, **changes}, ("pp2 x tp2", "fsdp3", "pp2 x tp2"))


def demo_spec(num_cores: int) -> dict[str, Any]:
    """The spec for a machine: more steps where each is quick, so that a new worker is there before the last one."""
    steps = DEMO_SPEC["stop"]["steps"] * min(4, max(1, num_cores // 2))
    return {**DEMO_SPEC, "stop": {"steps": steps}}
