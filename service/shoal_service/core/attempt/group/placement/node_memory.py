"""Whether the workers of each machine fit into its memory: what they train with and build, their snapshots, and the
copies that they keep for workers of other machines. Pure; `choice` calls it when a group forms.

    8 workers on a machine of 14 GiB, process 0.3 GiB, each: training 1.2, snapshots 0.8
    0.3 + 8 x (1.2 + 0.8) = 16.3 GiB    refused: more than 14 GiB and a tenth
    0.3 + 7 x (1.2 + 0.8) = 14.3 GiB    not refused; copies that they keep for others are remarked

A machine may run several Ray nodes; their workers share its memory. What a group cannot start without is refused only
if it exceeds the memory by the error of predictions. Copies and the gradient log are only remarked: workers do without
them when there is no shared memory for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shoal_service.core.attempt.group.buddies import machine_of
from shoal_service.core.attempt.plan_layout import HostNeed
from shoal_service.core.hardware_profile import GIB
from shoal_service.core.quantities import count_text
from shoal_workers.contract.messages import WorkerInfo
from shoal_workers.contract.snapshots import SnapshotServer

TOLERANCE = 1.1
"""Predictions of memory are off by up to a tenth."""


@dataclass(frozen=True, slots=True)
class MemoryVerdict:
    refusal: str = ""
    """Why the group cannot start, with the numbers and the ways out; "": it can, or the need is not known."""
    remark: str = ""
    """What there is not enough memory for while it trains."""


def verdict(workers: Sequence[WorkerInfo], buddies: Sequence[SnapshotServer | None], need: HostNeed) -> MemoryVerdict:
    """Of the machine with the least room. `workers`, `buddies`: by rank."""
    places = {(info.node_ip, info.snapshot_port): machine_of(info) for info in workers}
    kept = Counter(places.get((buddy.host, buddy.port), "") for buddy in buddies if buddy is not None)
    sending = Counter(machine_of(info) for info, buddy in zip(workers, buddies, strict=True) if buddy is not None)
    on_machine = Counter(machine_of(info) for info in workers)
    memory = {machine_of(info): info.memory_bytes for info in workers if info.memory_bytes}
    hosts = {machine_of(info): info.node_ip for info in workers}
    refusals: list[tuple[float, str]] = []
    remarks: list[tuple[float, str]] = []
    for machine, has in memory.items():
        number = on_machine[machine]
        alone = need.of(number)
        if alone > TOLERANCE * has:
            refusals.append((alone / has, _refusal(hosts[machine], has, number, need)))
        copies = sending[machine] * need.sent + kept[machine] * (need.kept + need.log)
        if copies and alone + copies > has:
            remarks.append(((alone + copies) / has, _remark(hosts[machine], has, number, kept[machine], need, copies)))
    return MemoryVerdict(max(refusals, default=(0, ""))[1], max(remarks, default=(0, ""))[1])


def _refusal(host: str, has: int, number: int, need: HostNeed) -> str:
    parts = {"training": need.training, "snapshots": need.snapshots}
    if need.build > need.training + need.snapshots:
        parts = {"the whole model, which each worker builds": need.build}
    fitting = max(0, int((TOLERANCE * has - need.process) // need.own))
    ways = [f"at most {count_text(fitting, 'worker')} on a node"] if fitting else []
    if "snapshots" in parts and need.of(number) - number * need.snapshots <= TOLERANCE * has:
        ways.append(f"snapshot.enabled: false, which saves {_gib(number * need.snapshots)}")
    if "snapshots" not in parts:
        ways.append("deferred_init = True in the task, so that no worker builds the whole model (docs/tasks.md)")
    else:
        ways.append("more workers on other nodes, so that each has a smaller part of the model")
    return (
        f"{host} has {_gib(has)} of memory, and {_workers(number)} need {_gib(need.of(number))}: process "
        f"{_gib(need.process)} + {number} x "
        f"({' + '.join(f'{words} {_gib(size)}' for words, size in parts.items() if size)}). "
        f"Ways out: {'; '.join(ways)}"
    )


def _remark(host: str, has: int, number: int, num_kept: int, need: HostNeed, copies: int) -> str:
    log = f", snapshot.gradient_log: off saves {_gib(num_kept * need.log)}" if need.log else ""
    return (
        f"{host} has {_gib(has)} of memory, and {_workers(number)} with the copies that they send and keep for "
        f"{count_text(num_kept, 'rank')} of other nodes need {_gib(need.of(number) + copies)}{log}"
    )


def _workers(number: int) -> str:
    return count_text(number, "worker")


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= 0.05 * GIB else f"{num_bytes / (1 << 20):.0f} MiB"
