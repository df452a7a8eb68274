"""What one rank has of the model: its parts, the names of their parameters, and how much of each is here.

One part, or one for each pipeline stage on this rank. Names are those of the whole model, whatever the layout, so any
layout can read what any other has written. A tied weight has the name of the parameter that it is tied to; where a rank
has both ends of a pipeline, the second is a tied_copy that no checkpoint knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shoal_workers.contract.layout import Layout


@dataclass(frozen=True, slots=True)
class Assembly:
    """Of one model under one layout; outlives the generation."""

    layout: Layout
    parts: tuple[nn.Module, ...]
    """Each an FSDPModule."""
    stages: tuple[int, ...] = (0,)
    """Index of each part's pipeline stage."""
    num_stages: int = 1
    tied: Mapping[str, str] = field(default_factory=dict)
    """Alias -> name of the parameter that it is the same as."""
    partial: tuple[tuple[nn.Module, str], ...] = ()
    """Module and attribute of the parameters that have a term of their gradient on each tensor-parallel rank."""

    @property
    def module(self) -> nn.Module:
        """For those who want a single one."""
        return self.parts[0] if len(self.parts) == 1 else nn.ModuleList(self.parts)

    @property
    def is_first(self) -> bool:
        return 0 in self.stages

    @property
    def is_last(self) -> bool:
        return self.num_stages - 1 in self.stages

    def parameters(self) -> list[nn.Parameter]:
        """All, also tied_copies."""
        return [parameter for _, parameter in self._all_parameters()]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Without tied_copies."""
        seen: set[str] = set()
        for name, parameter in self._all_parameters():
            if name not in seen:
                seen.add(name)
                yield name, parameter

    def tied_copies(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """(parameter, its tied_copy on this rank)."""
        first: dict[str, nn.Parameter] = {}
        for name, parameter in self._all_parameters():
            if name in first:
                yield first[name], parameter
            first.setdefault(name, parameter)

    def tied_end(self) -> Iterator[nn.Parameter]:
        """Parameters of this rank whose other copy is at the pipeline's other end, on another rank; in an order that
        both ends agree on."""
        if self.num_stages == 1 or self.is_first == self.is_last:
            return
        by_name = dict(self._all_parameters())
        for owner in sorted(set(self.tied.values())):
            if owner in by_name:
                yield by_name[owner]

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and buffers that are kept, each once.

        Raises:
            TypeError: the model keeps something else in its state.
        """
        values: set[int] = set()
        names: set[str] = set()
        for part in self.parts:
            for own_name, value in part.state_dict(keep_vars=True).items():
                name = self._name(own_name)
                if not isinstance(value, Tensor):
                    raise TypeError(
                        f"the model's state {name!r} is {type(value).__name__}; only tensors can be checkpointed."
                    )
                if id(value) not in values and name not in names:
                    values.add(id(value))
                    names.add(name)
                    yield name, value

    def live_tensors(self) -> Iterator[Tensor]:
        for part in self.parts:
            yield from part.parameters()
            yield from part.buffers()

    def param_groups(self) -> Iterator[Any]:
        """FSDP's own records of what it shards."""
        for part in self.parts:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    yield from module._get_fsdp_state()._fsdp_param_groups

    def share(self, parameter: nn.Parameter) -> float:
        """1 / the number of ranks of this pipeline stage that hold the same values: squared norms that are weighted
        with it add up to that of the whole model. 0 for a copy at the last stage of what the first has."""
        num_shards = 1
        if isinstance(parameter, DTensor):
            for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
                num_shards *= size if placement.is_shard() else 1
        return num_shards * self.layout.pp / self.layout.world_size

    def copies(self) -> set[int]:
        """Ids of the parameters that are copies at the last stage of what the first has."""
        if self.num_stages == 1 or not self.is_last:
            return set()
        aliases = set(self.tied.values())
        return {id(p) for name, p in self._all_parameters_of(self.parts[-1]) if name in aliases}

    def _all_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for part in self.parts:
            yield from self._all_parameters_of(part)

    def _all_parameters_of(self, part: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in part.named_parameters():
            yield self._name(name), parameter

    def _name(self, own_name: str) -> str:
        return self.tied.get(own_name, own_name)
