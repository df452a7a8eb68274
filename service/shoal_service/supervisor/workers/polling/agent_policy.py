"""Which nodes should have an agent, and when one is started, started again or ended. Pure; times are passed in.

a node has an agent     it has NODE_WORKERS warm workers of a job with `agents_from` or more
it is started           once the group has trained for CALM_S: a start takes CPU time from the workers of its node
it failed, was silent   its workers are polled directly at once; it is started again after 2, 4, 8 ... 60 s
the node is not wanted  any more: the agent is ended
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.stages import Stage

NODE_WORKERS = 8
"""An agent of fewer workers costs ten times the CPU time that it saves the supervisor."""
CALM_S = 5.0
START_S = 30.0
"""An agent that does not answer this long after its start is ended."""
_SILENCE_MARGIN_S = 0.5
_FIRST_RETRY_S = 2.0
_LAST_RETRY_S = 60.0
_PROVEN_S = 60.0
"""An agent that has served this long begins anew with its back-off."""


class AgentPhase(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    FAILED = "failed"
    """Its workers are polled directly until `NodeAgent.retry_at`."""


@dataclass(frozen=True, slots=True)
class NodeAgent:
    """What is known of the agent of one node."""

    phase: AgentPhase
    since: float
    num_failures: int = 0
    """One after the other."""

    @property
    def retry_at(self) -> float:
        return self.since + min(_LAST_RETRY_S, _FIRST_RETRY_S * 2.0 ** max(0, self.num_failures - 1))


@dataclass(frozen=True, slots=True)
class AgentChanges:
    start: tuple[str, ...] = ()
    """Node ids."""
    end: tuple[str, ...] = ()


def wanted_nodes(state: Attempt, agents_from: int, having: Collection[str] = ()) -> frozenset[str]:
    """Nodes whose workers should be polled by an agent. `agents_from`: 0 for none; `having`: nodes that have one.

    These keep theirs down to half of the numbers, so a lost worker does not end agents that are due again soon.
    """
    counts = Counter(worker.info.node_id for worker in state.pool.workers if worker.info is not None)
    num = counts.total()
    if not agents_from or state.stage is Stage.ENDED:
        return frozenset()
    per_node = min(NODE_WORKERS, agents_from)
    return frozenset(
        node
        for node, number in counts.items()
        if (number >= per_node and num >= agents_from)
        or (node in having and 2 * number >= per_node and 2 * num >= agents_from)
    )


def is_calm(state: Attempt, now: float) -> bool:
    """The group has trained for a while, so a start of processes delays no recovery."""
    is_trained = state.stage is Stage.RUNNING and state.progress.step > state.group.start_step
    return is_trained and now - state.current.since >= CALM_S


def changes(
    agents: Mapping[str, NodeAgent], wanted: frozenset[str], silent: frozenset[str], *, calm: bool, now: float
) -> AgentChanges:
    """What to start and what to end now. `agents`: by node id, all that were started and not ended; `silent`: nodes
    that do not answer."""
    due = (
        node
        for node in wanted - silent
        if node not in agents or (agents[node].phase is AgentPhase.FAILED and now >= agents[node].retry_at)
    )
    return AgentChanges(
        start=tuple(sorted(due)) if calm else (),
        end=tuple(sorted(agents.keys() - wanted)),
    )


def started(known: NodeAgent | None, now: float) -> NodeAgent:
    return NodeAgent(AgentPhase.STARTING, now, known.num_failures if known is not None else 0)


def serving(agent: NodeAgent, now: float) -> NodeAgent:
    return replace(agent, phase=AgentPhase.SERVING, since=now)


def failed(agent: NodeAgent, now: float) -> NodeAgent:
    is_proven = agent.phase is AgentPhase.SERVING and now - agent.since >= _PROVEN_S
    return NodeAgent(AgentPhase.FAILED, now, 1 if is_proven else agent.num_failures + 1)


def silent_after_s(wait_s: float) -> float:
    """How long a call to an agent may take whose workers' polls may wait `wait_s`."""
    return wait_s + _SILENCE_MARGIN_S
