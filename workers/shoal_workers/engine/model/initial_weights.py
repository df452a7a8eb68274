"""The values that a new model begins with, written into this rank's part of it; no worker holds more than that.

    draw_weights     what the seed draws, for parameters that `build_undrawn` left without values
    InitialWeights   `init_from`: the tensors of a safetensors file in place of those. The optimizer begins anew. Of a
                     task that `reloads_frozen` the frozen parameters at each build, and at step 0 the others that the
                     file has

Names are those of the model's state, or those of `shoal export` and of transformers, which the task's `export`
translates. Called by `build_runtime`, for a generation that begins at step 0 or for frozen parameters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal_workers.checkpoint.errors import InitialWeightsUnusable
from shoal_workers.checkpoint.safetensors_reader import SafetensorsReader
from shoal_workers.checkpoint.save_plan import local_tensor
from shoal_workers.engine.model.draw import Box, Distribution, draw
from shoal_workers.engine.parallel.assembly import Assembly


def draw_weights(
    assembly: Assembly, distributions: Mapping[str, Distribution], seed: int, read: Collection[str] = ()
) -> None:
    """The values are those of the whole model in every layout, bit by bit. No communication.

    Args:
        distributions: of the whole model, as from `build_undrawn`.
        read: names of parameters that are not drawn, because they are read from a file.
    """
    for name, parameter in assembly.all_parameters():
        distribution, box = distributions.get(name), box_of(parameter)
        if distribution is not None and name not in read and box is not None:
            draw(distribution, seed, name, box, local_tensor(parameter))


def box_of(tensor: Tensor) -> Box | None:
    """Returns this rank's part of a tensor, or None if it has none."""
    if not isinstance(tensor, DTensor):
        return Box(tuple(tensor.shape), (0,) * tensor.ndim, tuple(tensor.shape))
    if tensor.device_mesh.get_coordinate() is None:
        return None
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return Box(tuple(tensor.shape), tuple(chunk.offsets), tuple(chunk.sizes)) if chunk.sizes.numel() else None


class Which(Enum):
    """What of a model is read from a file."""

    ALL = auto()
    """All parameters, and the buffers that the file has."""
    FROZEN = auto()
    """The frozen parameters."""
    FROZEN_AND_FOUND = auto()
    """The frozen parameters, and those of the others that the file has."""


class InitialWeights:
    """The tensors of a file that a model begins with."""

    def __init__(
        self,
        model: nn.Module,
        url: str,
        described: Mapping[str, Any] | None,
        note: Callable[[str], None],
        *,
        which: Which,
    ) -> None:
        """`model`: before it is split, so that every rank finds the same. `described`: the task's `export`.

        Raises InitialWeightsUnusable: a tensor is missing, or has another shape."""
        note(f"reading the initial weights from {url}")
        self._reader = SafetensorsReader(url)
        renames = (described or {}).get("renames", ())
        self._sources: dict[str, str] = {}
        """Name of the model's tensor, the first one if it is tied -> name in the file."""
        problems, missing = [], []
        parameters = {id(parameter) for parameter in model.parameters()}
        frozen = {id(parameter) for parameter in model.parameters() if not parameter.requires_grad}
        required = parameters if which is Which.ALL else frozen
        considered = {Which.ALL: None, Which.FROZEN: frozen, Which.FROZEN_AND_FOUND: parameters}[which]
        self.frozen: set[str] = set()
        """Names of those that are not trained."""
        for names, value in _named_tensors(model):
            if considered is not None and id(value) not in considered:
                continue
            stored = next(
                (stored_name for name in names if (stored_name := self._stored_name(name, renames)) is not None), None
            )
            if stored is None:
                missing += [names[0]] if id(value) in required else []
            elif (self._reader.tensors[stored].shape or (1,)) != tuple(value.shape):
                shape = list(self._reader.tensors[stored].shape)
                problems.append(f"{stored} is {shape} in it, {list(value.shape)} here")
            else:
                self._sources[names[0]] = stored
                if id(value) in frozen:
                    self.frozen.add(names[0])
        problems = [f"it has no {name}" for name in missing] + problems
        if problems:
            more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise InitialWeightsUnusable(url, f"it does not fit the model: {'; '.join(problems[:5])}{more}")

    @property
    def names(self) -> frozenset[str]:
        """Names of the model's tensors that are read."""
        return frozenset(self._sources)

    @torch.no_grad()
    def read_into(self, assembly: Assembly) -> None:
        """No communication. Raises InitialWeightsUnusable: the file is damaged."""
        for name, tensor in assembly.named_tensors(with_reloaded=True):
            source, box = self._sources.get(name), box_of(tensor)
            if source is not None and box is not None:
                self._reader.read_into(source, box.offsets, local_tensor(tensor))
        for parameter, tied_copy in assembly.tied_copies():
            local_tensor(tied_copy).copy_(local_tensor(parameter))

    def _stored_name(self, name: str, renames: Any) -> str | None:
        if name in self._reader.tensors:
            return name
        for pattern, replacement in renames:
            name = re.sub(pattern, replacement, name)
        return name if name in self._reader.tensors else None


def _named_tensors(model: nn.Module) -> Iterator[tuple[list[str], Tensor]]:
    """All names of each parameter and persistent buffer."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            names.setdefault(id(value), []).append(name)
            tensors[id(value)] = value
    return ((own, tensors[key]) for key, own in names.items())
