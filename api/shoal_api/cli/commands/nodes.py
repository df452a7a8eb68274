"""Commands for the nodes of the clusters: nodes, drain and cordon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from shoal_api.cli.session import DEFAULT_URL, JsonFlag, UrlOption, command
from shoal_service.core.quantities import count_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shoal_service.fleet_views import NodeView


def nodes(url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False) -> None:
    """List the nodes of the cluster: resources, and which are drained or on probation."""
    with command(url, as_json) as session:
        from shoal_api.cli.render.fleet import nodes_table

        with session.open_client() as client:
            found = client.nodes()
        session.output.document(found, lambda: nodes_table(found))


def drain(
    node: Annotated[str, typer.Argument(metavar="NODE", help="Id, unique beginning of an id, or address.")],
    deadline_s: Annotated[
        float | None,
        typer.Option("--deadline-s", min=0, help="Seconds until the node is switched off."),
    ] = None,
    reason: Annotated[str, typer.Option("--reason", help="Shown with the node.")] = "drain requested",
    undo: Annotated[bool, typer.Option("--undo", help="End the drain; the node is used again.")] = False,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Move jobs off a node at their next step boundary, without losing a step, and place nothing new on it."""
    with command(url, as_json) as session:
        from shoal_api.cli.errors import CliError
        from shoal_api.cli.render.fleet import nodes_table

        if undo and deadline_s is not None:
            raise CliError("--undo cannot be combined with --deadline-s", hint=f"shoal drain {node} --undo")
        with session.open_client() as client:
            node_id = match_node(node, client.nodes()).node_id
            view = client.undo_drain(node_id) if undo else client.drain(node_id, reason=reason, deadline_s=deadline_s)
        session.output.document(view, lambda: nodes_table((view,)))


def cordon(
    node: Annotated[str, typer.Argument(metavar="NODE", help="Id, unique beginning of an id, or address.")],
    reason: Annotated[str, typer.Option("--reason", help="Shown with the node.")] = "cordon requested",
    undo: Annotated[bool, typer.Option("--undo", help="End the cordon.")] = False,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Place no new worker on a node; the workers that are there stay."""
    with command(url, as_json) as session:
        from shoal_api.cli.render.fleet import nodes_table

        with session.open_client() as client:
            node_id = match_node(node, client.nodes()).node_id
            view = client.undo_cordon(node_id) if undo else client.cordon(node_id, reason=reason)
        session.output.document(view, lambda: nodes_table((view,)))


def match_node(reference: str, nodes: Sequence[NodeView]) -> NodeView:
    """Find the live node that `reference` names. Raises CliError if no node matches (exit code 4) or several do (2)."""
    from shoal_api.cli.errors import CliError
    from shoal_api.cli.exit_codes import ExitCode

    fitting = [n for n in nodes if n.alive and reference and (n.node_id.startswith(reference) or n.ip == reference)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        lines = tuple(f"{n.node_id}  {n.ip}" for n in fitting)
        raise CliError(
            f"{reference!r} matches {count_text(len(fitting), 'node')}", details=lines, hint="give more of the id"
        )
    raise CliError(
        f"there is no live node {reference!r}", hint="`shoal nodes` lists them", exit_code=ExitCode.NOT_FOUND
    )
