"""Commands for the nodes of the clusters: nodes, drain and cordon."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from shoal_api.cli.errors import CliError
from shoal_api.cli.exit_codes import ExitCode
from shoal_api.cli.render.fleet import nodes_table
from shoal_api.cli.session import Session, command
from shoal_service.core.quantities import count_text
from shoal_service.fleet_views import NodeView

NodeArgument = Annotated[str, typer.Argument(metavar="NODE", help="Id, unique beginning of an id, or address.")]


@command()
def nodes(session: Session) -> None:
    """List the nodes of the cluster: resources, and which are drained or on probation."""
    session.show(session.client.nodes(), nodes_table)


@command()
def drain(
    session: Session,
    node: NodeArgument,
    deadline_s: Annotated[
        float | None,
        typer.Option("--deadline-s", min=0, help="Seconds until the node is switched off."),
    ] = None,
    reason: Annotated[str, typer.Option("--reason", help="Shown with the node.")] = "drain requested",
    undo: Annotated[bool, typer.Option("--undo", help="End the drain; the node is used again.")] = False,
) -> None:
    """Move jobs off a node at their next step boundary, without losing a step, and place nothing new on it."""
    if undo and deadline_s is not None:
        raise CliError("--undo cannot be combined with --deadline-s", hint=f"shoal drain {node} --undo")
    node_id = match_node(node, session.client.nodes()).node_id
    if undo:
        session.show(session.client.undo_drain(node_id), lambda node: nodes_table([node]))
    else:
        session.show(
            session.client.drain(node_id, reason=reason, deadline_s=deadline_s), lambda node: nodes_table([node])
        )


@command()
def cordon(
    session: Session,
    node: NodeArgument,
    reason: Annotated[str, typer.Option("--reason", help="Shown with the node.")] = "cordon requested",
    undo: Annotated[bool, typer.Option("--undo", help="End the cordon.")] = False,
) -> None:
    """Place no new worker on a node; the workers that are there stay."""
    node_id = match_node(node, session.client.nodes()).node_id
    view = session.client.undo_cordon(node_id) if undo else session.client.cordon(node_id, reason=reason)
    session.show(view, lambda node: nodes_table([node]))


def match_node(reference: str, nodes: Sequence[NodeView]) -> NodeView:
    """Return the live node that `reference` names. Raises CliError if no node matches (exit code 4) or several (2)."""
    alive = [node for node in nodes if node.alive and reference]
    matches = [node for node in alive if node.node_id.startswith(reference) or node.ip == reference]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise CliError(
            f"{reference!r} matches {count_text(len(matches), 'node')}",
            details=tuple(f"{node.node_id}  {node.ip}" for node in matches),
            hint="give more of the id",
        )
    raise CliError(
        f"there is no live node {reference!r}", hint="`shoal nodes` lists them", exit_code=ExitCode.NOT_FOUND
    )
