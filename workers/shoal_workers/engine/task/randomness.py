"""Seeds every generator that a task may draw from. The stream of a micro-batch is a function of its seed alone.

Called once per micro-batch, by the passes. It does not use `torch.manual_seed`, which formats a stack trace and queues
a call for every kind of device that is not in use: that takes longer than a small forward pass, and is never freed.
"""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """torch on the CPU and on the current GPU if one is in use, Python's `random`, and NumPy's legacy generator."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
