"""`init_from`: the weights of a safetensors file in place of those that the seed draws. The optimizer begins anew.

Every rank builds the whole model before it keeps its part, so every rank reads all tensors. Names are those of the
model's state, or those of `shoal export` and of transformers, which the task's `export` translates. Called by
`build_runtime` for a generation that begins at step 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal_workers.checkpoint.errors import InitialWeightsUnusable
from shoal_workers.checkpoint.safetensors_reader import SafetensorsReader


def load_initial_weights(
    model: nn.Module, url: str, described: Mapping[str, Any] | None, note: Callable[[str], None]
) -> None:
    """`described`: the task's `export`. Raises InitialWeightsUnusable: a tensor is missing, or has another shape."""
    note(f"reading the initial weights from {url}")
    reader = SafetensorsReader(url)
    renames = (described or {}).get("renames", ())
    state = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    found = {name: stored for name in state if (stored := _stored_name(name, renames, reader)) is not None}
    loaded = {state[name].data_ptr() for name in found}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    missing = [name for name in parameters if name not in found and parameters[name].data_ptr() not in loaded]
    problems = [f"it has no {name}" for name in missing]
    problems += [
        f"{stored} is {list(reader.tensors[stored].shape)} in it, {list(state[name].shape)} here"
        for name, stored in found.items()
        if reader.tensors[stored].shape != tuple(state[name].shape)
    ]
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise InitialWeightsUnusable(url, f"it does not fit the model: {'; '.join(problems[:5])}{more}")
    with torch.no_grad():
        for name, stored in found.items():
            state[name].copy_(reader.read(stored))


def _stored_name(name: str, renames: Any, reader: SafetensorsReader) -> str | None:
    if name in reader.tensors:
        return name
    given = name
    for pattern, replacement in renames:
        given = re.sub(pattern, replacement, given)
    return given if given in reader.tensors else None
