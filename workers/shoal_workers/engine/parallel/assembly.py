"""One rank's part of the model: its modules, the names of their parameters, and the share of each on this rank.

There is one part, or one for each pipeline stage on this rank. Names are those of the whole model in every layout, so
any layout can read what any other has written. A tensor with several names has the first one (see ties.py). If several
stages have a parameter, each has a copy; a second copy on one rank is in no checkpoint. Made by `assemble`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal_workers.contract.layout import Layout
from shoal_workers.engine.group.rounded_sums import RoundedSums
from shoal_workers.engine.parallel.context import ContextCall
from shoal_workers.engine.parallel.data_axis import DataAxis
from shoal_workers.engine.parallel.stages import StageForward, owner_of


@dataclass(frozen=True, slots=True)
class SharedParameter:
    """A parameter that several stages of a pipeline have."""

    name: str
    copies: tuple[nn.Parameter, ...]
    """Copies on this rank, by ascending stage."""
    ranks: tuple[int, ...]
    """All pipeline ranks with a copy, ascending; perhaps this one alone."""


@dataclass(frozen=True, slots=True)
class Assembly:
    """The part of one model under one layout; may outlive the generation."""

    layout: Layout
    parts: tuple[nn.Module, ...]
    stages: tuple[int, ...] = (0,)
    """Index of each part's pipeline stage."""
    num_stages: int = 1
    tied: Mapping[str, str] = field(default_factory=dict)
    """Every further name of a parameter or buffer -> its first name."""
    shared: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Parameters that several stages have a copy of, by first name -> all those stages, ascending."""
    forward_passes: tuple[StageForward, ...] = ()
    """The forward pass of each part, if the model is split into stages."""
    context: ContextCall | None = None
    """None means without a context axis."""
    partial: tuple[tuple[nn.Module, str], ...] = ()
    """Module and attribute of the parameters whose gradient is a sum over the tensor-parallel ranks."""
    data_axes: tuple[DataAxis, ...] = ()
    """The data axis of each part."""
    rounded: RoundedSums | None = None
    """Adds up the gradients of all parts; None: they are added up in their own type."""
    reloaded: frozenset[str] = frozenset()
    """Frozen parameters that a file holds: they are read from it whenever the model is built, and belong to no
    state."""
    buffers: tuple[str, ...] = ()
    """Names of the buffers of the whole model, the same on every rank; without those of routers."""

    @property
    def module(self) -> nn.Module:
        """All parts as one module."""
        return self.parts[0] if len(self.parts) == 1 else nn.ModuleList(self.parts)

    @property
    def is_first(self) -> bool:
        return 0 in self.stages

    @property
    def is_last(self) -> bool:
        return self.num_stages - 1 in self.stages

    def parameters(self) -> list[nn.Parameter]:
        """All, including tied copies."""
        return [parameter for _, parameter in self.all_parameters()]

    def all_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Including tied copies, each under the name of what it is a copy of."""
        for part in self.parts:
            yield from self._all_parameters_of(part)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters, without tied copies."""
        seen: set[str] = set()
        for name, parameter in self.all_parameters():
            if name not in seen:
                seen.add(name)
                yield name, parameter

    def tied_copies(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """(parameter, its tied copy on this rank)."""
        first: dict[str, nn.Parameter] = {}
        for name, parameter in self.all_parameters():
            if name in first:
                yield first[name], parameter
            first.setdefault(name, parameter)

    def shared_copies(self) -> list[SharedParameter]:
        """The trainable parameters of this rank that several stages have, in an order that all ranks agree on."""
        copies_by_name: dict[str, list[nn.Parameter]] = defaultdict(list)
        for name, parameter in self.all_parameters():
            if name in self.shared and parameter.requires_grad:
                copies_by_name[name].append(parameter)
        return [
            SharedParameter(
                name=name,
                copies=tuple(copies_by_name[name]),
                ranks=tuple(sorted({owner_of(self.layout, stage, self.num_stages) for stage in self.shared[name]})),
            )
            for name in sorted(copies_by_name)
        ]

    def named_tensors(self, *, with_reloaded: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Parameters and persistent buffers, each once; without `reloaded`, unless it is asked for.

        Raises:
            TypeError: the model has something else than tensors in its state.
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
                if name in self.reloaded and not with_reloaded:
                    values.add(id(value))  # also under its other names
                    continue
                if id(value) not in values and name not in names:
                    values.add(id(value))
                    names.add(name)
                    yield name, value

    def live_tensors(self) -> Iterator[Tensor]:
        """All that `named_tensors` may name, and buffers that are not persistent."""
        for part in self.parts:
            yield from (
                parameter for name, parameter in part.named_parameters() if self._name(name) not in self.reloaded
            )
            yield from part.buffers()

    def reshard(self) -> None:
        """Shards the parameters again that stay whole after forward passes without a backward pass. Called on all
        ranks. Otherwise whatever reads the state would do it, and not on all ranks: the next step of those that have
        sharded parameters gathers them, and waits for ever for the others."""
        for axis in self.data_axes:
            axis.reshard()

    def records(self) -> dict[int, Any]:
        """FSDP's record of each parameter that it shards, by the parameter's id."""
        return {key: record for axis in self.data_axes for key, record in axis.records().items()}

    def share(self, parameter: nn.Parameter) -> float:
        """1 / the number of ranks of this pipeline stage that hold the same values.

        Squared norms with this weight add up to the squared norm of the whole model."""
        num_shards = 1
        if isinstance(parameter, DTensor):
            for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
                # a dim that tp and FSDP2 both split has torch's _StridedShard, which is no Shard
                num_shards *= 1 if placement.is_replicate() else size
        return num_shards * self.layout.pp / self.layout.world_size

    def copies(self) -> set[int]:
        """Ids of the parameters that an earlier stage has, too: a norm over the whole model counts each once."""
        return {
            id(parameter)
            for stage, part in zip(self.stages, self.parts, strict=True)
            for name, parameter in self._all_parameters_of(part)
            if stage > min(self.shared.get(name, (stage,)))
        }

    def _all_parameters_of(self, part: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in part.named_parameters():
            yield self._name(name), parameter

    def _name(self, own_name: str) -> str:
        return self.tied.get(own_name, own_name)
