"""A sharded model that outlives its generation: taken off the dead group, and put onto the next one of the same shape.

FSDP2 objects point to process groups. `park` drops those references, so that a group can go without a trace while the
model stays; `revive` resolves them anew after the next group of equal shape is up. Between the two nothing may run.
Uses private attributes of torch.distributed.fsdp: this is the only file that does so for re-forming, and
tests/dist/test_re_forming.py fails if a torch version changes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from shoal_workers.contract.messages import Assignment
from shoal_workers.engine.assembly import Assembly
from shoal_workers.engine.living import Living
from shoal_workers.engine.mesh import Meshes
from shoal_workers.engine.parallel.model_calls import ModelCalls
from shoal_workers.engine.state_view import StateView
from shoal_workers.engine.update import Update


@dataclass(frozen=True, slots=True)
class Kept:
    """A model and its optimizer between two generations."""

    rank: int
    assembly: Assembly
    calls: ModelCalls
    update: Update
    view: StateView
    living: Living
    num_parameters: int
    """Of the whole model."""

    def fits(self, assignment: Assignment) -> bool:
        """The next generation cuts the state as this one did; only the groups are others."""
        return self.assembly.layout == assignment.layout and self.rank == assignment.rank


def park(kept: Kept | None) -> Kept | None:
    """Let go of every process group, and of what an interrupted step left behind.

    None: other axes than that of the shards leave their groups inside of modules; such a model is built again.
    """
    if kept is None:
        return None
    layout = kept.assembly.layout
    if layout.dp_shard != layout.world_size or layout.ep > 1:
        return None
    (model,) = kept.assembly.parts
    assert isinstance(model, FSDPModule)
    if model._get_fsdp_state()._is_root is not None:  # else it has never run, and has nothing to reset
        model.reset_iter_state()
    for group in kept.assembly.param_groups():
        for parameter in group.fsdp_params:  # else the next backward adds to them, silently
            parameter.unsharded_accumulated_grad = None
            if (unsharded := getattr(parameter, "_unsharded_param", None)) is not None:
                unsharded.grad = None
        for info in _mesh_infos(group):
            info.shard_process_group = None
            info.reduce_scatter_process_group = None
            info.mesh._get_root_mesh()._pg_registry.clear()
    for tensor in model.parameters():
        tensor.grad = None
    return kept


def revive(assembly: Assembly, meshes: Meshes) -> bool:
    """Put the model onto the groups that were just made. False: they are not the like of the old ones."""
    (model,) = assembly.parts
    mesh = meshes.dense
    infos = [info for group in assembly.param_groups() for info in _mesh_infos(group)]
    own = {id(info.mesh): info.mesh for info in infos}
    if any(_names(known) != _names(mesh) or known.shape != mesh.shape for known in own.values()):
        return False
    for info in infos:
        info.__post_init__()
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(True)
    model.set_is_last_backward(True)
    model.set_reshard_after_backward(True)
    return True


def _mesh_infos(group: Any) -> list[Any]:
    infos = [group.mesh_info, group.post_forward_mesh_info]
    for parameter in group.fsdp_params:
        infos += [parameter.mesh_info, parameter.post_forward_mesh_info]
    return list({id(info): info for info in infos if info is not None}.values())


def _names(mesh: DeviceMesh) -> list[str]:
    return [str(name) for name in mesh._dim_group_names]
