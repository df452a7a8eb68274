"""The planner's rules of thumb, by name: where axes may go, and which of nearly equal layouts wins. Pure.

Each rule either limits what is looked at, or orders it, and appears by its name in the reasons of what was chosen.
"""

from __future__ import annotations

from enum import StrEnum

from shoal_service.core.hardware_profile import GIB, DeviceKind, HardwareProfile
from shoal_service.planner.memory import BytesPart
from shoal_service.planner.step_time import SecondsPart
from shoal_workers.contract.layout import Layout, Recompute, ShardLevel


class Preference(StrEnum):
    TP_INSIDE_NODE = "tp_inside_node"
    """tp talks in every layer: never over the network."""
    DATA_AXES_ON_CPU = "data_axes_on_cpu"
    """Workers without a GPU stay on the data axes while there is a micro-batch for each: their links are too slow."""
    FITS_FIRST = "fits_first"
    """A layout that fits into memory before any that does not."""
    FASTEST = "fastest"
    SIMPLEST_OF_EQUALS = "simplest_of_equals"
    """Of steps within 1 %, the layout with fewer axes, then with less memory."""
    LEAST_SHARDED = "least_sharded"
    """Of shard levels that fit, the one that talks least."""
    RECOMPUTE_FOR_MEMORY = "recompute_for_memory"
    OFFLOAD_AS_LAST_RESORT = "offload_as_last_resort"
    IDLE_FOR_SPEED = "idle_for_speed"
    """Fewer ranks than there are only if that is 5 % faster, or the only way."""
    AS_ASKED = "as_asked"
    """The degrees that the spec fixes."""
    UNKNOWN_MODEL = "unknown_model"
    """A task of the user's whose sizes nobody knows: fully sharded."""
    DETERMINISTIC = "deterministic"
    """Fully sharded, which is what the fixed order of sums is made for."""


def reasons(
    layout: Layout,
    profile: HardwareProfile,
    seconds: dict[SecondsPart, float],
    num_bytes: dict[BytesPart, int],
    padded: str,
) -> tuple[str, ...]:
    """Why such a layout looks as it does: where its axes lie, and what they cost."""
    node, step_s = profile.ranks_per_node, sum(seconds.values())

    def share(part: SecondsPart) -> str:
        return f"{100 * seconds[part] / step_s:.1f} % of the step"

    found = []
    if layout.tp > 1:
        found.append(f"{Preference.TP_INSIDE_NODE}: tp {layout.tp} of {node} ranks a node, {share(SecondsPart.TP)}")
    if layout.cp > 1:
        found.append(f"cp {layout.cp} ({layout.context}) {_place(layout.cp, layout.tp, node)}, {share(SecondsPart.CP)}")
    if layout.ep > 1:
        found.append(f"ep {layout.ep} {_place(layout.ep, layout.tp, node)}, {share(SecondsPart.EP)}")
    if layout.pp > 1:
        found.append(
            f"pp {layout.pp} ({layout.schedule}, {len(layout.stages)} stages) "
            f"{_place(layout.pp, layout.world_size // layout.pp, node)}: bubble {share(SecondsPart.BUBBLE)}"
        )
    if layout.num_shards > 1 and layout.pp == 1:
        found.append(f"{Preference.LEAST_SHARDED}: {_LEVELS[layout.shard]}, {share(SecondsPart.DP)}")
    if layout.recompute is not Recompute.NONE:
        found.append(
            f"{Preference.RECOMPUTE_FOR_MEMORY}: {layout.recompute}, activations "
            f"{num_bytes[BytesPart.ACTIVATIONS] / GIB:.1f} GiB, {share(SecondsPart.RECOMPUTE)}"
        )
    if layout.offload:
        found.append(f"{Preference.OFFLOAD_AS_LAST_RESORT}: optimizer state in the hosts' memory")
    return (padded, *found)


_LEVELS = {
    ShardLevel.OPTIMIZER: "ZeRO-1 is enough",
    ShardLevel.GRADIENTS: "ZeRO-2, whole gradients would not fit or cost more",
    ShardLevel.FULL: "ZeRO-3, whole parameters would not fit",
}


def prefers_data_axes(profile: HardwareProfile, world_size: int, num_micro_batches: int) -> bool:
    """DATA_AXES_ON_CPU applies."""
    return profile.kind is DeviceKind.CPU and world_size <= num_micro_batches


def _place(degree: int, stride: int, node: int) -> str:
    if degree * stride <= node:
        return "inside a node"
    per_node = max(1, min(degree, node // stride))
    return f"over {-(-degree // per_node)} nodes"
