"""Commands about the clusters that have joined: clusters list, cordon, uncordon, label, remove, tokens; and `move`,
which moves a job to another of them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from shoal_api.cli.session import DEFAULT_URL, JobArgument, JsonFlag, Session, UrlOption, command

if TYPE_CHECKING:
    from shoal_api.client import Client
    from shoal_service.fleet_views import ClusterSummary
    from shoal_service.views import JobView

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the cluster; `shoal clusters` lists them.")]


def clusters(context: typer.Context, url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False) -> None:
    """The clusters that have joined; without a further word: list them."""
    if context.invoked_subcommand is None:
        list_clusters(url, as_json)


def list_clusters(url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False) -> None:
    """List the clusters: whether they answer, what they have and what is free, jobs, labels."""
    with command(url, as_json) as session:
        from shoal_api.cli.render.fleet import clusters_table

        with session.open_client() as client:
            found = client.clusters()
        session.output.document(found, lambda: clusters_table(found))


def cordon(
    name: NameArgument,
    reason: Annotated[str, typer.Option("--reason", help="Shown with the cluster.")] = "cordon requested",
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Start no job in a cluster and add no worker; those that are there stay."""
    with command(url, as_json) as session:
        with session.open_client() as client:
            view = client.cordon_cluster(name, reason=reason)
        _show(session, view)


def uncordon(name: NameArgument, url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False) -> None:
    """End the cordon of a cluster."""
    with command(url, as_json) as session:
        with session.open_client() as client:
            view = client.uncordon_cluster(name)
        _show(session, view)


def label(
    name: NameArgument,
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME=VALUE | NAME-]...", help="Set it, or remove it; without any, they are shown."),
    ] = None,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Change labels of a cluster, which its nodes have too: `shoal clusters label west region=eu draft-`."""
    with command(url, as_json) as session:
        from shoal_api.cli.commands.control import changes_of

        given = changes_of("clusters label", changes or [])
        with session.open_client() as client:
            view = client.label_cluster(name, given) if given else client.joined_cluster(name)
        _show(session, view)


def remove(
    name: NameArgument,
    force: Annotated[
        bool, typer.Option("--force", help="Although jobs have attempts there; only once its gateway is gone.")
    ] = False,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Forget a cluster and revoke its tokens, so that its gateway ends. It may join again with a new token."""
    with command(url, as_json) as session:
        with session.open_client() as client:
            client.remove_cluster(name, force=force)
        session.output.document(None, lambda: f"cluster {name} is removed, and its tokens are revoked")


def tokens(name: NameArgument, url: UrlOption = DEFAULT_URL, as_json: JsonFlag = False) -> None:
    """List the tokens of a cluster, also those that have ended. `shoal token create --cluster` makes one."""
    with command(url, as_json) as session:
        from shoal_api.cli.render.access import tokens_table

        with session.open_client() as client:
            found = client.cluster_tokens(name)
        session.output.document(found, lambda: tokens_table(found, time.time()))


def move(
    job: JobArgument,
    to: Annotated[
        str, typer.Option("--to", metavar="CLUSTER", help="Name of the cluster; any: the scheduler chooses.")
    ],
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the job trains there.")] = False,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonFlag = False,
) -> None:
    """Move a job to another cluster: it saves, ends where it is, and goes on there without losing a step.

    Refused if the job could not run there. With --wait the exit code is 1 if the job ends before it trains there.
    """
    with command(url, as_json) as session:
        with session.open_client() as client:
            job_id = session.job_id(client, job)
            view = client.move(job_id, to)
            if wait:
                view = _until_it_trains(session, client, view, to)
        session.output.document(view, lambda: _moved(view, to))
        if wait and not _trains_in(view, to):
            raise typer.Exit(1)


def _until_it_trains(session: Session, client: Client, job: JobView, to: str) -> JobView:
    """Says each change of the state on standard error."""
    said = ""

    def is_there(now: JobView) -> bool:
        nonlocal said
        words = _standing(now)
        if words != said and not session.output.as_json:
            session.output.say(words, "dim")
        said = words
        return _trains_in(now, to)

    return client.wait(job.id, until=is_there)


def _trains_in(job: JobView, to: str) -> bool:
    from shoal_workers.contract.job import JobState
    from shoal_workers.contract.placing import ANY_CLUSTER

    status = job.status
    if status.state is JobState.SUCCEEDED:
        return True
    return status.state is JobState.RUNNING and (to == ANY_CLUSTER or status.cluster == to)


def _standing(job: JobView) -> str:
    status = job.status
    where = f" in {status.cluster}" if status.cluster and status.state.holds_workers else ""
    why = f": {status.message}" if status.message else ""
    return f"{status.state}{where}, step {status.step}{why}"


def _moved(job: JobView, to: str) -> str:
    from shoal_workers.contract.placing import ANY_CLUSTER

    head = f"{job.id}  {job.name}  {_standing(job)}"
    if to == ANY_CLUSTER:
        return f"{head}\nit may run in any cluster"
    if _trains_in(job, to):
        return f"{head}\nit trains in {to}"
    return f"{head}\nit goes to {to}; `shoal watch {job.id}` shows when it trains there"


def _show(session: Session, view: ClusterSummary) -> None:
    from shoal_api.cli.render.fleet import clusters_table

    session.output.document(view, lambda: clusters_table((view,)))
