"""Makes the twin of a job (`simulator/twin.py`): what it has to know of the spec comes from the planner.

Called by `shoal simulate --job` and by bench/twin.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from shoal_service.control.planning import planning_profile
from shoal_service.core.hardware_profile import HardwareProfile
from shoal_service.planner import plan
from shoal_service.planner.report import predict_planned_step
from shoal_service.planner.shape import shape_of
from shoal_service.simulator.twin import TwinJob, TwinLayout
from shoal_workers.contract import JobSpec
from shoal_workers.contract.checks.spec_errors import SpecError, parse_spec

_STEPS = 1000
"""The planner is asked for this many numbers of nodes at most: it takes seconds for 100,000 GPUs."""


def make_twin_job(document: dict[str, Any], gpus: int, profiles: Mapping[str, HardwareProfile]) -> TwinJob:
    """Return the twin of a job that is granted that many GPUs. Raises SpecError."""
    elasticity = {**(document.get("elasticity") or {}), "max_workers": gpus}
    elasticity["min_workers"] = min(gpus, elasticity.get("min_workers", 1))
    worker = {**(document.get("worker") or {}), "gpus": 1}
    spec = parse_spec({**document, "elasticity": elasticity, "worker": worker})
    shape = shape_of(spec)
    if shape is None:
        raise SpecError.at("task", f"task {spec.task!r} does not say how large its model is: no step is predicted.")
    profile = planning_profile(spec, profiles.values())
    per_node = profile.ranks_per_node
    all_nodes = gpus // per_node
    if not all_nodes:
        raise SpecError.at("gpus", f"gpus {gpus} is less than a node; {profile.name} has {per_node} in each.")

    @cache
    def predict(nodes: int) -> TwinLayout:
        return _predict(spec, nodes, profile)

    def find_layout(nodes: int) -> TwinLayout:
        grid = max(1, all_nodes // _STEPS)
        return predict(nodes if nodes in (all_nodes, 1) else max(1, nodes // grid * grid))

    return TwinJob(spec=spec, gpus=gpus, gpus_per_node=per_node, num_params=shape.params, find_layout=find_layout)


def _predict(spec: JobSpec, nodes: int, profile: HardwareProfile) -> TwinLayout:
    ranks = nodes * profile.ranks_per_node
    step_s = predict_planned_step(spec, ranks, profile)
    assert step_s is not None, "the sizes of the model are known"
    layout = plan(spec, ranks, profile).layout
    axis_ranks = sum(degree for degree in layout.mesh_degrees if degree > 1)
    return TwinLayout(-(-layout.world_size // profile.ranks_per_node), step_s, axis_ranks)
