"""Finds what a forward pass writes to a parameter, trained or frozen: ranks would have other values, since they see
other samples.

torch counts writes in place, except those through `data`; an assignment to `data` gives a tensor another address. So a
parameter's count and address are compared around each pass, and in the first steps of a generation also a hash of its
values. Used by both kinds of data axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shoal_workers.engine.parallel.cutting import local

HASHED_STEPS = 2
"""Steps of a generation in which the values of parameters are compared around each forward pass."""


@torch.no_grad()
def marks_of(parameters: Iterable[Tensor], *, is_hashed: bool) -> list[tuple[int, ...]]:
    """Return for each parameter torch's counts of its changes, and `mark_of`."""
    return [
        (parameter._version, local(parameter)._version, *mark_of(parameter, is_hashed=is_hashed))
        for parameter in parameters
    ]


def first_written(before: Sequence[tuple[int, ...]], after: Sequence[tuple[int, ...]]) -> int | None:
    """Return the number of the first parameter whose marks differ; None if there is none."""
    return next((number for number, mark in enumerate(before) if after[number] != mark), None)


def mark_of(parameter: Tensor, *, is_hashed: bool) -> tuple[int, int, int]:
    """Return what differs after a write through `data`.

    The hash is the exclusive or of all values, which is 0 for any even number of equal ones: so that of their sum
    counts too.
    """
    part = local(parameter)  # tp may have split it
    is_hashed = is_hashed and part.numel() > 0
    real = torch.view_as_real(part) if is_hashed and part.is_complex() else part
    if not is_hashed:
        return part.data_ptr(), 0, 0
    with torch.no_grad():
        return part.data_ptr(), int(torch.hash_tensor(real).item()), int(torch.hash_tensor(real.sum().view(1)).item())
