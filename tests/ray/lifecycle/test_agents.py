"""Jobs whose workers are polled by an agent of their node: the agent dies, the supervisor dies, and nothing is lost."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.processes.server import Server, until
from kit.worlds.tiny_jobs import holds
from shoal_api.client import Client

STEPS = 60
WORKERS = 4
_PRINTS = [{"at": "step", "n": n, "do": "print"} for n in range(1, STEPS + 1)]


@pytest.fixture
def with_agents(join_cluster: Callable[..., Server], tmp_path: Path) -> Iterator[Client]:
    """A control plane in the session's cluster that gives small jobs agents."""
    environment = {"SHOAL_AGENTS_FROM": str(WORKERS), "SHOAL_CHECKPOINT_URL": str(tmp_path / "checkpoints")}
    server = join_cluster(tmp_path / "agents", [], environment)
    server.start().wait_for_cluster()
    with server.client as client:
        yield client  # requested before `submit`, whose jobs end first


class Events:
    """What supervisors have logged about agents, since this was made."""

    def __init__(self, server: Server) -> None:
        assert server.note is not None
        self._folder = Path(server.note["temp_dir"])
        self._before = Counter[str]()
        self._before = self._count()

    def _count(self) -> Counter[str]:
        found = Counter[str]()
        for path in self._folder.glob("*/session_2*/logs/worker-*.err"):
            text = path.read_text(errors="replace")
            found.update({name: text.count(name) for name in ("agent.serving", "agent.failed")})
        return found

    def wait(self, name: str, count: int) -> None:
        until(lambda: self._count()[name] - self._before[name] >= count, f"{count} {name}")


def _lines(client: Client, job_id: str) -> Counter[str]:
    return Counter(line.text for line in client.logs(job_id) if line.text.startswith("hello"))


def _expected() -> set[str]:
    return {f"hello from rank {rank} at step {n}" for rank in range(WORKERS) for n in range(1, STEPS + 1)}


@pytest.mark.matrix
def test_everything_arrives_once_although_the_agent_is_killed(
    shoal_server: Server, with_agents: Client, submit: Any
) -> None:
    events = Events(shoal_server)
    run = submit(to=with_agents, workers=WORKERS, steps=STEPS, strikes=[*_PRINTS, *holds(10, 30, 50)])
    run.wait_at("step-10-0")
    events.wait("agent.serving", 1)
    [agent] = shoal_server.actors("PollAgent")
    run.release("step-10-0")
    run.wait_at("step-30-0")
    run.wait_for_step(29)
    os.kill(agent, signal.SIGKILL)
    run.release("step-30-0")
    run.wait_at("step-50-0")
    run.wait_for_step(49)
    events.wait("agent.serving", 2)
    [again] = shoal_server.actors("PollAgent")
    assert again != agent
    run.release("step-50-0")
    run.finish()

    assert run.world_sizes() == [WORKERS] and with_agents.incidents(run.id) == ()
    run.assert_undisturbed_losses()
    assert _lines(with_agents, run.id) == Counter(_expected())
    until(lambda: not shoal_server.actors("PollAgent"), "the agent ends with the attempt")
