"""A model that outlives its generation: taken off the dead groups, and put onto the next ones of the same layout.

What is cut from outside (tensor, context and expert axes, DTensors) refers to meshes, and a mesh finds its groups by
their names when it needs them. The names of a generation's groups follow from its layout, so the meshes of the old one
find the groups of the next. Only FSDP2 keeps the groups themselves: `park` drops those references, so that a group can
go without a trace while the model stays; `revive` resolves them anew. Between the two nothing may run. Uses private
attributes of torch.distributed: this is the only file that does so for re-forming, and tests/dist/model/test_reuse.py
fails if a torch version changes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from shoal_workers.contract.messages import Assignment
from shoal_workers.engine.group.mesh import Meshes
from shoal_workers.engine.model.assembly import Assembly
from shoal_workers.engine.model.model_calls import ModelCalls
from shoal_workers.engine.state.double_buffered_state import DoubleBufferedState
from shoal_workers.engine.state.state_view import StateView
from shoal_workers.engine.step.update import Update

_GROUPS = ("shard_process_group", "reduce_scatter_process_group", "replicate_process_group")


@dataclass(frozen=True, slots=True)
class Kept:
    """A model and its optimizer between two generations."""

    rank: int
    assembly: Assembly
    meshes: Meshes
    """Those that the model was cut over, and refers to for as long as it lives."""
    calls: ModelCalls
    update: Update
    view: StateView
    living: DoubleBufferedState
    num_parameters: int
    """Of the whole model."""

    def fits(self, assignment: Assignment) -> bool:
        """The next generation cuts the state as this one did; only the groups are others."""
        return self.assembly.layout == assignment.layout and self.rank == assignment.rank


def park(kept: Kept) -> None:
    """Let go of every process group, and of what an interrupted step left behind."""
    for part in _fsdp_modules(kept.assembly):
        if part._get_fsdp_state()._is_root is not None:  # else it has never run, and has nothing to reset
            part.reset_iter_state()
    for group in kept.assembly.param_groups():
        for parameter in group.fsdp_params:  # else the next backward adds to them, silently
            parameter.unsharded_accumulated_grad = None
            if (unsharded := getattr(parameter, "_unsharded_param", None)) is not None:
                unsharded.grad = None
        for info in _mesh_infos(group):
            for name in _GROUPS:
                if hasattr(info, name):
                    setattr(info, name, None)
            info.mesh._get_root_mesh()._pg_registry.clear()
    kept.meshes.root._pg_registry.clear()
    for parameter in kept.assembly.parameters():
        parameter.grad = None


def revive(kept: Kept, meshes: Meshes) -> bool:
    """Put the model onto the groups that were just made. False: they are not the like of the old ones."""
    if [_names(mesh) for mesh in _all_of(kept.meshes)] != [_names(mesh) for mesh in _all_of(meshes)]:
        return False
    kept.meshes.root._pg_registry.update(meshes.root._pg_registry)
    for info in (info for group in kept.assembly.param_groups() for info in _mesh_infos(group)):
        info.__post_init__()
    for part in _fsdp_modules(kept.assembly):
        part.set_requires_gradient_sync(True)
        part.set_requires_all_reduce(True)
        part.set_is_last_backward(True)
        part.set_reshard_after_backward(True)
    return True


def _fsdp_modules(assembly: Assembly) -> Iterator[FSDPModule]:
    for part in assembly.parts:
        assert isinstance(part, FSDPModule)
        yield part


def _all_of(meshes: Meshes) -> list[DeviceMesh]:
    values = (getattr(meshes, field.name) for field in fields(meshes))
    return [value for value in values if isinstance(value, DeviceMesh)]


def _mesh_infos(group: Any) -> list[Any]:
    infos = [group.mesh_info, group.post_forward_mesh_info]
    for parameter in group.fsdp_params:
        infos += [parameter.mesh_info, parameter.post_forward_mesh_info]
    return list({id(info): info for info in infos if info is not None}.values())


def _names(mesh: DeviceMesh) -> tuple[tuple[int, ...], list[str]]:
    return mesh.shape, [str(name) for name in mesh._dim_group_names]
