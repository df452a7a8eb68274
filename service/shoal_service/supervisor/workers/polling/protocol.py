"""What the pool of agents needs from Ray. The real one is `ray_agents`, the fake is in `tests/doubles`; both pass the
same contract tests. Nothing here imports Ray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shoal_workers.contract.messages import NodePoll, PollRequest


class AgentFailed(Exception):
    """A call to an agent failed: it has ended, or cannot be reached. The message is one line."""


class PollAgents(Protocol):
    """The agents of one attempt, by node id. Called on the executor's loop only.

    Every call carries the life of this supervisor. An agent refuses a supervisor that has a successor, whose process
    then ends, as with `protocols.Fleet`.
    """

    async def start(self, node_id: str) -> None:
        """Returns once the node's agent answers: the one that is there, or a new one. Raises AgentFailed."""

    async def poll(self, node_id: str, requests: Sequence[PollRequest]) -> NodePoll:
        """Returns when a worker has answered, and a little after the longest `wait_s` in any case. Raises
        AgentFailed."""

    async def end(self, node_id: str) -> None:
        """End the node's agent, whatever state it is in, if there is one. Raises nothing."""
