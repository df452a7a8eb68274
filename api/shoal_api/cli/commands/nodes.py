"""Commands for maintenance of machines: nodes, drain, cordon, and maintenance list, add and cancel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import RenderableType

from shoal_api.cli.errors import CliError, first_problem
from shoal_api.cli.exit_codes import ExitCode
from shoal_api.cli.render.fleet import nodes_table, windows_table
from shoal_api.cli.session import Session, command
from shoal_service.core.quantities import count_text
from shoal_service.fleet_views import NodeView, WindowRequest

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
        session.show(session.client.undo_drain(node_id), _node_table)
    else:
        session.show(session.client.drain(node_id, reason=reason, deadline_s=deadline_s), _node_table)


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
    session.show(view, _node_table)


@command()
def list_windows(session: Session) -> None:
    """List the maintenance windows, and when their nodes begin to drain."""
    session.show(session.client.maintenance_windows(), windows_table)


@command()
def add_window(
    session: Session,
    nodes: Annotated[
        list[str],
        typer.Argument(metavar="NODE...", help="Ids or addresses; an address also names the machine after a restart."),
    ],
    begins: Annotated[str, typer.Option("--from", metavar="TIME", help="When the nodes have to be empty.")],
    ends: Annotated[str, typer.Option("--to", metavar="TIME", help="When they are used again.")],
    reason: Annotated[str, typer.Option("--reason", help="Shown with the nodes.")] = "maintenance",
) -> None:
    """Plan a maintenance window. TIME is as in 2030-01-31T18:00:00Z, or seconds since 1970."""
    alive = session.client.nodes()
    names = [name if any(node.ip == name for node in alive) else match_node(name, alive).node_id for name in nodes]
    times = {"begins_at": _parse_time(begins), "ends_at": _parse_time(ends)}
    try:
        window = WindowRequest.model_validate({"nodes": names, "reason": reason, **times})
    except ValidationError as error:
        raise CliError(first_problem(error), hint="shoal maintenance add --help") from None
    session.show(session.client.plan_maintenance(window), lambda window: windows_table([window]))


@command()
def cancel_window(
    session: Session,
    window: Annotated[str, typer.Argument(metavar="WINDOW", help="Id of a window.")],
) -> None:
    """Cancel a maintenance window; its nodes are used again."""
    session.client.cancel_maintenance(window)
    session.show(None, f"{window} is cancelled")


def _parse_time(text: str) -> str | float:
    return float(text) if text.replace(".", "", 1).isdecimal() else text


def _node_table(node: NodeView) -> RenderableType:
    return nodes_table([node])


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
