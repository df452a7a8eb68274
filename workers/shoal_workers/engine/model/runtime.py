"""ModelRuntime: a model, its optimizer and their state, which may outlive a generation.

    generation 1        built  ....  park     off the groups that are about to be destroyed generation 2
    revive   onto new groups of the same layout; nothing is built, and often nothing read

What other axes than FSDP do to the model (tensor, context and expert axes, DTensors) refers to meshes, and a mesh looks
its groups up by name when it needs them. The names of a generation's groups follow from its layout, so the meshes of
the old generation find the groups of the next. Only the data axes (FSDP2, buckets of gradients) hold the groups
themselves: `park` drops those references, so that a group can be destroyed completely while the model stays, and
`revive` resolves them again. Nothing may run in between.

What it uses of torch.distributed is private; tests/dist/model/test_runtime.py fails if a torch version changes it.
Called by the engine on the training thread.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch.distributed.device_mesh import DeviceMesh

from shoal_workers.contract.messages import Assignment
from shoal_workers.contract.model import ModelShape
from shoal_workers.engine.group.mesh import Meshes
from shoal_workers.engine.parallel.assembly import Assembly
from shoal_workers.engine.state.device_state import DeviceState
from shoal_workers.engine.step.update import Update
from shoal_workers.engine.task.model_calls import ModelCalls
from shoal_workers.torch_internals import group_names, groups_by_name


@dataclass(frozen=True, slots=True)
class ModelRuntime:
    """What outlives a generation; one rank's part of a model under one layout."""

    rank: int
    assembly: Assembly
    meshes: Meshes
    """The meshes that the model was built on; it refers to them as long as it exists."""
    calls: ModelCalls
    update: Update
    state: DeviceState
    shape: ModelShape
    """The shape of the whole model."""
    num_parameters: int
    """The number of the whole model's parameters."""
    trained: tuple[str, ...] = ()
    """Names of the whole model's parameters that need a gradient; the same on every rank."""

    def fits(self, assignment: Assignment) -> bool:
        """Return whether the next generation splits the state as this one did, so that only the groups are
        different."""
        return self.assembly.layout == assignment.layout and self.rank == assignment.rank

    def park(self) -> None:
        """Drop every reference to a process group, and what an interrupted step left in the model."""
        for axis in self.assembly.data_axes:
            axis.park()
        groups_by_name(self.meshes.root).clear()
        for parameter in self.assembly.parameters():
            parameter.grad = None

    def revive(self, meshes: Meshes) -> bool:
        """Put the model onto the groups of new meshes. False: their shapes or names differ from the old ones."""
        if [_names(mesh) for mesh in _all_meshes(self.meshes)] != [_names(mesh) for mesh in _all_meshes(meshes)]:
            return False
        groups_by_name(self.meshes.root).update(groups_by_name(meshes.root))
        for axis in self.assembly.data_axes:
            axis.revive()
        return True


def _all_meshes(meshes: Meshes) -> list[DeviceMesh]:
    values = (getattr(meshes, field.name) for field in fields(meshes))
    return [value for value in values if isinstance(value, DeviceMesh)]


def _names(mesh: DeviceMesh) -> tuple[tuple[int, ...], list[str]]:
    return mesh.shape, group_names(mesh)
