"""Commands about the clusters that have joined: clusters list, cordon, uncordon, label, remove, tokens; and `move`,
which moves a job to another of them.
"""

from __future__ import annotations

import time
from typing import Annotated

import typer

from shoal_api.cli.commands.control import ChangesArgument, parse_changes
from shoal_api.cli.errors import CliError
from shoal_api.cli.exit_codes import ExitCode
from shoal_api.cli.options import JobArgument
from shoal_api.cli.render.access import tokens_table
from shoal_api.cli.render.fleet import clusters_table
from shoal_api.cli.session import Session, command
from shoal_service.views import JobView
from shoal_workers.contract.job import JobState
from shoal_workers.contract.placing import ANY_CLUSTER

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the cluster; `shoal clusters` lists them.")]


@command()
def list_clusters(session: Session) -> None:
    """List the clusters: whether they answer, what they have and what is free, jobs, labels."""
    session.show(session.client.clusters(), clusters_table)


@command()
def cordon(
    session: Session,
    name: NameArgument,
    reason: Annotated[str, typer.Option("--reason", help="Shown with the cluster.")] = "cordon requested",
) -> None:
    """Start no job in a cluster and add no worker; those that are there stay."""
    session.show(session.client.cordon_cluster(name, reason=reason), lambda cluster: clusters_table([cluster]))


@command()
def uncordon(session: Session, name: NameArgument) -> None:
    """End the cordon of a cluster."""
    session.show(session.client.uncordon_cluster(name), lambda cluster: clusters_table([cluster]))


@command()
def label(session: Session, name: NameArgument, changes: ChangesArgument = None) -> None:
    """Change labels of a cluster, which its nodes have too: `shoal clusters label west region=eu draft-`."""
    labels = parse_changes("clusters label", changes or [])
    cluster = session.client.label_cluster(name, labels) if labels else session.client.joined_cluster(name)
    session.show(cluster, lambda cluster: clusters_table([cluster]))


@command()
def remove(
    session: Session,
    name: NameArgument,
    force: Annotated[
        bool, typer.Option("--force", help="Although jobs have attempts there; only once its gateway is gone.")
    ] = False,
) -> None:
    """Forget a cluster and revoke its tokens, so that its gateway ends. It may join again with a new token."""
    session.client.remove_cluster(name, force=force)
    session.show(None, f"cluster {name} is removed, and its tokens are revoked")


@command()
def tokens(session: Session, name: NameArgument) -> None:
    """List the tokens of a cluster, also those that have ended. `shoal token create --cluster` makes one."""
    session.show(session.client.cluster_tokens(name), lambda tokens: tokens_table(tokens, time.time()))


@command()
def move(
    session: Session,
    job: JobArgument,
    to: Annotated[
        str, typer.Option("--to", metavar="CLUSTER", help="Name of the cluster; any: the scheduler chooses.")
    ],
    now: Annotated[bool, typer.Option("--now", help="End it now, although it may have to wait there.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the job trains there.")] = False,
) -> None:
    """Move a job to another cluster: it saves, ends where it is, and goes on there without losing a step.

    It trains on until it would start there. Refused if the job could not run there. With --wait the exit code is 1 if
    the job ends before it trains there.
    """
    if now and to == ANY_CLUSTER:
        raise CliError("--now needs the name of a cluster: with --to any the job stays where it is")
    view = session.client.move(session.job_id(job), to, at_once=now)
    if wait:
        view = _wait_until_trains(session, view, to)
    session.show(view, lambda job: _describe_move(job, to))
    if wait and not _trains_in(view, to):
        raise typer.Exit(ExitCode.FAILED)


def _wait_until_trains(session: Session, job: JobView, to: str) -> JobView:
    """Wait, and print each change of the state to standard error."""
    last = ""

    def is_there(now: JobView) -> bool:
        nonlocal last
        state = _describe_state(now)
        if state != last and not session.output.as_json:
            session.output.say(state, "dim")
        last = state
        return _trains_in(now, to)

    return session.client.wait(job.id, until=is_there)


def _trains_in(job: JobView, to: str) -> bool:
    status = job.status
    if status.state is JobState.SUCCEEDED:
        return True
    return status.state is JobState.RUNNING and (to == ANY_CLUSTER or status.cluster == to)


def _describe_state(job: JobView) -> str:
    status = job.status
    where = f" in {status.cluster}" if status.cluster and status.state.holds_workers else ""
    why = f": {status.message}" if status.message else ""
    return f"{status.state}{where}, step {status.step}{why}"


def _describe_move(job: JobView, to: str) -> str:
    head = f"{job.id}  {job.name}  {_describe_state(job)}"
    if to == ANY_CLUSTER:
        return f"{head}\nit may run in any cluster"
    if _trains_in(job, to):
        return f"{head}\nit trains in {to}"
    return f"{head}\nit goes to {to}; `shoal watch {job.id}` shows when it trains there"
