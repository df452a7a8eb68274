"""Finds what a forward pass writes to a parameter: ranks would have other values, since they see other samples.

torch counts writes in place, except those through `data`; an assignment to `data` gives a tensor another address. So a
parameter's count and address are compared around each pass, and in the first steps of a generation also a hash of its
values. Used by both kinds of data axis.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal_workers.engine.parallel.cutting import local

HASHED_STEPS = 2
"""Steps of a generation in which the values of parameters are compared around each forward pass."""


def mark_of(parameter: Tensor, *, is_hashed: bool) -> tuple[int, int]:
    """What differs after a write through `data`."""
    part = local(parameter)  # tp may have split it
    is_hashed = is_hashed and part.numel() > 0
    real = torch.view_as_real(part) if is_hashed and part.is_complex() else part
    with torch.no_grad():
        value = int(torch.hash_tensor(real).item()) if is_hashed else 0
    return part.data_ptr(), value
