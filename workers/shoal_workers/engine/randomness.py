"""Seeds every generator that a task may draw from. The stream of a micro-batch is a function of its seed alone."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """torch on all devices, Python's `random`, and NumPy's legacy generator."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
