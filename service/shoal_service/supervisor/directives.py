"""What a directive, or the node table, changes for an attempt: events for its machine. Pure; called by the executor."""

from __future__ import annotations

from collections.abc import Iterator

from shoal_service.cluster.node_table import NodeTable
from shoal_service.core.attempt.events import (
    CodeChanged,
    DesiredChanged,
    ElasticityChanged,
    Event,
    GrantChanged,
    NodesAvoided,
    ParallelismChanged,
    PinsChanged,
    Preempted,
    ServerStopping,
    SettingsChanged,
)
from shoal_service.core.attempt.state.attempt import Attempt
from shoal_service.core.attempt.state.worker import AvoidedNode
from shoal_service.supervisor.config import Directive


def changes(state: Attempt, directive: Directive) -> Iterator[Event]:
    """One event for each value that differs from the attempt's own."""
    if directive.is_preempted != state.target.is_preempted:
        yield Preempted(directive.is_preempted)  # before the grant, which is taken away with it
    if directive.pinned != state.target.pinned:
        yield PinsChanged(directive.pinned)
    if directive.elasticity != state.target.spec.elasticity:
        yield ElasticityChanged(directive.elasticity)
    if directive.parallelism != state.target.spec.parallelism:
        yield ParallelismChanged(directive.parallelism)
    if directive.settings is not None and directive.settings != state.target.settings:
        yield SettingsChanged(directive.settings)
    if directive.code is not None and directive.code != (state.target.spec.code.archive or ""):
        yield CodeChanged(directive.code)
    if directive.granted != state.target.granted:
        yield GrantChanged(directive.granted)
    if directive.desired is not state.target.desired:
        yield DesiredChanged(directive.desired)
    if directive.server_stops != state.target.server_stops:
        yield ServerStopping(directive.server_stops)


def avoided_nodes(state: Attempt, directive: Directive | None, nodes: NodeTable) -> NodesAvoided | None:
    """The nodes that the control plane or Ray excludes; None: the attempt knows them. Ray's deadline replaces the
    control plane's, since Ray enforces it."""
    avoided = {node.node_id: node for node in (directive.avoid if directive is not None else ())}
    for node_id, deadline in nodes.draining.items():
        is_replaceable = avoided[node_id].is_replaceable if node_id in avoided else True
        avoided[node_id] = AvoidedNode(
            node_id=node_id, reason="drained by Ray", deadline=deadline, is_replaceable=is_replaceable
        )
    newest = tuple(avoided[node_id] for node_id in sorted(avoided))
    return NodesAvoided(newest) if newest != state.target.avoided else None
