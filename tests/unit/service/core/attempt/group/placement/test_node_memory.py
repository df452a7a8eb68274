"""Whether the workers of a machine fit into its memory, by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from shoal_service.core.attempt.placement import choose, memory_verdict
from shoal_service.core.layout_plan import HostNeed, Plan
from shoal_service.planner.planning import plan
from shoal_workers.contract.layout import Layout, ShardLevel, plain
from shoal_workers.contract.messages import WorkerInfo
from shoal_workers.contract.snapshots import SnapshotServer

GIB = 1 << 30
NEED = HostNeed(process=GIB // 4, training=GIB, snapshots=GIB // 2, sent=GIB, kept=GIB)
"""1.75 GiB alone; a buddy adds 1 GiB to the sender, and 3 GiB to the one that keeps."""


def workers(*sizes: int, memory_gib: float, machine: str = "") -> list[WorkerInfo]:
    """One node per size; of one machine, if it has a name."""
    return [
        WorkerInfo(
            worker_id=f"w{node}{number}",
            node_id=f"n{node}",
            node_ip=f"10.0.0.{node}",
            pid=1,
            store_port=1,
            device="cpu",
            snapshot_port=100 * node + number,
            machine_id=machine,
            memory_bytes=round(memory_gib * GIB),
        )
        for node, size in enumerate(sizes, 1)
        for number in range(1, size + 1)
    ]


def kept_by(*keepers: WorkerInfo) -> list[SnapshotServer]:
    return [SnapshotServer(node_id=k.node_id, host=k.node_ip, port=k.snapshot_port) for k in keepers]


def test_what_fits_is_neither_refused_nor_remarked() -> None:
    four = workers(4, memory_gib=6.25)
    assert memory_verdict(four, [None] * 4, NEED).refusal == ""
    assert memory_verdict(four, [None] * 4, NEED).remark == ""


def test_a_refusal_has_the_numbers_of_the_fullest_node_and_the_ways_out() -> None:
    found = memory_verdict(workers(2, 5, memory_gib=7), [None] * 7, NEED)
    assert found.refusal == (
        "10.0.0.2 has 7.0 GiB of memory, and 5 workers need 7.8 GiB: process 0.2 GiB + 5 x (training 1.0 GiB + "
        "snapshots 0.5 GiB). Ways out: at most 4 workers on a node; snapshot.enabled: false, which saves 2.5 GiB; more "
        "workers on other nodes, so that each has a smaller part of the model"
    )


def test_an_excess_within_the_error_of_predictions_is_not_refused() -> None:
    assert memory_verdict(workers(4, memory_gib=5.7), [None] * 4, NEED).refusal == ""
    assert memory_verdict(workers(4, memory_gib=5.6), [None] * 4, NEED).refusal != ""


def test_a_model_that_each_worker_builds_counts_before_it_trains() -> None:
    whole = NEED.model_copy(update={"build": 4 * GIB})
    found = memory_verdict(workers(4, memory_gib=9), [None] * 4, whole)
    assert "need 16.2 GiB: process 0.2 GiB + 4 x (the whole model, which each worker builds 4.0 GiB)" in found.refusal
    assert "at most 2 workers on a node; deferred_init = True in the task" in found.refusal
    assert "snapshot.enabled" not in found.refusal


def test_copies_are_remarked_where_they_are_kept() -> None:
    """3 ranks of one node and 1 of the other: the single one keeps three copies."""
    infos, need = workers(3, 1, memory_gib=12), NEED.model_copy(update={"kept": 3 * GIB})
    by_rank = kept_by(infos[3], infos[3], infos[3], infos[0])
    assert memory_verdict(infos, by_rank, need).remark == ""
    tight = memory_verdict(workers(3, 1, memory_gib=11.5), by_rank, need)
    assert tight.refusal == ""
    assert tight.remark == (
        "10.0.0.2 has 11.5 GiB of memory, and 1 worker with the copies that they send and keep for 3 ranks of other "
        "nodes need 11.8 GiB"
    )


def test_the_nodes_of_one_machine_share_its_memory() -> None:
    apart, together = workers(2, 2, memory_gib=4), workers(2, 2, memory_gib=4, machine="m")
    assert memory_verdict(apart, [None] * 4, NEED).refusal == ""
    assert "4 workers need 6.2 GiB" in memory_verdict(together, [None] * 4, NEED).refusal


@pytest.mark.parametrize(
    ("memory_gib", "parallelism", "layout"),
    [
        (6, "auto", plain(2)),
        (4, "auto", Layout(dp_shard=2)),
        (4, {"shard": "none"}, plain(2)),
    ],
    ids=["fits", "does not fit", "asked for"],
)
def test_plain_replicas_that_do_not_fit_on_a_machine_are_followed_by_shards(
    new_world: Callable[..., Any], memory_gib: int, parallelism: Any, layout: Layout
) -> None:
    """Two whole states need 5 GiB, two shards half of that."""
    world = new_world(workers=2, precision="fp32", parallelism=parallelism, nodes=1).open(then=1)
    usual = [
        replace(worker, info=worker.info.model_copy(update={"memory_bytes": memory_gib * GIB}))
        for worker in world.state.workers
    ]

    def planned(*arguments: Any) -> Plan:
        found = plan(*arguments)
        is_plain = found.layout == plain(2)
        return replace(found, host=HostNeed(process=GIB, training=2 * GIB if is_plain else GIB), rivals=())

    choice = choose(world.state, usual, world.now, planned)
    assert choice.planned.layout.model_copy(update={"shard": layout.shard}) == layout
    assert bool(choice.refusal) == (parallelism != "auto")


def test_a_level_of_the_shards_that_follow_can_be_tried(new_world: Callable[..., Any]) -> None:
    world = new_world(workers=2, precision="fp32", nodes=1).open(then=1)
    usual = [
        replace(worker, info=worker.info.model_copy(update={"memory_bytes": 4 * GIB})) for worker in world.state.workers
    ]
    rival = Layout(dp_shard=2, shard=ShardLevel.FULL)

    def planned(*arguments: Any) -> Plan:
        best = replace(plan(*arguments), host=HostNeed(process=GIB, training=GIB), rivals=())
        if best.layout == plain(2):
            return replace(best, host=HostNeed(process=GIB, training=2 * GIB))
        return replace(best, rivals=(replace(best, layout=rival),))

    state = replace(world.state, history=replace(world.state.history, trying=rival))
    assert choose(state, usual, world.now, planned).planned.layout == rival


def test_without_a_known_need_or_a_known_memory_nothing_is_said() -> None:
    assert memory_verdict(workers(9, memory_gib=1), [None] * 9, HostNeed()).refusal == ""
    assert memory_verdict(workers(9, memory_gib=0), [None] * 9, NEED).refusal == ""
