"""The spec that the service would be sent for a description, and which layouts are legal for it. Pure: no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kit.fuzz.draw import SAVED_AFTER, SEED, STEPS, Description
from kit.fuzz.plans import plan_of, world_of
from shoal_workers.contract.checks.legality import violations
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.layout import Layout


def spec_of(description: Description) -> dict[str, Any]:
    ways = description.ways
    size = description.num_micro_batches * description.micro_size
    spec = {
        "task": "kit.fuzz.task:Drawn",
        "model": description.to_json(),
        "batch": {"global_size": size, "micro_size": description.micro_size},
        "optimizer": {"lr": description.lr, "clip_norm": description.clip_norm, "eps": 1e-3, "weight_decay": 0.1},
        "schedule": {"name": description.schedule, "warmup_steps": description.warmup_steps},
        "stop": {"steps": STEPS},
        "checkpoint": {"every_steps": SAVED_AFTER},
        "validation": {"samples": 5, "every_steps": None},
        "snapshot": {"budget": 1.0},
        "seed": SEED,
        "deterministic": description.deterministic,
        "elasticity": {"max_workers": max(map(world_of, ways.layouts))},
    }
    return spec if description.decoder is None else {**spec, "plan": plan_of(description.decoder)}


def broken_rules(description: Description, layout: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the rules that the layout breaks; (): it is legal."""
    spec = parse_spec({**spec_of(description), "elasticity": {"max_workers": 1}})
    return tuple(broken.rule.value for broken in violations(Layout(**layout), spec, spec.plan))
