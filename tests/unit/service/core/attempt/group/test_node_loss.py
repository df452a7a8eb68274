"""The bound on what a lost node costs: what status and incidents promise, from what the workers reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from shoal_service.core.attempt.incidents import bound_node_loss, bound_worker_loss
from shoal_service.core.attempt.messages import Emit, ReportArrived
from shoal_service.core.attempt.placement import lonely_ranks
from shoal_service.core.attempt.state.parts import Stage
from shoal_service.core.events.workers import IncidentOpened
from shoal_service.core.node_loss import Protection
from shoal_service.supervisor.reporting.status import Readings, make_status
from shoal_service.views import ConditionType
from shoal_workers.contract.layout import Layout
from shoal_workers.contract.worker_reports import SnapshotCost, SnapshotsStopped

NewWorld = Callable[..., Any]


def _cost(world: Any, **changes: Any) -> None:
    values = {"every_steps": 1, "buddy_every_steps": 3, "copy_s": 0, "buddy_s": 0.1, "share": 0.01, "num_bytes": 9}
    generation, step = world.state.group.generation, world.state.progress.step
    world.feed(ReportArrived(0, SnapshotCost(**{**values, "generation": generation, "step": step, **changes})))


def test_a_dead_worker_repeats_one_step_or_the_steps_between_copies_with_the_reason(new_world: NewWorld) -> None:
    world = new_world(workers=2, memory=True, checkpoint={"every_steps": 100}).open(then=3)
    assert bound_worker_loss(world.state) is None, "nothing is known yet"
    _cost(world)
    bound = bound_worker_loss(world.state)
    assert bound is not None and bound.describe() == "repeats at most 1 step"
    _cost(world, every_steps=2.5, copies_reason="torch.optim.Muon is not elementwise")
    bound = bound_worker_loss(world.state)
    assert bound is not None and bound.describe() == "repeats at most 3 steps: torch.optim.Muon is not elementwise"
    assert make_status(world.state, Readings(), spec_version=1, now=0.0).worker_loss == bound


def test_without_memory_a_dead_worker_repeats_the_steps_since_the_checkpoint(new_world: NewWorld) -> None:
    world = new_world(workers=2, memory=True, checkpoint={"every_steps": 100}).open(then=3)
    _cost(world)
    for rank, only_copies, at_most in ((0, True, 1), (1, False, 100)):
        stopped = SnapshotsStopped(
            generation=world.state.group.generation, step=3, at=0, rank=rank, only_copies=only_copies, message="full"
        )
        world.feed(ReportArrived(rank, stopped))
        bound = bound_worker_loss(world.state)
        assert bound is not None and bound.at_most == at_most


def _bound(world: Any) -> Any:
    bound = bound_node_loss(world.state)
    assert bound is not None
    return bound


def test_before_a_group_has_formed_there_is_no_bound(new_world: NewWorld) -> None:
    assert bound_node_loss(new_world(workers=2, memory=True).state) is None


def test_until_a_copy_of_every_rank_has_arrived_only_the_checkpoint_counts(new_world: NewWorld) -> None:
    world = new_world(workers=2, memory=True, checkpoint={"every_steps": 100}).open(then=3)
    bound = _bound(world)
    assert (bound.protection, bound.at_most, bound.now) == (Protection.CHECKPOINT, 100, 3)
    _cost(world)
    assert _bound(world).protection is Protection.CHECKPOINT
    assert "no copy" in _bound(world).reason


def test_copies_promise_their_pace_and_the_steps_until_they_have_arrived(new_world: NewWorld) -> None:
    world = new_world(workers=2, memory=True, checkpoint={"every_steps": 100}).open(then=6)
    _cost(world, buddy_step=4, buddy_every_steps=2.5, buddy_flight_steps=2)
    bound = _bound(world)
    assert (bound.protection, bound.at_most, bound.now, bound.every_steps) == (Protection.COPIES, 5, 2, 2.5)
    assert (
        bound.describe() == "losing a node repeats at most 5 steps, 2 now (copies on other nodes after every 2.5 steps)"
    )


def test_slow_copies_follow_one_another_no_faster_than_they_arrive(new_world: NewWorld) -> None:
    """Until the copies have arrived that are sent next, the group goes back to those of step 1."""
    world = new_world(workers=2, memory=True, checkpoint={"every_steps": 100}).open(then=3)
    _cost(world, buddy_step=1, buddy_every_steps=2, buddy_flight_steps=16)
    assert (_bound(world).at_most, _bound(world).now) == (16 + 16, 2)
    _cost(world, buddy_step=1, every_steps=3, buddy_every_steps=20, buddy_flight_steps=2)
    assert _bound(world).at_most == 20 + 2 + 2, "copies are made of snapshots, which are taken after every third step"


def test_copies_that_no_longer_arrive_raise_the_bound(new_world: NewWorld) -> None:
    world = new_world(workers=2, memory=True, checkpoint={"every_steps": 100}).open(then=1)
    _cost(world, buddy_step=0, buddy_every_steps=1)
    assert (_bound(world).at_most, _bound(world).now) == (2, 1)
    world.run(2)
    assert (_bound(world).at_most, _bound(world).now) == (3, 3)


def test_on_one_node_a_lost_node_costs_the_steps_since_the_checkpoint(new_world: NewWorld) -> None:
    world = new_world(workers=2, memory=True, nodes=1, checkpoint={"every_s": 60, "every_steps": None}).open(then=3)
    _cost(world)
    bound = _bound(world)
    assert (bound.protection, bound.at_most, bound.now) == (Protection.CHECKPOINT, None, 3)
    assert bound.describe().startswith("losing a node repeats the steps since the last checkpoint, 3 now")


def test_nodes_of_one_machine_share_a_memory_that_outlives_them(new_world: NewWorld) -> None:
    world = new_world(workers=2, memory=True).open(then=3)
    _cost(world)
    world.state = replace(world.state, group=replace(world.state.group, machines=("m", "m")))
    assert (_bound(world).protection, _bound(world).at_most) == (Protection.SHARED_MEMORY, 1)


def test_replicas_on_other_nodes_need_no_copy(new_world: NewWorld) -> None:
    world = new_world(workers=4, memory=True).open(then=3)
    _cost(world)
    hybrid = replace(world.state.group, layout=Layout(dp_replicate=2, dp_shard=2), machines=("a", "a", "b", "b"))
    world.state = replace(world.state, group=hybrid)
    assert (_bound(world).protection, _bound(world).at_most, _bound(world).now) == (Protection.REPLICAS, 1, 0)
    world.state = replace(world.state, group=replace(hybrid, machines=("a", "b", "a", "b")))
    assert _bound(world).protection is Protection.CHECKPOINT


def test_without_snapshots_only_the_checkpoint_counts(new_world: NewWorld) -> None:
    world = new_world(workers=2).open(then=3)
    assert (_bound(world).protection, _bound(world).reason) == (Protection.CHECKPOINT, "snapshot.enabled is false")


def test_one_rank_without_memory_ends_the_snapshots_of_all_and_the_status_says_so(new_world: NewWorld) -> None:
    world = new_world(workers=3, memory=True).open(then=6)
    _cost(world, buddy_step=5)
    status = make_status(world.state, Readings(), spec_version=1, now=0.0)
    assert _healthy(status) == (True, "Keeping", "")
    full = SnapshotsStopped(generation=1, step=6, at=9.0, rank=1, only_copies=False, message="no space left")
    for _ in range(2):
        world.feed(ReportArrived(1, full))
    assert _bound(world).protection is Protection.CHECKPOINT
    assert _bound(world).reason == "rank 1 has no memory for snapshots"
    readings = Readings(snapshots=world.state.progress.snapshots)
    status = make_status(world.state, readings, spec_version=1, now=0.0)
    assert _healthy(status) == (False, "MemoryFull", "rank 1: no space left")
    assert status.snapshot_every_steps is None
    assert len(world.events("snapshot.lacking")) == 1
    world.lose(2)
    assert _healthy(make_status(world.state, readings, spec_version=1, now=0.0))[0], "the next group tries again"


def test_a_worker_that_could_not_open_its_shared_memory_is_shown(new_world: NewWorld) -> None:
    world = new_world(workers=3, memory=True).open(then=6)
    worker = world.state.pool.worker(1)
    without = replace(worker, info=worker.info.model_copy(update={"snapshot_port": 0}))
    world.state = replace(world.state, pool=world.state.pool.with_worker(without))
    world.lose(2)
    world.until(Stage.RUNNING)
    status = make_status(world.state, Readings(), spec_version=1, now=0.0)
    assert _healthy(status)[:2] == (False, "MemoryFull")
    assert "could not use shared memory" in _healthy(status)[2]
    [event] = world.events("snapshot.lacking")
    assert (event["rank"], event["generation"]) == (1, 2)


def _healthy(status: Any) -> tuple[bool, str, str]:
    [one] = [one for one in status.conditions if one.type is ConditionType.SNAPSHOTS_HEALTHY]
    return one.status, one.reason, one.message


def test_the_incident_of_a_lost_node_says_which_bound_was_in_force(new_world: NewWorld) -> None:
    world = new_world(workers=3, memory=True).open(then=6)
    _cost(world, buddy_step=5)
    before = _bound(world)
    world.die_node("n1")
    world.recover()
    world.run(1)
    [incident] = world.incidents()
    assert incident.node_loss == before
    [opened] = [c.event for c in world.commands if isinstance(c, Emit) and isinstance(c.event, IncidentOpened)]
    assert before.describe() in opened.describe()


def test_steps_that_only_survivors_have_reported_count_as_done_when_the_node_was_lost(new_world: NewWorld) -> None:
    """Rank 0 is lost, and with it its reports of the last two steps."""
    world = new_world(workers=3, memory=True).open(then=3)
    _cost(world, buddy_step=2)
    for _ in range(2):
        world.train(1, save_every=100)
        world.pending.pop("reports-0")
    world.die_node("n0")
    world.recover()
    [incident] = world.incidents()
    assert (incident.node_loss.now, incident.node_loss.at_most) == (1 + 2, 4)
    assert incident.steps_lost <= incident.node_loss.now


def test_the_death_of_a_worker_has_no_such_bound(new_world: NewWorld) -> None:
    world = new_world(workers=3, memory=True).open(then=6)
    world.lose(1)
    world.run(1)
    [incident] = world.incidents()
    assert incident.node_loss is None


@pytest.mark.parametrize(
    ("layout", "machines", "lonely"),
    [
        (Layout(dp_shard=3), "abc", (0, 1, 2)),
        (Layout(dp_replicate=2), "ab", ()),
        (Layout(dp_replicate=2), "aa", (0,)),
        (Layout(dp_replicate=2, dp_shard=2), "abba", ()),
        (Layout(dp_replicate=2, dp_shard=2), "abac", (0,)),
        (Layout(pp=2, dp_replicate=2), "aabc", (0,)),
        (Layout(pp=2, dp_replicate=2, tp=2), "aabbccdd", ()),
    ],
)
def test_one_rank_of_each_shard_that_is_on_one_machine_needs_a_copy(
    layout: Layout, machines: str, lonely: tuple[int, ...]
) -> None:
    assert lonely_ranks(layout, machines) == lonely
