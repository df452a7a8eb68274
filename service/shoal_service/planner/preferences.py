"""The rules of thumb of the planner, by name: where axes may go, and which of nearly equal layouts is taken.

Each rule either limits or orders the layouts. Its name appears in the reasons of the chosen layout. `ranking` and
`planning` use it; docs/planner.md lists the rules.
"""

from __future__ import annotations

from enum import StrEnum

from shoal_service.core.hardware_profile import GIB, DeviceKind, HardwareProfile, LinkClass
from shoal_service.planner.memory import BytesPart
from shoal_service.planner.step_time import SecondsPart
from shoal_workers.contract.layout import Layout, Recompute, ShardLevel


class Preference(StrEnum):
    TP_INSIDE_NODE = "tp_inside_node"
    """tp communicates in every layer, so it goes over the network only if nothing else fits into memory."""
    DATA_AXES_ON_CPU = "data_axes_on_cpu"
    """Workers without a GPU stay on the data axes while each has a micro-batch, because their links are slow."""
    FITS_FIRST = "fits_first"
    """Layouts that fit into memory come before those that do not."""
    FASTEST = "fastest"
    SIMPLEST_OF_EQUALS = "simplest_of_equals"
    """Among layouts whose steps differ by at most 1 %: fewer axes, then less memory."""
    LEAST_SHARDED = "least_sharded"
    """The shard level with the least communication, among those that fit."""
    MEASURED = "measured"
    """Shard levels whose predicted steps differ by less than the prediction's own error: the fastest in the job's own
    steps."""
    RECOMPUTE_FOR_MEMORY = "recompute_for_memory"
    OFFLOAD_AS_LAST_RESORT = "offload_as_last_resort"
    IDLE_FOR_SPEED = "idle_for_speed"
    """Ranks stay idle only if that is 5 % faster, or the only legal layout."""
    AS_REQUESTED = "as_requested"
    """The degrees that the spec fixes."""
    UNKNOWN_MODEL = "unknown_model"
    """A user task of unknown sizes is fully sharded."""
    DETERMINISTIC = "deterministic"
    """A deterministic job is fully sharded: the fixed order of sums supports only that."""


def reasons(
    layout: Layout,
    links: dict[str, LinkClass],
    seconds: dict[SecondsPart, float],
    num_bytes: dict[BytesPart, int],
    batch_partition: str,
) -> tuple[str, ...]:
    """The reasons for a layout: which links its axes use, and what they cost."""
    step_s = sum(seconds.values())

    def share(part: SecondsPart) -> str:
        return f"{100 * seconds[part] / step_s:.1f} % of the step"

    found = []
    if layout.tp > 1:
        rule = f"{Preference.TP_INSIDE_NODE}: " if links["tp"] is LinkClass.INSIDE_NODE else ""
        found.append(f"{rule}tp {layout.tp} {links['tp'].words}, {share(SecondsPart.TP)}")
    if layout.cp > 1:
        found.append(f"cp {layout.cp} ({layout.context}) {links['cp'].words}, {share(SecondsPart.CP)}")
    if layout.ep > 1:
        found.append(f"ep {layout.ep} {links['ep'].words}, {share(SecondsPart.EP)}")
    if layout.pp > 1:
        found.append(
            f"pp {layout.pp} ({layout.schedule}, {len(layout.stages)} stages) {links['pp'].words}: "
            f"bubble {share(SecondsPart.BUBBLE)}"
        )
    if layout.num_shards > 1 and layout.pp == 1:
        where = f" {links['dp_shard'].words}" if "dp_shard" in links else ""
        found.append(f"{Preference.LEAST_SHARDED}: {_LEVELS[layout.shard]}{where}, {share(SecondsPart.DP)}")
    if layout.recompute is not Recompute.NONE:
        found.append(
            f"{Preference.RECOMPUTE_FOR_MEMORY}: {layout.recompute}, activations "
            f"{num_bytes[BytesPart.ACTIVATIONS] / GIB:.1f} GiB, {share(SecondsPart.RECOMPUTE)}"
        )
    if layout.offload:
        found.append(f"{Preference.OFFLOAD_AS_LAST_RESORT}: optimizer state in host memory")
    return (batch_partition, *found)


_LEVELS = {
    ShardLevel.OPTIMIZER: "ZeRO-1 is enough",
    ShardLevel.GRADIENTS: "ZeRO-2, whole gradients would not fit or cost more",
    ShardLevel.FULL: "ZeRO-3, whole parameters would not fit",
}


def prefers_data_axes(profile: HardwareProfile, world_size: int, num_micro_batches: int) -> bool:
    """Whether DATA_AXES_ON_CPU applies."""
    return profile.kind is DeviceKind.CPU and world_size <= num_micro_batches
