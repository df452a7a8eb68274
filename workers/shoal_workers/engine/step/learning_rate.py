"""Learning rate as a pure function of the step: linear warm-up, then the named decay until the last step.

A rate that depends on the step alone needs no scheduler object and no state in the checkpoint, and is right after any
resize or rollback. Never depends on wall-clock time or on the world size. Called by the trainer.
"""

from __future__ import annotations

import math

from shoal_workers.contract.spec import ScheduleSpec


def lr_factor(schedule: ScheduleSpec, step: int, total_steps: int) -> float:
    """The factor on the peak learning rate in the update from `step` completed steps to `step` + 1.

    Warm-up reaches 1.0 in update number `warmup_steps`; the decay reaches `min_lr_ratio` in the last update, or in
    update number `schedule.steps`, and stays there.
    """
    total_steps = schedule.steps if schedule.steps is not None else total_steps
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    decay_steps = total_steps - schedule.warmup_steps
    if decay_steps <= 0:
        return 1.0
    done = min(1.0, (step + 1 - schedule.warmup_steps) / decay_steps)
    match schedule.name:
        case "constant":
            return 1.0
        case "linear":
            remaining = 1.0 - done
        case "cosine":
            remaining = 0.5 * (1.0 + math.cos(math.pi * done))
    return schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * remaining
