"""Does the lazy imports and first calls that the first group of a worker would otherwise wait for, once, in `prepare`.

A standby that has never trained needs 0.8 s more than a survivor to form its first group and to take its first step.
Nearly all of it are imports (FSDP, the optimizer's torch._dynamo) and caches. So a tiny model is sharded over a group
of one, trained for a step and discarded. Called by the engine.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from shoal_workers.contract.layout import fully_sharded
from shoal_workers.contract.spec import OptimizerSpec, Precision
from shoal_workers.engine.group.mesh import build_mesh
from shoal_workers.engine.group.process_group import backend_of
from shoal_workers.engine.model.fast_build import build_for_restore
from shoal_workers.engine.parallel.assembly import Assembly
from shoal_workers.engine.parallel.compression import mixed_precision
from shoal_workers.engine.parallel.sharding import shard_model
from shoal_workers.engine.step.update import default_update

_TIMEOUT_S = 30.0


def warm_up(device: torch.device) -> None:
    """Training thread, before the first generation; leaves no group and no random state behind."""
    layout = fully_sharded(1)
    backend = backend_of(device.type, layout)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=_TIMEOUT_S))
        try:
            meshes = build_mesh(layout, device.type, _TIMEOUT_S, 0)
            model = build_for_restore(lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).to(device))
            shard_model(model, meshes, mixed_precision(Precision.FP32), list(model.children()))
            update = default_update(Assembly(layout, (model,)), OptimizerSpec())
            torch.autograd.backward(model(torch.ones(2, 8, device=device)).square().mean())
            update.step(1.0)
        finally:
            dist.destroy_process_group()
