"""Which nodes may be used, given drains that were requested or that Ray announces, cordons, suspicions and probation.

    one job suspects the node          that job avoids it; others use it, and a test of it runs soon
    two jobs suspect it,               it is on probation: no job uses it until a test passes
    or a test of it failed

An operator limits how many nodes are on probation at a time: a fault of every node is a fault of something else.

The control loop calls this once per pass. The scheduler gets the result as capacity, and every supervisor gets it in
its directive: it places no worker on an avoided node, and moves away from those that it already uses. This module
starts no test of a node; `control/probation.py` does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pydantic import Field

from shoal_service.core.attempt.state import AvoidedNode
from shoal_service.core.quantities import count_text
from shoal_workers.contract import Frozen, backoff_s

MAX_TEST_DELAY_S = 6 * 3600.0
FIRST_TEST_S = 30.0
"""From the suspicion of a single job to the first test: by then the group has re-formed, and is not disturbed."""
NUM_JOBS = 2
"""Jobs that must suspect a node before it is on probation without a test."""
DEFAULT_PROBATION_LIMIT = "25%"


class DrainSource(StrEnum):
    API = "api"
    """Requested by a user."""
    RAY = "ray"
    """Announced by the cluster."""
    NOTICE = "notice"
    """Announced by the cloud, which is about to take the node away."""


class Drain(Frozen):
    """Why a node shall not be used any more, and until when."""

    reason: str
    requested_at: float
    deadline: float | None = None
    """Wall-clock time at which the node goes away; None if it stays, but no job shall run on it."""
    source: DrainSource


class Cordon(Frozen):
    """Why no new worker is placed on a node. Those that are there stay."""

    reason: str
    requested_at: float


def cordon_of_cluster(cluster: str, cordon: Cordon | None) -> Cordon | None:
    """The cordon that the nodes of a cluster have from this one of the cluster, unless they have their own."""
    if cordon is None:
        return None
    return cordon.model_copy(update={"reason": f"the cluster {cluster!r} is cordoned: {cordon.reason}"})


class Node(Frozen):
    """A node of the Ray cluster, and what is known about it beyond that."""

    node_id: str
    ip: str
    cluster: str = ""
    """Name with which its Ray cluster has joined; the control plane fills it in."""
    alive: bool
    cpus: float
    gpus: float
    memory_gib: float
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the node in Ray: `ray.io/accelerator-type`, `ray.io/market-type`, and those that the operator has
    set."""
    drain: Drain | None = None
    cordon: Cordon | None = None
    suspected: str = ""
    """Why the node is on probation; empty: it is not."""
    suspected_since: float | None = None
    next_test_at: float | None = None
    """When a test of it runs next."""
    suspected_by: tuple[str, ...] = ()
    """Ids of the jobs that suspect it; they place no new worker there until a test passes."""
    on_probation: bool = False
    """Two jobs suspect it, or it failed a test: no job places a new worker there until a test passes."""


@dataclass(frozen=True, slots=True)
class NodeSuspicion:
    """Why a node is on probation."""

    reason: str
    since: float
    next_test_at: float
    job_ids: tuple[str, ...] = ()
    """The jobs that suspect the node."""
    num_tests: int = 0
    """Tests that it failed."""

    @property
    def is_probation(self) -> bool:
        """There is evidence from two jobs, or from a test. The code of a single job may be the reason."""
        return self.num_tests > 0 or len(self.job_ids) >= NUM_JOBS


def described(
    nodes: Sequence[Node],
    drains: Mapping[str, Drain],
    suspicions: Mapping[str, NodeSuspicion],
    limit: str = DEFAULT_PROBATION_LIMIT,
) -> tuple[Node, ...]:
    """The nodes that Ray reports, with drains and suspicions filled in.

    Args:
        limit: how many nodes may be on probation, see `probation_limit`.
    """
    shown = list(with_drains(nodes, drains))
    num_computing = sum(node.alive and _computes(node) for node in shown)
    on_probation = chosen_for_probation(
        [n for n in shown if n.alive], suspicions, probation_limit(limit, num_computing)
    )
    for position, node in enumerate(shown):
        suspicion = suspicions.get(node.node_id)
        if suspicion is not None:
            is_on_probation, reason = node.node_id in on_probation, suspicion.reason
            if suspicion.is_probation and not is_on_probation and node.alive:
                reason = (
                    f"{reason} (not on probation: max_probation {limit} of {count_text(num_computing, 'node')} "
                    "is reached)"
                )
            update = {
                "suspected": reason,
                "suspected_since": suspicion.since,
                "next_test_at": suspicion.next_test_at,
                "suspected_by": suspicion.job_ids,
                "on_probation": is_on_probation,
            }
            shown[position] = node.model_copy(update=update)
    if not any(_is_usable(node) for node in shown):
        shown = [_used_although_suspected(node) for node in shown]
    return tuple(shown)


