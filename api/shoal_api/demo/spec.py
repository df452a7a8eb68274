"""The jobs that the demo trains, and the step and rank of the kill. They are code, not files, so that a wheel has them.

The job is examples/byte-lm.yaml with more frequent checkpoints; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

KILL_AT_STEP = 25
"""The worker is killed after the job has reported this step."""
MIN_STEPS = 2 * KILL_AT_STEP
"""The fewest steps with which the kill is noticed and something is trained after it."""
KILL_RANK = 2
"""It is neither the first rank nor the last, so there are survivors with a lower and with a higher rank."""
WORKERS = 4
TOLERANCE = 1e-4
"""Largest allowed difference of the losses (fp32) at any step from those of the undisturbed run."""

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
    """Sharded data parallelism: one of four workers is killed, three continue, a fourth joins them."""
    RELAYOUT = "relayout"
    """The same with pipeline and tensor parallelism: the three survivors continue in another layout; with four workers
    again, the job returns to the first layout."""


@dataclass(frozen=True, slots=True)
class Script:
    """What a scenario trains, and which layouts it must show."""

    spec: dict[str, Any]
    layouts: tuple[str, ...]
    """Expected layouts in this order; others may lie between them. Empty: any layouts."""


def make_script(scenario: Scenario, steps: int | None = None) -> Script:
    """Return what a scenario trains. `steps`: how many at least, instead of those of the spec; the learning rate decays
    over them, also if the run goes on until the new worker has joined."""
    steps = steps or DEMO_SPEC["stop"]["steps"]
    spec = {**DEMO_SPEC, "stop": {"steps": steps}, "schedule": {**DEMO_SPEC["schedule"], "steps": steps}}
    match scenario:
        case Scenario.RECOVERY:
            return Script(spec, ())
        case Scenario.RELAYOUT:
            changes: dict[str, Any] = {"name": "relayout", "parallelism": {"pp": 2, "tp": 2}}
            return Script({**spec, **changes}, ("pp2 x tp2", "fsdp3", "pp2 x tp2"))
