"""Program of four gloo processes: saves a trained state under every layout, loads each into every layout.

    python checkpoint_layouts.py STORE_FILE ROOT

Each layout uses a mesh of the first few ranks. Each saved checkpoint is loaded over a state of other values in each
layout; rank 0 prints one JSON line {"saved->loaded": [names of tensors that differ]}. The ranks are forked from one
process that has imported everything and has no thread yet; four imports would take most of the time.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shoal_workers.checkpoint.commit import marker_of, write_marker
from shoal_workers.checkpoint.reader import load
from shoal_workers.checkpoint.writer import CheckpointWriter
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.worker_reports import SavedPart, SaveFailed

_WORLD = 4
LAYOUTS = ("plain", "fsdp1", "fsdp2", "fsdp3", "fsdp4", "hsdp2x2", "fsdp2xtp2")


class Net(nn.Module):
    """Dims that four ranks divide unevenly (6, 5), or that leave some of them empty-handed (3, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 6)
        self.down = nn.Linear(6, 5)
        self.scale = nn.Parameter(torch.rand(3))
        self.shift = nn.Parameter(torch.rand(1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.rand(4, 3).bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))) * self.scale.sum() + self.shift


def mesh_of(layout: str, meshes: Mapping[str, DeviceMesh]) -> DeviceMesh | None:
    """The layout's mesh, None for a plain model on every rank."""
    return meshes.get(layout)


def make_meshes(world: int) -> dict[str, DeviceMesh]:
    meshes = {f"fsdp{size}": DeviceMesh("cpu", torch.arange(size), mesh_dim_names=("dp",)) for size in range(1, 5)}
    meshes["hsdp2x2"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    meshes["fsdp2xtp2"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert world == 4
    return meshes


def trained_state(mesh: DeviceMesh | None, seed: int) -> dict[str, torch.Tensor]:
    """Model and AdamW state, flat, after two steps from a seed. The global values are equal on all ranks."""
    torch.manual_seed(seed)
    model = Net()
    if mesh is not None and "tp" in (mesh.mesh_dim_names or ()):
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    elif mesh is not None:
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    for _ in range(2):
        model(torch.rand(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.seen += seed
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            state[f"optimizer.{name}.{key}"] = value
    return state


def digests(state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Digests of the global tensors; collective over the mesh."""
    whole = {fqn: (t.full_tensor() if isinstance(t, DTensor) else t).detach() for fqn, t in state.items()}
    return {
        fqn: hashlib.sha256(t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for fqn, t in whole.items()
    }


def save(state: Mapping[str, torch.Tensor], directory: str, rank: int, world: int, writer: CheckpointWriter) -> None:
    """Every rank its part; the marker by rank 0."""
    outcomes: list[SavedPart | SaveFailed] = []
    writer.save(
        state,
        directory=directory,
        rank=rank,
        world_size=world,
        generation=1,
        step=2,
        extra={"saved_by": rank},
        on_done=outcomes.append,
    )
    writer.wait()
    everyones: list[list[SavedPart | SaveFailed]] = [[] for _ in range(world)]
    dist.all_gather_object(everyones, outcomes)
    if rank == 0:
        parts = [part for outcome in everyones for part in outcome]
        assert all(isinstance(part, SavedPart) for part in parts), parts
        whole = [part for part in parts if isinstance(part, SavedPart)]
        write_marker(directory, marker_of(whole, job_id="job", attempt=1, now=0.0))
    dist.barrier()


def find(rank: int, root: str) -> dict[str, list[str]]:
    meshes = make_meshes(_WORLD)
    writer = CheckpointWriter()
    saved: dict[str, dict[str, str]] = {}
    for number, layout in enumerate(LAYOUTS):
        mesh = mesh_of(layout, meshes)
        state = {} if mesh is not None and mesh.get_coordinate() is None else trained_state(mesh, seed=1 + number)
        saved[layout] = digests(state)
        save(state, f"{root}/{layout}/{CheckpointName(2, 1, 1)}", rank, _WORLD, writer)
    differing: dict[str, list[str]] = {}
    for target in LAYOUTS:
        mesh = mesh_of(target, meshes)
        if mesh is not None and mesh.get_coordinate() is None:
            continue
        template = trained_state(mesh, seed=100)
        for source in LAYOUTS:
            state = copy.deepcopy(template) if mesh is None else template
            extra = load(state, directory=f"{root}/{source}/{CheckpointName(2, 1, 1)}")
            assert extra == {"saved_by": 0}
            found = digests(state)
            differing[f"{source}->{target}"] = [fqn for fqn in found if found[fqn] != saved[source].get(fqn)]
            assert rank != 0 or found.keys() == saved[source].keys()
    writer.close()
    return differing


if __name__ == "__main__":
    run_ranks(_WORLD, find)
