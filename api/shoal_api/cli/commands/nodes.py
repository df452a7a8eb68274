"""Commands for whoever takes machines away: nodes, drain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from shoal_api.cli.session import DEFAULT_URL, JsonFlag, UrlOption, command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shoal_service.views import NodeView


def nodes(url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False) -> None:
    """List the nodes of the cluster: what they have, and which are being drained or on probation."""
    with command(url, as_json) as session:
        from shoal_api.cli.render.tables import nodes_table

        with session.open_client() as client:
            found = client.nodes()
        session.output.document(found, lambda: nodes_table(found))


def drain(
    node: Annotated[str, typer.Argument(metavar="NODE", help="A node's id, the beginning of one, or its address.")],
    deadline_s: Annotated[
        float | None, typer.Option("--deadline-s", min=0, help="Seconds until the node goes away.")
    ] = None,
    reason: Annotated[str, typer.Option("--reason", help="Shown with the node and to the jobs.")] = "drain requested",
    undo: Annotated[bool, typer.Option("--undo", help="Use the node again.")] = False,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Leave a node: jobs move off it at their next step boundary, without losing a step; nothing new goes there."""
    with command(url, as_json) as session:
        from shoal_api.cli.errors import CliError
        from shoal_api.cli.render.tables import nodes_table

        if undo and deadline_s is not None:
            raise CliError("--undo and --deadline-s exclude one another", hint=f"shoal drain {node} --undo")
        with session.open_client() as client:
            node_id = match_node(node, client.nodes()).node_id
            view = client.undo_drain(node_id) if undo else client.drain(node_id, reason=reason, deadline_s=deadline_s)
        session.output.document(view, lambda: nodes_table((view,)))


def match_node(reference: str, nodes: Sequence[NodeView]) -> NodeView:
    """The one living node that is meant. Raises CliError when none fits (exit code 4) or several do (2)."""
    from shoal_api.cli.errors import CliError
    from shoal_api.cli.exit_codes import ExitCode

    fitting = [n for n in nodes if n.alive and reference and (n.node_id.startswith(reference) or n.ip == reference)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        lines = tuple(f"{n.node_id}  {n.ip}" for n in fitting)
        raise CliError(f"{reference!r} fits {len(fitting)} nodes", details=lines, hint="use more of the id")
    raise CliError(
        f"there is no living node {reference!r}", hint="`shoal nodes` lists them", exit_code=ExitCode.NOT_FOUND
    )
