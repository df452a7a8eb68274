"""How long a run is, and which of its steps save or validate: pure functions of the spec and the size of the data.

Called by the trainer and by `Replay`.
"""

from __future__ import annotations

import math
from fractions import Fraction

from shoal_workers.contract.spec import StopSpec


def total_steps(stop: StopSpec, *, global_size: int, num_samples: int, tokens_per_sample: int) -> int:
    """Optimizer steps of the whole run; tokens and epochs are rounded up to whole steps.

    Args:
        global_size: samples per step.
        num_samples: length of the training split.
        tokens_per_sample: 1 for a task without tokens, whose `stop.tokens` counts samples.
    """
    if stop.steps is not None:
        return stop.steps
    if stop.tokens is not None:
        return math.ceil(Fraction(stop.tokens, global_size * tokens_per_sample))
    assert stop.epochs is not None, "StopSpec holds exactly one of the three"
    # through the decimal spelling: 0.1 epochs of 30 samples are 3 samples, not 3.0000000000000001 and one step more
    return math.ceil(Fraction(repr(stop.epochs)) * num_samples / global_size)


def is_due(step: int, every_steps: int | None) -> bool:
    """Whether something that happens every `every_steps` completed steps happens after step number `step`."""
    return every_steps is not None and step % every_steps == 0
