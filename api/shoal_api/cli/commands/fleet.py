"""Commands about what jobs share: the clusters that have joined, and `move`, which moves a job to another of them;
nodes; the queue and its order; the quotas of projects and users.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import ValidationError

from shoal_api.cli.commands.control import ChangesArgument, parse_changes
from shoal_api.cli.render.fleet import (
    render_clusters,
    render_nodes,
    render_projects,
    render_queue,
    render_tokens,
    render_usage,
    render_users,
)
from shoal_api.cli.render.jobs import job_line
from shoal_api.cli.session import (
    CliError,
    ExitCode,
    JobArgument,
    Session,
    command,
    keep_given,
    open_output,
    refuse_with,
)
from shoal_service.core.goodput import Period
from shoal_service.core.quantities import count_text
from shoal_service.fleet_views import NodeView, ProjectRules, ProjectView, UserRules, UserView
from shoal_service.views import JobPatch, JobView
from shoal_workers.contract import ANY_CLUSTER, JobState
from shoal_workers.contract.plain_text import first_problem

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the cluster; `shoal clusters` lists them.")]


@command()
def list_clusters(session: Session) -> None:
    """List the clusters: whether they answer, what they have and what is free, jobs, labels."""
    session.show(session.client.clusters(), render_clusters)


@command()
def cordon_cluster(
    session: Session,
    name: NameArgument,
    reason: Annotated[str, typer.Option("--reason", help="Shown with the cluster.")] = "cordon requested",
) -> None:
    """Start no job in a cluster and add no worker; those that are there stay."""
    session.show(session.client.cordon_cluster(name, reason=reason), lambda cluster: render_clusters([cluster]))


@command()
def uncordon(session: Session, name: NameArgument) -> None:
    """End the cordon of a cluster."""
    session.show(session.client.uncordon_cluster(name), lambda cluster: render_clusters([cluster]))


@command()
def label(session: Session, name: NameArgument, changes: ChangesArgument = None) -> None:
    """Change labels of a cluster, which its nodes have too: `shoal clusters label west region=eu draft-`."""
    labels = parse_changes("clusters label", changes or [])
    cluster = session.client.label_cluster(name, labels) if labels else session.client.joined_cluster(name)
    session.show(cluster, lambda cluster: render_clusters([cluster]))


@command()
def remove(
    session: Session,
    name: NameArgument,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Remove it with the attempts that jobs have there; needs that its gateway is gone."
        ),
    ] = False,
) -> None:
    """Forget a cluster and revoke its tokens, so that its gateway ends. It may join again with a new token."""
    session.client.remove_cluster(name, force=force)
    session.show(None, f"cluster {name} is removed, and its tokens are revoked")


@command()
def tokens(session: Session, name: NameArgument) -> None:
    """List the tokens of a cluster, also those that have ended. `shoal token create --cluster` makes one."""
    session.show(session.client.cluster_tokens(name), lambda tokens: render_tokens(tokens, time.time()))


@command()
def move(
    session: Session,
    job: JobArgument,
    to: Annotated[
        str, typer.Option("--to", metavar="CLUSTER", help="Name of the cluster; any: the scheduler chooses.")
    ],
    now: Annotated[
        bool, typer.Option("--now", help="Save and end now, even if the job then has to wait in the other cluster.")
    ] = False,
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

    def is_there(current: JobView) -> bool:
        nonlocal last
        state = _describe_state(current)
        if state != last and not session.output.as_json:
            session.output.say(state, "dim")
        last = state
        return _trains_in(current, to)

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


NodeArgument = Annotated[str, typer.Argument(metavar="NODE", help="Id, unique beginning of an id, or address.")]


@command()
def nodes(session: Session) -> None:
    """List the nodes of the cluster: resources, and which are drained or on probation."""
    session.show(session.client.nodes(), render_nodes)


@command()
def drain(
    session: Session,
    node: NodeArgument,
    deadline_s: Annotated[
        float | None,
        typer.Option("--deadline-s", min=0, help="Seconds until the node is switched off."),
    ] = None,
    reason: Annotated[
        str | None, typer.Option("--reason", help="Reason, shown with the node; default: drain requested.")
    ] = None,
    undo: Annotated[bool, typer.Option("--undo", help="End the drain; the node is used again.")] = False,
) -> None:
    """Move jobs off a node at their next step boundary, without losing a step, and place nothing new on it."""
    node_id = match_node(node, session.client.nodes()).node_id
    if undo:
        refuse_with("--undo", deadline_s=deadline_s is not None, reason=reason)
        session.show(session.client.undo_drain(node_id), lambda node: render_nodes([node]))
    else:
        drained = session.client.drain(node_id, deadline_s=deadline_s, **keep_given(reason=reason))
        session.show(drained, lambda node: render_nodes([node]))


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
    session.show(view, lambda node: render_nodes([node]))


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


Rules = TypeVar("Rules", ProjectRules, UserRules)
ProjectArgument = Annotated[str, typer.Argument(metavar="PROJECT", help="Name of a project.")]
_NONE = "none"
UserArgument = Annotated[
    str, typer.Argument(metavar="USER", help="Name of a user; `default` stands for each user without other limits.")
]

MaxRunningOption = Annotated[
    str | None, typer.Option("--max-running", metavar="N|none", help="Most jobs with workers.")
]
MaxQueuedOption = Annotated[str | None, typer.Option("--max-queued", metavar="N|none", help="Most queued jobs.")]


@command()
def queue(
    session: Session,
    project: Annotated[str | None, typer.Option("--project", help="Only jobs of this project.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=10_000, help="Largest number of jobs.")] = 100,
) -> None:
    """Show the queue: why each job waits, for whom, until when.

    Running jobs with fewer workers than they may have follow, with the reason.
    """
    view = session.client.queue(limit=10_000 if project is not None else limit)
    if project is not None:
        items = tuple(job for job in view.items if job.project == project)
        held_back = tuple(job for job in view.held_back if job.project == project)
        view = view.model_copy(
            update={"items": items[:limit], "num_queued": len(items), "held_back": held_back[:limit]}
        )
    holders = {holder for job in view.items if job.place is not None for holder in job.place.holders}
    session.show(view, lambda queue: render_queue(queue, time.time(), session.job_names(holders)))


@command()
def usage(
    session: Session,
    by: Annotated[Period, typer.Option("--by", help="Weeks begin on Monday, in UTC.")] = Period.WEEK,
    periods: Annotated[
        int, typer.Option("--periods", min=1, max=2400, help="Weeks or months, with the present one.")
    ] = 8,
    project: Annotated[str | None, typer.Option("--project", help="Only this project.")] = None,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help='Write CSV; "-": to the output.')] = None,
) -> None:
    """Show the worker hours of projects by week or month, without time in the queue. Deleted jobs are not counted."""
    if csv is None:
        rows = session.client.usage(by=by, periods=periods, project=project)
        session.show(rows, lambda rows: render_usage(rows, by, project))
    else:
        with open_output(csv) as file:
            session.client.export_usage(file, by=by, periods=periods, project=project)


@command()
def priority(
    session: Session,
    job: JobArgument,
    value: Annotated[
        int, typer.Argument(metavar="N", min=-1000, max=1000, help="-1000 to 1000; higher gets workers first.")
    ],
) -> None:
    """Change the priority of a job. Put -- before a negative number: `shoal priority JOB -- -5`."""
    session.show(
        session.client.patch(session.job_id(job), JobPatch(priority=value)),
        lambda view: job_line(view, f"priority {view.spec.priority}"),
    )


@command()
def list_quotas(session: Session) -> None:
    """List the projects: their quotas, and what they use."""
    session.show(session.client.projects(), render_projects)


@command()
def set_quota(
    session: Session,
    project: ProjectArgument,
    weight: Annotated[
        float | None, typer.Option("--weight", help="Share, relative to projects of the same parent.")
    ] = None,
    guaranteed: Annotated[
        int | None,
        typer.Option("--guaranteed", min=0, help="Guaranteed workers: the project gets them back from other projects."),
    ] = None,
    limit: Annotated[str | None, typer.Option("--limit", metavar="N|none", help="Most workers.")] = None,
    max_running: MaxRunningOption = None,
    max_queued: MaxQueuedOption = None,
    parent: Annotated[
        str | None, typer.Option("--parent", metavar="PROJECT|none", help="The project that it is a part of.")
    ] = None,
) -> None:
    """Define a project, or change its quotas. What is not given stays as it is."""
    changes = keep_given(weight=weight, guaranteed=guaranteed)
    changes |= _parse_limits(limit=limit, max_running=max_running, max_queued=max_queued)
    if parent is not None:
        changes["parent"] = None if parent == _NONE else parent
    rules = _merge_rules(ProjectRules, session.client.projects(), project, changes)
    session.show(session.client.set_project(project, rules), lambda project: render_projects([project]))


@command()
def delete_quota(session: Session, project: ProjectArgument) -> None:
    """Delete the quotas of a project. Its jobs go on under those of the project `default`."""
    session.client.delete_project(project)
    session.show(None, f"the quotas of {project} are deleted; those of the project default apply")


def _parse_limits(**options: str | None) -> dict[str, int | None]:
    """Parse the options that are given: numbers, or `none`. Raises CliError."""
    limits: dict[str, int | None] = {}
    for name, text in keep_given(**options).items():
        if text != _NONE and not text.isdecimal():
            option = f"--{name.replace('_', '-')}"
            raise CliError(f"{option} {text!r} is not a number", hint=f"{option} 8, or {option} {_NONE} for no limit")
        limits[name] = None if text == _NONE else int(text)
    return limits


def _merge_rules(
    kind: type[Rules], views: Sequence[ProjectView | UserView], name: str, changes: dict[str, Any]
) -> Rules:
    """Return the rules of a project or user with some of them changed. Raises CliError."""
    current = next((view for view in views if view.name == name and view.is_defined), None)
    before = {} if current is None else current.model_dump(include=set(kind.model_fields))
    try:
        return kind.model_validate({**before, **changes})
    except ValidationError as error:
        raise CliError(first_problem(error), hint="shoal quota --help") from None


@command()
def list_users(session: Session) -> None:
    """List the users: the limits that apply, and what they have."""
    session.show(session.client.users(), render_users)


@command()
def set_user(
    session: Session,
    user: UserArgument,
    max_running: MaxRunningOption = None,
    max_queued: MaxQueuedOption = None,
) -> None:
    """Limit the jobs of a user. What is not given stays as it is."""
    limits = _parse_limits(max_running=max_running, max_queued=max_queued)
    rules = _merge_rules(UserRules, session.client.users(), user, limits)
    session.show(session.client.set_user(user, rules), lambda user: render_users([user]))


@command()
def delete_user(session: Session, user: UserArgument) -> None:
    """Delete the limits of a user. Those of the user `default` then apply."""
    session.client.delete_user(user)
    session.show(None, f"the limits of {user} are deleted; those of the user default apply")
