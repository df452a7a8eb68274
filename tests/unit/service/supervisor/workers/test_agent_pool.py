"""Agents serve an attempt, fail, are silent and come back; every report and log line arrives once."""

import random

import pytest

from doubles.event_loop import settle, until
from doubles.fake_agents import FakeAgentProcess
from doubles.supervisor_bench import SPEC, SupervisorBench
from shoal_service.cluster.node_table import NodeTable
from shoal_service.supervisor.workers.agent_pool import CALM_S
from shoal_workers.contract.job import EndReason, IncidentCause
from shoal_workers.contract.messages import Phase, Progress
from shoal_workers.contract.spec import JobSpec

NUM = 8
STEPS = 40


def make_bench(*, agents_from: int = NUM // 2) -> SupervisorBench:
    """Two nodes with four workers each."""
    values = SPEC.model_dump() | {
        "stop": {"steps": STEPS},
        "batch": {"global_size": NUM, "micro_size": 1},
        "elasticity": {"min_workers": 1, "max_workers": NUM},
        "health": {"hang_floor_s": 600.0},
    }
    bench = SupervisorBench(granted=NUM, spec=JobSpec.model_validate(values), agents_from=agents_from)
    bench.workers.total_steps = STEPS
    bench.node_of.update({index: f"node-{index // 4}" for index in range(NUM)})
    return bench


async def serve(bench: SupervisorBench) -> dict[str, FakeAgentProcess]:
    """Train until both agents have been called. The agents by node."""
    await bench.start_and_train()
    return await called(bench)


async def called(bench: SupervisorBench) -> dict[str, FakeAgentProcess]:
    await bench.advance_until(lambda: len(bench.agent_processes) == 2)
    await bench.advance_until(lambda: all(agent.requests for agent in bench.agent_processes.values()))
    return bench.agent_processes


async def step(bench: SupervisorBench, *, within_s: float = 0.0) -> None:
    """Every worker prints a line, and rank 0 reports a step, which arrive within that time."""
    before = bench.status.step
    for worker in bench.workers.group:
        worker.print(f"step {before + 1} of {worker.info.worker_id}")
    bench.workers.train()
    await settle()
    await bench.advance_until(lambda: bench.status.step == before + 1, within_s + 0.01)


def assert_each_line_once(bench: SupervisorBench) -> None:
    lines = [line.text for line in bench.reports.logs if line.text.startswith("step")]
    assert len(lines) == len(set(lines)) and lines
    assert len(lines) == NUM * len({line.split(" of ")[0] for line in lines})


@pytest.fixture
def bench() -> SupervisorBench:
    return make_bench()


async def test_agents_are_started_after_the_group_has_trained_and_poll_all_workers_of_their_nodes(
    bench: SupervisorBench,
) -> None:
    await bench.start_and_train()
    await bench.clock.advance(CALM_S - 1.0)
    assert bench.agent_processes == {}, "a start would take CPU time from the group that forms"
    agents = await called(bench)
    assert {node: {request.worker_id for request in agent.requests[0]} for node, agent in agents.items()} == {
        f"node-{node}": {w.info.worker_id for w in bench.workers.created if w.info.node_id == f"node-{node}"}
        for node in range(2)
    }
    for _ in range(5):
        await step(bench)
    assert_each_line_once(bench)


async def test_the_supervisor_polls_no_worker_itself_while_an_agent_serves(bench: SupervisorBench) -> None:
    await serve(bench)
    direct = []
    poll = bench.fleet.poll

    async def counted(index: int, after: int, acknowledged: int, wait_s: float):  # type: ignore[no-untyped-def]
        direct.append(index)
        return await poll(index, after, acknowledged, wait_s)

    bench.fleet.poll = counted  # type: ignore[method-assign]
    for _ in range(3):
        await step(bench)
    await bench.clock.advance(3.0)
    assert direct == []


async def test_what_was_stored_is_acknowledged_through_the_agent(bench: SupervisorBench) -> None:
    await serve(bench)
    await step(bench)
    worker = bench.workers.group[0]
    assert worker.acknowledged < worker._seq
    bench.outbox.pull(bench.reports.seq, 0.0)
    await bench.clock.advance(2.5)
    assert worker.acknowledged == worker._seq


async def test_a_killed_agent_delays_no_report_and_is_started_again(bench: SupervisorBench) -> None:
    agents = await serve(bench)
    agents["node-0"].die()
    await step(bench)
    await step(bench)
    assert_each_line_once(bench)
    assert bench.agents.started.count("node-0") == 1, "not at once"
    await bench.advance_until(lambda: bench.agents.started.count("node-0") == 2, 10.0)
    await bench.advance_until(lambda: bench.agent_processes["node-0"].requests)
    await step(bench)
    assert_each_line_once(bench)
    assert bench.agents.started.count("node-1") == 1


async def test_a_silent_agent_delays_reports_by_its_wait_and_a_margin_and_is_used_again_once_it_answers(
    bench: SupervisorBench,
) -> None:
    agents = await serve(bench)
    agents["node-0"].is_silent = True
    await bench.clock.advance(1.0)  # the call that is in flight is answered as before
    await step(bench, within_s=1.5)
    assert_each_line_once(bench)
    calls = len(agents["node-0"].requests)
    agents["node-0"].is_silent = False
    await bench.advance_until(lambda: len(bench.agent_processes["node-0"].requests) > calls, 10.0)
    await step(bench)
    assert_each_line_once(bench)
    assert bench.agents.started == ["node-0", "node-1"], "its process stayed"


async def test_an_agent_that_stays_silent_is_replaced(bench: SupervisorBench) -> None:
    agents = await serve(bench)
    old = agents["node-0"]
    old.is_silent = True
    await bench.advance_until(lambda: bench.agents.started.count("node-0") == 2, 60.0)
    assert old.is_dead and not bench.agent_processes["node-0"].is_dead


async def test_a_dead_worker_of_a_served_node_is_noticed_at_once_and_only_it(bench: SupervisorBench) -> None:
    await serve(bench)
    bench.workers.group[2].die()
    await settle()
    lost = [event for event in bench.reports.events if event.type == "worker.lost"]
    assert len(lost) == 1
    await bench.advance_until(lambda: len(bench.workers.group) == NUM - 1)
    bench.workers.form(bench.status.step)
    await step(bench, within_s=1.0)


async def test_the_agent_of_a_dead_node_is_given_up_and_the_other_goes_on(bench: SupervisorBench) -> None:
    agents = dict(await serve(bench))
    agents["node-1"].die()
    for worker in bench.workers.created[4:]:
        worker.die(IncidentCause.NODE_DIED)
    bench.nodes.show(NodeTable(dead=frozenset({"node-1"})))
    await bench.advance_until(lambda: len(bench.workers.group) == 4)
    bench.workers.form(bench.status.step)
    await step(bench, within_s=1.0)
    await bench.clock.advance(10.0)
    assert "node-1" not in bench.agent_processes and bench.agents.started.count("node-1") == 1
    assert bench.agent_processes["node-0"] is agents["node-0"]
    assert bench.agents.started.count("node-0") == 1


async def test_a_worker_that_cannot_be_reached_is_polled_directly_until_it_answers(bench: SupervisorBench) -> None:
    agents = await serve(bench)
    worker = next(one for one in bench.workers.created if one.info.node_id == "node-1")
    name = worker.info.worker_id
    worker.cut_off()
    await settle()
    index = bench.workers.created.index(worker)
    assert bench.executor._state.pool.worker(index).unreachable_since is not None
    await bench.clock.advance(1.5)
    assert name not in {request.worker_id for request in agents["node-1"].requests[-1]}
    worker.reconnect()
    await bench.advance_until(lambda: name in {one.worker_id for one in agents["node-1"].requests[-1]}, 10.0)


async def test_workers_that_stand_still_are_polled_more_often_through_the_agent_too(bench: SupervisorBench) -> None:
    agents = await serve(bench)
    for worker in bench.workers.group:
        worker.progress = Progress(generation=1, phase=Phase.BACKWARD, step=1, at=1.0, counter=1, stalled_s=6000.0)
    await bench.clock.advance(1.1)
    assert {request.wait_s for request in agents["node-0"].requests[-1]} == {0.25}


async def test_a_restarted_supervisor_uses_the_agents_that_are_there(bench: SupervisorBench) -> None:
    agents = await serve(bench)
    before = dict(agents)
    calls = len(agents["node-1"].requests)
    await bench.restart()
    await until(lambda: "supervisor.restarted" in bench.events())
    await step(bench, within_s=2.0)
    await bench.advance_until(lambda: len(agents["node-1"].requests) > calls, 20.0)
    assert bench.agents.started == [], "it has found them"
    assert bench.agent_processes == before and agents["node-1"].life == 2
    await step(bench)


async def test_agents_end_with_the_attempt(bench: SupervisorBench) -> None:
    agents = dict(await serve(bench))
    bench.workers.train(STEPS - bench.status.step)
    bench.workers.finish()
    end = await bench.end()
    assert end.reason is EndReason.FINISHED
    assert bench.agent_processes == {} and all(agent.is_dead for agent in agents.values())
    series = [point.step for point in bench.reports.series]
    assert series == list(range(1, STEPS + 1))


async def test_agents_that_cannot_start_change_nothing(bench: SupervisorBench) -> None:
    bench.agents.refuses_to_start = True
    await bench.start_and_train()
    await bench.clock.advance(20.0)
    await step(bench)
    assert_each_line_once(bench)
    assert bench.agent_processes == {}


@pytest.mark.cells(2, 4)
@pytest.mark.parametrize("seed", range(12))
async def test_whatever_happens_to_agents_each_line_arrives_once_and_in_order(
    seed: int, bench: SupervisorBench
) -> None:
    chance = random.Random(seed)
    agents = await serve(bench)
    printed = {worker.info.worker_id: 0 for worker in bench.workers.created}
    found: dict[str, list[str]] = {name: [] for name in printed}
    stored = 0

    def store() -> None:
        """As the control plane: a pull acknowledges what the one before has brought."""
        nonlocal stored
        reports = bench.outbox.pull(stored, 0.0)
        stored = reports.seq
        for line in reports.logs:
            found[line.worker_id].append(line.text)

    for _ in range(60):
        for worker in chance.sample(bench.workers.created, chance.randrange(NUM)):
            printed[worker.info.worker_id] += 1
            worker.print(f"line {printed[worker.info.worker_id]}")
        if agents and chance.random() < 0.2:
            victim = agents[chance.choice(sorted(agents))]
            if chance.random() < 0.5:
                victim.die()
            else:
                victim.is_silent = not victim.is_silent
        if chance.random() < 0.3:
            store()
        await bench.clock.advance(chance.choice([0.0, 0.001, 0.3, 1.0, 2.5]))
    await bench.clock.advance(5.0)
    store()
    expected = {name: [f"line {n + 1}" for n in range(count)] for name, count in printed.items()}
    assert found == expected
    assert len(bench.agents.started) > 2, "some were started again"
