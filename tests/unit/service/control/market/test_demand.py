"""What is asked of the autoscaler."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shoal_service.clusters.wire import RoomKind
from shoal_service.control.market.outlook import MAX_WORKERS, find_demand
from shoal_service.core.scheduling.decide import decide
from shoal_service.core.scheduling.market import (
    ClusterState,
    Decision,
    MarketJob,
    MarketNode,
    MarketState,
    Preempt,
    Project,
    Resize,
    Start,
    User,
    Wait,
    WorkerNeed,
)
from shoal_workers.contract.placing import CapacityKind

CPU_NEED, GPU_NEED = WorkerNeed(cpus=1.0), WorkerNeed(cpus=4.0, gpus=1.0)
CPU, GPU = RoomKind(CPU_NEED), RoomKind(GPU_NEED)


def job(name: str, *, granted: int = 0, need: WorkerNeed = CPU_NEED, least: int = 2, **more: Any) -> MarketJob:
    return MarketJob(
        job_id=name, submitted_at=0.0, min_workers=least, max_workers=8, need=need, granted=granted, **more
    )


def asked(state: MarketState, decisions: Sequence[Decision]) -> dict[RoomKind, int]:
    """What is asked of the only cluster."""
    [kinds] = find_demand(state, decisions).values()
    return kinds


def test_running_jobs_keep_what_they_have_and_waiting_ones_ask_for_their_minimum() -> None:
    state = MarketState(jobs=[job("a", granted=4), job("b", need=GPU_NEED), job("c")], nodes=[])
    assert asked(state, [Wait("b", "no GPU", 1), Start("c", 3, "")]) == {CPU: 7, GPU: 2}


def test_the_nodes_that_a_job_may_use_are_asked_for_by_their_labels() -> None:
    chosen = job("a", selector={"zone": "x", "disk": "ssd"}, capacity=CapacityKind.SPOT)
    jobs = [chosen, job("b", capacity=CapacityKind.ON_DEMAND), job("c", granted=1)]
    assert asked(MarketState(jobs=jobs, nodes=[]), [Wait("a", "", 1), Wait("b", "", 2)]) == {
        RoomKind(CPU_NEED, (("disk", "ssd"), ("ray.io/market-type", "spot"), ("zone", "x"))): 2,
        RoomKind(CPU_NEED, (("ray.io/market-type", "!in(spot)"),)): 2,
        CPU: 1,
    }


def test_a_resize_counts_with_its_new_size_and_a_preempted_job_with_what_it_still_has() -> None:
    state = MarketState(jobs=[job("a", granted=4), job("b", granted=2)], nodes=[])
    assert asked(state, [Resize("a", 1, ""), Preempt("b", "", "c")]) == {CPU: 3}


def test_a_long_queue_asks_for_a_limited_number_of_workers_first_come_first() -> None:
    jobs = [job("a", least=MAX_WORKERS - 1, need=GPU_NEED), job("b"), job("c", least=1)]
    waits = [Wait("c", "", 3), Wait("b", "", 2), Wait("a", "", 1)]
    assert asked(MarketState(jobs=jobs, nodes=[]), waits) == {GPU: MAX_WORKERS - 1, CPU: 1}


def test_a_job_that_waits_for_a_limit_of_jobs_asks_for_nothing() -> None:
    jobs = [job("a", user="u", granted=2), job("b", user="u"), job("c", user="v", least=8)]
    state = MarketState(
        jobs=jobs,
        nodes=[MarketNode(node_id="n", cpus=4.0)],
        users={"default": User(name="default", max_running=1)},
    )
    assert asked(state, [decision for decision in decide(state, 10.0) if isinstance(decision, Wait)]) == {CPU: 2 + 8}


def test_nothing_is_asked_for_a_job_above_the_limit_of_any_project_above_its_own() -> None:
    tree = {
        "lab": Project(name="lab", limit=4),
        "x": Project(name="x", parent="lab"),
        "y": Project(name="y", parent="x", limit=100),
    }
    jobs = [job("a", granted=3, least=3, project="x"), job("b", project="y"), job("c", least=1, project="y")]
    state = MarketState(jobs=jobs, nodes=[], projects=tree)
    assert asked(state, [Wait("b", "no room", 1), Wait("c", "no room", 2)]) == {CPU: 4}


def test_jobs_of_projects_without_rules_share_the_limit_of_the_default_project() -> None:
    jobs = [job("a", granted=3, least=3, project="p"), job("b", project="q")]
    state = MarketState(jobs=jobs, nodes=[], projects={"default": Project(name="default", limit=4)})
    assert asked(state, [Wait("b", "no room", 1)]) == {CPU: 3}


def test_no_more_waiting_jobs_ask_than_may_run_at_a_time() -> None:
    jobs = [job(f"{kind}{at}", **{kind: kind}) for kind in ("user", "project") for at in range(3)]
    sweep = [job(f"s{at}", sweep="lr", sweep_limit=1) for at in range(3)]
    state = MarketState(
        jobs=[*jobs, *sweep],
        nodes=[],
        projects={"project": Project(name="project", max_running=1)},
        users={"user": User(name="user", max_running=1)},
    )
    waits = [Wait(waiting.job_id, "no room", at) for at, waiting in enumerate(state.jobs)]
    assert asked(state, waits) == {CPU: 3 * 2}


def test_a_minimum_above_a_limit_asks_for_nothing_and_waits_for_the_limit() -> None:
    tree = {"lab": Project(name="lab", limit=1), "x": Project(name="x", parent="lab")}
    state = MarketState(jobs=[job("a", project="x")], nodes=[MarketNode(node_id="n", cpus=8.0)], projects=tree)
    decisions = decide(state, 10.0)
    assert [decision.waits_for_limit for decision in decisions if isinstance(decision, Wait)] == [True]
    assert asked(state, decisions) == {}


def test_a_job_that_needs_other_nodes_asks_for_them_in_place_of_what_its_project_has_above_minima() -> None:
    jobs = [job("a", granted=8, least=1), job("b", need=GPU_NEED)]
    state = MarketState(jobs=jobs, nodes=[], projects={"default": Project(name="default", limit=8)})
    assert asked(state, [Wait("b", "no GPU", 1)]) == {CPU: 6, GPU: 2}


def node(cluster: str, cpus: float) -> MarketNode:
    return MarketNode(node_id=f"{cluster}-node", cpus=cpus, cluster=cluster)


def test_each_cluster_is_asked_for_its_own_jobs_and_one_for_a_job_that_may_start_in_any() -> None:
    jobs = [
        job("a", granted=3, cluster="east"),
        job("b", granted=2, cluster="north", is_leaving=True),
        job("c"),
        job("tied", least=5, cluster="west"),
        job("any", least=6),
        job("not-east", least=7, excluded_clusters=frozenset({"east"})),
    ]
    state = MarketState(
        jobs=jobs,
        nodes=[node("east", 4.0), node("west", 2.0)],
        clusters={"east": ClusterState.OPEN, "north": ClusterState.AWAY, "west": ClusterState.OPEN},
    )
    waits = [Wait(name, "no room", at) for at, name in enumerate(("tied", "any", "not-east"), 1)]
    demand = find_demand(state, [Start("c", 2, "", "west"), *waits])
    assert demand == {"east": {CPU: 3 + 6}, "north": {CPU: 2}, "west": {CPU: 2 + 5 + 7}}


def test_nothing_is_asked_for_a_job_whose_cluster_takes_no_jobs() -> None:
    jobs = [job("away", cluster="west"), job("cordoned", cluster="north"), job("unknown", cluster="mars")]
    state = MarketState(
        jobs=jobs,
        nodes=[node("east", 4.0), replace(node("north", 4.0), is_cordoned=True)],
        clusters={"east": ClusterState.OPEN, "north": ClusterState.CORDONED, "west": ClusterState.AWAY},
    )
    assert find_demand(state, decide(state, 10.0)) == {"east": {}, "north": {}, "west": {}}


def test_a_cluster_without_nodes_is_asked_for_the_first_ones() -> None:
    state = MarketState(jobs=[job("a")], nodes=[], clusters={"west": ClusterState.OPEN})
    assert find_demand(state, decide(state, 10.0)) == {"west": {CPU: 2}}
