"""Program of gloo processes: collectives of all ranks along the axes of a mesh, beside those in one group.

    python all_ranks.py STORE_FILE WORLD LAYOUTS

LAYOUTS is JSON: a list of the degrees of layouts of that world. The answer has for each of them, by the name of a
check, whether it holds on every rank; and "difference", the largest of sums along the axes to those in one group,
relative.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from ranks import largest, run_ranks

from shoal_workers.contract.layout import Layout
from shoal_workers.engine.group.all_ranks import RankGrid, make_separate_groups
from shoal_workers.engine.group.mesh import build_mesh

_SIZES = (5, 1 << 17)
"""Float64: directly in one round and, in lines of three ranks, in two."""


def find(rank: int, _world: str, layouts: str) -> list[dict[str, float]]:
    return [_compare(rank, Layout(**degrees)) for degrees in json.loads(layouts)]


def _compare(rank: int, layout: Layout) -> dict[str, float]:
    meshes = build_mesh(layout, "cpu", 60.0, rank)
    grid, one_group = RankGrid.from_mesh(meshes.root), RankGrid.from_default_group()
    separate = make_separate_groups(grid, meshes.root, timedelta(seconds=60))
    assert len(grid.axis_groups) == len(separate.axis_groups) == sum(degree > 1 for degree in layout.mesh_degrees)
    assert dist.group.WORLD not in (*grid.axis_groups, *separate.axis_groups)
    holds: dict[str, bool] = {}
    difference = 0.0
    for size in _SIZES:
        summand = torch.randn(size, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        expected, total, small = summand.clone(), summand.clone(), summand.clone()
        one_group.all_reduce_small(expected)
        separate.all_reduce(total)
        begun = grid.begin_all_reduce_small(small)
        begun.wait()
        begun.wait()
        for name, value in (("ring", total), ("small", small)):
            everywhere = one_group.all_gather(value)
            holds[f"{name} {size}: same bits on all ranks"] = all(torch.equal(value, other) for other in everywhere)
            difference = max(difference, float((value - expected).abs().max() / expected.abs().max()))
    figures = torch.zeros(layout.world_size, dtype=torch.float64)
    figures[rank] = float("inf") if rank == 1 else 0.1 + rank
    one, along = figures.clone(), figures.clone()
    one_group.all_reduce_small(one)
    grid.all_reduce_small(along)
    holds["zeros elsewhere: same bits"] = torch.equal(one, along)
    largest_of, integers = torch.tensor([rank * 0.1, -rank]), torch.tensor([rank, 2**40 + rank])
    expected_largest, expected_integers = largest_of.clone(), integers.clone()
    one_group.all_reduce(expected_largest, dist.ReduceOp.MAX)
    one_group.all_reduce(expected_integers)
    grid.all_reduce(largest_of, dist.ReduceOp.MAX)
    grid.all_reduce(integers)
    holds["largest: same bits"] = torch.equal(largest_of, expected_largest)
    holds["integers: same"] = torch.equal(integers, expected_integers)
    ranks = [*range(layout.world_size)]
    holds["gathered by rank"] = [int(row[0]) for row in grid.all_gather(torch.tensor([rank, 0]))] == ranks
    holds["values by rank"] = grid.gather_values({"rank": rank}) == [{"rank": other} for other in ranks]
    tensor, objects = torch.tensor([rank + 7]), [f"rank {rank}"]
    grid.broadcast(tensor)
    grid.broadcast_objects(objects, torch.device("cpu"))
    holds["rank 0's"] = int(tensor) == 7 and objects == ["rank 0"]
    failures: dict[str, Any] = largest([(name, float(not value)) for name, value in holds.items()])
    return {name: not failure for name, failure in failures.items()} | largest([("difference", difference)])


if __name__ == "__main__":
    run_ranks(int(sys.argv[2]), find)