def probation_limit(limit: str, num_nodes: int) -> int:
    """How many of `num_nodes` may be on probation: a number ("2"), or a share ("25%"), which allows at least one.

    Raises:
        ValueError: it is neither.
    """
    if limit.endswith("%"):
        share = float(limit[:-1])
        if not 0 <= share <= 100:
            raise ValueError(f"max_probation {limit!r} is not a share between 0% and 100%")
        return max(1, math.floor(num_nodes * share / 100)) if share else 0
    if not limit.isdecimal():
        raise ValueError(f"max_probation {limit!r} is neither a number of nodes (2) nor a share of them (25%)")
    return int(limit)


def chosen_for_probation(
    nodes: Sequence[Node], suspicions: Mapping[str, NodeSuspicion], num_allowed: int
) -> frozenset[str]:
    """The nodes that are on probation: those that failed tests first, then the longest suspected ones."""
    suspected = [(node.node_id, suspicions[node.node_id]) for node in nodes if node.node_id in suspicions]
    wanted = [(node_id, suspicion) for node_id, suspicion in suspected if suspicion.is_probation]
    wanted.sort(key=lambda entry: (-entry[1].num_tests, entry[1].since, entry[0]))
    return frozenset(node_id for node_id, _ in wanted[:num_allowed])


def with_drains(nodes: Sequence[Node], drains: Mapping[str, Drain]) -> tuple[Node, ...]:
    """The nodes with the drains requested now. A drain by Ray takes precedence, since it cannot be undone."""

    def now_of(node: Node) -> Drain | None:
        known = node.drain
        if known is not None and known.source is DrainSource.RAY:
            return known
        return drains.get(node.node_id)

    return tuple(node.model_copy(update={"drain": now_of(node)}) for node in nodes)


def avoided(nodes: Sequence[Node], job_id: str = "") -> tuple[AvoidedNode, ...]:
    """The nodes that the supervisor of this job must avoid, ordered by id; `nodes` come from `described`. Without a
    job: those that every supervisor must avoid.

    While no other node is left, suspected nodes are used: a suspected node is better than none. Drained nodes are
    always avoided. On a cordoned node workers stay, and none is added.
    """
    others = any(_is_usable(node) and job_id not in node.suspected_by for node in nodes)
    any_left = any(_is_usable(node) for node in nodes)
    avoided_nodes = []
    for node in sorted(nodes, key=lambda n: n.node_id):
        if not node.alive:
            continue
        if node.drain is not None:
            avoided_nodes.append(
                AvoidedNode(node_id=node.node_id, reason=f"drained: {node.drain.reason}", deadline=node.drain.deadline)
            )
        elif node.on_probation and any_left:
            reason = f"on probation: {node.suspected}"
            avoided_nodes.append(AvoidedNode(node_id=node.node_id, reason=reason, is_suspected=node.cordon is None))
        elif job_id in node.suspected_by and others:
            reason = f"suspected by this job: {node.suspected}"
            avoided_nodes.append(AvoidedNode(node_id=node.node_id, reason=reason, is_suspected=node.cordon is None))
        elif node.cordon is not None:
            avoided_nodes.append(
                AvoidedNode(node_id=node.node_id, reason=f"cordoned: {node.cordon.reason}", keeps_workers=True)
            )
    return tuple(avoided_nodes)


def usable(nodes: Sequence[Node], job_ids: Sequence[str] = ()) -> tuple[Node, ...]:
    """The nodes whose capacity counts: alive, and avoidable for at least one of these jobs.

    Args:
        job_ids: the jobs that the capacity is for.
    """
    excluded, wary = _excluded(nodes), suspecting(nodes)
    if job_ids and wary.issuperset(job_ids):  # a job that suspects no node excludes what all do
        excluded |= set.intersection(*(_excluded(nodes, job_id) for job_id in job_ids))
    return tuple(node for node in nodes if node.alive and node.node_id not in excluded)


def suspecting(nodes: Sequence[Node]) -> frozenset[str]:
    """The jobs by which any node is suspected. `avoided` is the same for all others."""
    return frozenset(job_id for node in nodes for job_id in node.suspected_by)


def _excluded(nodes: Sequence[Node], job_id: str = "") -> set[str]:
    return {node.node_id for node in avoided(nodes, job_id) if not node.keeps_workers}


def next_test_delay_s(probation_s: float, num_failed: int) -> float:
    """Seconds until the next test of a suspected node; they double with each failed test."""
    return backoff_s(num_failed + 1, first_s=probation_s, longest_s=max(MAX_TEST_DELAY_S, probation_s))


def partner_for_test(suspect: str, nodes: Sequence[Node]) -> str | None:
    """A sound node to test the suspect with; None if there is none, and the suspect is tested alone."""
    return next((node.node_id for node in nodes if node.node_id != suspect and _is_sound(node)), None)


def _is_sound(node: Node) -> bool:
    """Usable, and suspected by no job."""
    return _is_usable(node) and not node.suspected


def _is_usable(node: Node) -> bool:
    """Alive, not on probation, not drained, and with CPUs or GPUs."""
    return node.alive and not node.on_probation and node.drain is None and _computes(node)


def _computes(node: Node) -> bool:
    return node.cpus > 0 or node.gpus > 0


def _used_although_suspected(node: Node) -> Node:
    if not node.on_probation or not node.alive or node.drain is not None:
        return node
    return node.model_copy(update={"suspected": f"{node.suspected} (still used, since no other node is sound)"})
