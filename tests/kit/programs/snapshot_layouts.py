"""Program of four gloo processes: snapshots a trained state under every layout, loads each into every layout.

    python snapshot_layouts.py STORE_FILE ROOT

The layouts are those of checkpoint_layouts.py. Ranks 0 and 1 are on node `a`, 2 and 3 on node `b`, so every load of a
layout of three or four ranks reads some parts from local memory and some over TCP. Rank 0 prints one JSON line:
{"differing": {"saved->loaded": [names of tensors that differ]}, "local": bytes, "remote": bytes}.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch.distributed as dist
from checkpoint_layouts import LAYOUTS, digests, make_meshes, mesh_of, trained_state
from ranks import run_ranks

from shoal_workers.contract.snapshots import SnapshotServer, SnapshotSource
from shoal_workers.snapshot_store.store import SnapshotStore

_WORLD = 4


def find(rank: int, root: str) -> dict[str, Any]:
    meshes = make_meshes(_WORLD)
    result = {"differing": {}, "local": 0, "remote": 0}
    template = {
        layout: trained_state(mesh, seed=100)
        for layout in LAYOUTS
        if (mesh := mesh_of(layout, meshes)) is None or mesh.get_coordinate() is not None
    }
    node = "ab"[rank // 2]
    store = SnapshotStore(job_id="job", attempt=1, worker_id=f"s{rank}", node_id=node, key="secret", root=Path(root))
    everyone: list[SnapshotServer] = [SnapshotServer(node_id="", host="", port=0)] * _WORLD
    dist.all_gather_object(everyone, SnapshotServer(node_id=node, host="127.0.0.1", port=store.port))
    for generation, layout in enumerate(LAYOUTS, start=1):
        mesh = mesh_of(layout, meshes)
        in_it = layout in template
        world = _WORLD if mesh is None else mesh.size()
        state = trained_state(mesh, seed=generation) if in_it else {}
        saved = digests(state)
        if in_it:
            extra = {"saved_by": rank, "layout": layout}
            store.prepare(state, rank=rank, world_size=world)
            store.snapshot(state, generation=generation, rank=rank, world_size=world, step=2, extra=extra)
        dist.barrier()
        source = SnapshotSource(generation=generation, world_size=world, step=2, parts=tuple(everyone[:world]))
        for target, blank in template.items():
            into = copy.deepcopy(blank) if target == "plain" else blank
            loaded = store.load(into, source, check=lambda: None)
            assert loaded.extra == {"saved_by": 0, "layout": layout}, loaded
            result["local"] += loaded.local_bytes
            result["remote"] += loaded.remote_bytes
            found = digests(into)
            result["differing"][f"{layout}->{target}"] = [fqn for fqn in found if in_it and found[fqn] != saved[fqn]]
        dist.barrier()
    store.close()
    return result


if __name__ == "__main__":
    run_ranks(_WORLD, find)
