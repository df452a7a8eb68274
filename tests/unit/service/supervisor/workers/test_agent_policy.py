"""Which nodes have an agent; when it is started, started again and ended."""

from dataclasses import replace

import pytest

from kit.contracts.journal import CONFIG
from shoal_service.core.attempt.state.attempt import Attempt, Group, GroupProgress
from shoal_service.core.attempt.state.parts import Quiescing, Running, Switching, Worker, WorkerPool
from shoal_service.core.persistent import Table
from shoal_service.supervisor.supervisor import new_attempt
from shoal_service.supervisor.workers.agent_pool import (
    CALM_S,
    NODE_WORKERS,
    AgentChanges,
    AgentPhase,
    NodeAgent,
    answer_limit_s,
    choose_nodes,
    find_due_changes,
    is_calm,
)
from shoal_workers.contract.messages import WorkerInfo

MANY = 32
NONE: frozenset[str] = frozenset()


def attempt(*workers_on: int, num_starting: int = 0) -> Attempt:
    """With so many warm workers on node-0, node-1 ..."""
    nodes = [f"node-{number}" for number, count in enumerate(workers_on) for _ in range(count)]
    workers = [Worker(index=index, worker_id=f"w{index}", info=_info(index, node)) for index, node in enumerate(nodes)]
    workers += [Worker(index=len(nodes) + i, worker_id=f"s{i}") for i in range(num_starting)]
    return replace(new_attempt(CONFIG, 0.0), pool=WorkerPool(workers=Table(workers), next_index=len(workers)))


def _info(index: int, node: str) -> WorkerInfo:
    return WorkerInfo(
        worker_id=f"w{index}", node_id=node, node_ip="10.0.0.1", pid=1, store_port=1, device="cpu", version=2
    )


def training(*workers_on: int, since: float = 0.0, steps: int = 1) -> Attempt:
    return replace(
        attempt(*workers_on),
        current=Running(since=since),
        group=Group(generation=1, start_step=10),
        progress=GroupProgress(step=10 + steps),
    )


def test_a_small_job_has_no_agents_however_many_workers_are_on_one_node() -> None:
    assert choose_nodes(attempt(MANY - 1), MANY) == frozenset()
    assert choose_nodes(attempt(MANY), MANY) == {"node-0"}


def test_only_nodes_with_several_workers_have_an_agent() -> None:
    state = attempt(MANY, NODE_WORKERS, NODE_WORKERS - 1)
    assert choose_nodes(state, MANY) == {"node-0", "node-1"}


def test_a_worker_that_still_starts_does_not_count() -> None:
    assert choose_nodes(attempt(MANY - 1, num_starting=5), MANY) == frozenset()


def test_agents_can_be_switched_off() -> None:
    assert choose_nodes(attempt(1000), 0) == frozenset()


def test_a_lost_worker_ends_no_agent_and_half_of_them_do() -> None:
    having = {"node-0"}
    assert choose_nodes(attempt(NODE_WORKERS - 1, MANY - NODE_WORKERS), MANY, having) == having
    assert choose_nodes(attempt(MANY // 2), MANY, having) == having
    assert choose_nodes(attempt(MANY // 2 - 1), MANY, having) == frozenset()
    few = attempt(NODE_WORKERS // 2 - 1, MANY)
    assert choose_nodes(few, MANY, having) == {"node-1"}


def test_nothing_is_started_on_a_node_that_is_silent_and_its_agent_is_not_ended() -> None:
    wanted, serving = frozenset("ab"), NodeAgent(AgentPhase.SERVING, 1.0)
    assert find_due_changes({}, wanted, frozenset("a"), calm=True, now=1.0).start == ("b",)
    assert find_due_changes({"a": serving}, wanted, wanted, calm=True, now=1.0) == AgentChanges()


@pytest.mark.parametrize(
    ("state", "now", "calm"),
    [
        (training(8, since=100.0), 100.0 + CALM_S, True),
        (training(8, since=100.0), 99.9 + CALM_S, False),
        (training(8, since=100.0, steps=0), 1000.0, False),
        (replace(training(8), current=Quiescing(since=0.0, durable=False)), 1000.0, False),
        (replace(training(8), current=Switching(since=0.0, durable=False)), 1000.0, False),
    ],
    ids=["trains for a while", "has just formed", "has not trained", "is lost", "switches"],
)
def test_agents_are_started_only_while_a_group_trains(state: Attempt, now: float, calm: bool) -> None:
    assert is_calm(state, now) is calm
    expected = AgentChanges(start=("a", "b")) if calm else AgentChanges()
    assert find_due_changes({}, frozenset("ab"), NONE, calm=calm, now=now) == expected


def test_an_agent_that_is_there_is_left_alone_and_one_that_is_not_wanted_is_ended() -> None:
    serving = NodeAgent(AgentPhase.SERVING, 1.0)
    starting = NodeAgent(AgentPhase.STARTING, 1.0)
    known = {"a": serving, "b": starting, "c": serving}
    assert find_due_changes(known, frozenset("ab"), NONE, calm=True, now=1e9) == AgentChanges(end=("c",))
    assert find_due_changes(known, NONE, NONE, calm=False, now=1e9) == AgentChanges(end=("a", "b", "c"))


def test_a_failed_agent_is_started_again_later_each_time() -> None:
    agent, now, waits = NodeAgent.started(None, 0.0), 0.0, []
    for _ in range(8):
        agent = agent.failed(now)
        waits.append(agent.retry_at - now)
        early = find_due_changes({"a": agent}, frozenset("a"), NONE, calm=True, now=agent.retry_at - 0.01)
        assert early == AgentChanges()
        now = agent.retry_at
        assert find_due_changes({"a": agent}, frozenset("a"), NONE, calm=True, now=now).start == ("a",)
        agent = NodeAgent.started(agent, now).serving(now)
    assert waits == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]


def test_an_agent_that_has_served_for_long_is_started_again_soon() -> None:
    agent = NodeAgent(AgentPhase.SERVING, since=100.0, num_failures=6)
    assert agent.failed(1000.0).retry_at == 1002.0
    assert agent.failed(101.0).retry_at == 161.0


def test_an_agent_counts_as_silent_a_little_after_its_workers_should_have_answered() -> None:
    assert answer_limit_s(1.0) == 1.5
    assert answer_limit_s(8.0) == 8.5
