"""The jobs of the soak, and the undisturbed jobs that they are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal_api.client import Client
from shoal_service.views import JobView

TOLERANCE = 1e-5
PROMISED_STEPS = 200
"""Number of steps for which the losses of a job without deterministic mode stay within the tolerance of an undisturbed
run. Another world size sums in another order, and training amplifies the difference in every system."""
_ENDLESS = 10_000_000
_PACE_S = 0.1
_TASKS = Path(__file__).parent / "tasks"
_ELASTICITY: dict[str, dict[str, int]] = {
    "exact": {"min_workers": 1, "max_workers": 3},
    "spare": {"min_workers": 1, "max_workers": 2, "standby": 1},
}


def submit_disturbed(client: Client, *, deterministic: bool) -> dict[str, JobView]:
    """Submits the jobs, and returns them by name. `exact` must have bit-identical losses if `deterministic`; `spare`
    has a standby."""
    return {
        name: client.submit(
            _spec(name, steps=_ENDLESS, pace_s=_PACE_S, deterministic=deterministic)
            | {"elasticity": {**elasticity, "wait_s": 3600}}
        )
        for name, elasticity in _ELASTICITY.items()
    }


def submit_reference(client: Client, name: str, steps: int, *, deterministic: bool) -> JobView:
    """The same training without faults and without pauses, on two workers."""
    spec = _spec(name, steps=steps, pace_s=0.0, deterministic=deterministic)
    return client.submit(spec | {"name": f"{name}-undisturbed", "elasticity": {"min_workers": 2, "max_workers": 2}})


def _spec(name: str, *, steps: int, pace_s: float, deterministic: bool) -> dict[str, Any]:
    return {
        "name": name,
        "task": "paced:PacedLanguageModel",
        "code": {"working_dir": str(_TASKS)},
        "model": {"dim": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "seq_len": 32},
        "data": {"corpus": "python-stdlib", "pace_s": pace_s},
        "batch": {"global_size": 8, "micro_size": 2},
        "optimizer": {"lr": 1e-3},
        "schedule": {"name": "constant", "warmup_steps": 10},
        "stop": {"steps": steps},
        "checkpoint": {"every_steps": 25},
        "validation": {"samples": 0},
        "snapshot": {"budget": 1.0},  # a model this small takes longer to copy than to train
        "retry": {"max_recoveries": 1_000_000, "max_failures": 100},
        "health": {"probation_s": 5},
        "seed": 1 + list(_ELASTICITY).index(name),
        "deterministic": deterministic and name == "exact",
    }
