"""The service, its machines and who shares them, as pages for operators: `shoal top`, `clusters`, `cluster`, `nodes`,
`webhooks`, `queue`, `quota`, `usage`, `token` and `audit`.

Pure: the command asks the server and decides how often.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from shoal_api.cli.render.jobs import describe_start_time, in_several_clusters, join_holders
from shoal_api.cli.render.terminal import (
    STATE_STYLE,
    draw_worker_bar,
    format_number,
    format_steps,
    format_time,
    make_table,
)
from shoal_service.access_views import AuditEvent, TokenView
from shoal_service.core.goodput import Period
from shoal_service.core.quantities import count_text, duration_text
from shoal_service.fleet_views import (
    ClusterSummary,
    ClusterView,
    HeldBackJob,
    NodeView,
    ProjectUsage,
    ProjectView,
    QueuedJob,
    QueueView,
    UserView,
)
from shoal_service.views import JobSummary, WebhookView
from shoal_workers.contract import JobState

_ORDER = (
    JobState.RECOVERING,
    JobState.WAITING,
    JobState.RUNNING,
    JobState.RESIZING,
    JobState.STARTING,
    JobState.PAUSING,
    JobState.CANCELLING,
    JobState.PAUSED,
    JobState.QUEUED,
)
"""The states of jobs, those that need attention first."""
_NUM_HEAD_LINES = 6
_WIDE = 150
_LINES_IF_NARROW = 3


def render_top(jobs: Sequence[JobSummary], cluster: ClusterView, now: float, max_rows: int = 50) -> RenderableType:
    """Return the page of `shoal top`. `jobs` are those that have not ended."""
    rows = sorted(jobs, key=lambda job: (_ORDER.index(job.state), job.queue_position or 0, -job.created_at))
    page: list[RenderableType] = [_top_head(jobs, cluster, now), Text("")]
    page.append(_render_jobs_now(rows[:max_rows]) if rows else Text("no job is active; `shoal submit SPEC` starts one"))
    if len(rows) > max_rows:
        page.append(Text(f"and {count_text(len(rows) - max_rows, 'more job')}", style="dim"))
    return Group(*page)


def rows_that_fit(width: int, height: int) -> int:
    """Jobs that a screen shows below the head; on a narrow one a job takes several lines."""
    return max(1, (height - _NUM_HEAD_LINES) // (1 if width >= _WIDE else _LINES_IF_NARROW))


def _top_head(jobs: Sequence[JobSummary], cluster: ClusterView, now: float) -> Text:
    alive = [node for node in cluster.nodes if node.alive]
    counts = Counter(job.state for job in jobs)
    states = ", ".join(f"{counts[state]} {state}" for state in _ORDER if counts[state])
    head = Text.assemble((format_time(now), "bold"), f"  {states or 'no jobs'}")
    head.append(f"\nworkers {sum(job.workers for job in jobs)}/{sum(job.desired_workers for job in jobs)}")
    head.append(f"   goodput {_share(fleet_goodput(jobs))}")
    head.append(f"   {count_text(sum(job.incidents for job in jobs), 'incident')}")
    head.append(f"   {count_text(len(alive), 'node')}, {cluster.cpus_free:g} of {cluster.cpus_total:g} CPUs free")
    if cluster.gpus_total:
        head.append(f", {cluster.gpus_free:g} of {cluster.gpus_total:g} GPUs free")
    away = [joined.name for joined in cluster.clusters if not joined.connected]
    if away and cluster.connected:
        head.append(f"   {'cluster' if len(away) == 1 else 'clusters'} {', '.join(away)} unreachable", style="red")
    if not cluster.connected:
        head.append("   the Ray cluster is not connected", style="red")
    elif len(alive) < len(cluster.nodes):
        head.append(f"   {count_text(len(cluster.nodes) - len(alive), 'node')} dead", style="red")
    return head


def fleet_goodput(jobs: Sequence[JobSummary]) -> float | None:
    """Return the goodput of the jobs that hold workers, weighted with the workers that they may have; None if no job
    holds workers."""
    ratios = [(job.goodput, job.desired_workers) for job in jobs if job.goodput is not None and job.desired_workers]
    total = sum(workers for _, workers in ratios)
    return sum(ratio * workers for ratio, workers in ratios) / total if total else None


def _render_jobs_now(jobs: Sequence[JobSummary]) -> RenderableType:
    several = in_several_clusters(jobs)
    return make_table(
        (
            "job",
            "name",
            *(["cluster"] if several else []),
            "state",
            ">step",
            ">ETA",
            ">loss",
            ">tokens/s",
            "workers",
            ">goodput",
            ">incidents",
            "now",
        ),
        [
            (
                job.id,
                job.name,
                *([job.cluster or "-"] if several else []),
                Text(job.state, style=STATE_STYLE[job.state]),
                format_steps(job.step, job.total_steps),
                duration_text(job.eta_s) if job.eta_s is not None else "-",
                format_number(job.loss),
                format_number(job.tokens_per_s, 0),
                Text(
                    draw_worker_bar(job.workers, job.desired_workers),
                    style="green" if job.workers >= job.desired_workers else "yellow",
                ),
                _share(job.goodput),
                Text(str(job.incidents), style="red" if job.incidents else "dim"),
                Text(_activity(job), style="dim"),
            )
            for job in jobs
        ],
    )


def _activity(job: JobSummary) -> str:
    return f"#{job.queue_position}" if job.queue_position is not None else job.note or job.reason


def _share(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1%}"


def render_clusters(clusters: Sequence[ClusterSummary]) -> RenderableType:
    has_gpus = any(cluster.gpus_total for cluster in clusters)
    return make_table(
        ("cluster", "state", ">nodes", ">CPUs free", *([">GPUs free"] if has_gpus else []), ">jobs", "labels", "why"),
        [
            (
                cluster.name,
                _cluster_state(cluster),
                cluster.num_nodes,
                f"{cluster.cpus_free:g}/{cluster.cpus_total:g}",
                *([f"{cluster.gpus_free:g}/{cluster.gpus_total:g}"] if has_gpus else []),
                cluster.num_jobs,
                ", ".join(f"{name}={value}" for name, value in sorted(cluster.labels.items())) or "-",
                _why_away(cluster),
            )
            for cluster in clusters
        ],
        empty="no cluster has joined; `shoal token create NAME --cluster CLUSTER` makes the token for `shoal join`",
    )


def render_cluster(cluster: ClusterView) -> list[Any]:
    head = Text("connected" if cluster.connected else "not connected", style="green" if cluster.connected else "red")
    head.append(f"  {cluster.address}", style="dim")
    free = f"CPUs {cluster.cpus_free:g} of {cluster.cpus_total:g} free"
    if cluster.gpus_total:
        free += f", GPUs {cluster.gpus_free:g} of {cluster.gpus_total:g} free"
    owner = Text(f"control plane {cluster.owner}, epoch {cluster.epoch}", style="dim")
    several = [render_clusters(cluster.clusters), Text("")] if len(cluster.clusters) > 1 else []
    return [head, Text(free), owner, *several, render_nodes(cluster.nodes)]


def _cluster_state(cluster: ClusterSummary) -> Text:
    if not cluster.connected:
        return Text("unreachable" if cluster.silent_s is not None else "not joined", style="red")
    return Text("cordoned", style="yellow") if cluster.cordon is not None else Text("connected", style="green")


def _why_away(cluster: ClusterSummary) -> str:
    is_silent = not cluster.connected and cluster.silent_s is not None
    silent = f"no report for {duration_text(cluster.silent_s)}" if is_silent else ""
    cordoned = f"cordoned: {cluster.cordon.reason}" if cluster.cordon is not None else ""
    return "; ".join(filter(None, (cluster.why_away, silent, cordoned)))


def render_nodes(nodes: Sequence[NodeView]) -> RenderableType:
    """Return a table of the nodes, ordered by cluster if there are several."""
    several = len({node.cluster for node in nodes}) > 1
    return make_table(
        ("node", *(["cluster"] if several else []), "ip", "state", ">cpus", ">gpus", ">memory", "why"),
        [
            (
                node.node_id[:12],
                *([node.cluster] if several else []),
                node.ip,
                state,
                f"{node.cpus:g}",
                f"{node.gpus:g}",
                f"{node.memory_gib:.1f} GiB",
                why,
            )
            for node in (sorted(nodes, key=lambda node: node.cluster) if several else nodes)
            for state, why in [_node_state(node)]
        ],
    )


def _node_state(node: NodeView) -> tuple[Text, str]:
    """Return the state of a node in one word, and its reason."""
    if not node.alive:
        return Text("dead", style="red"), ""
    if node.drain is not None:
        leaves = f", is switched off at {format_time(node.drain.deadline)}" if node.drain.deadline is not None else ""
        left = f" ({count_text(node.num_workers, 'worker')} left)" if node.num_workers else ""
        return Text("draining" if left else "drained", style="yellow"), node.drain.reason + leaves + left
    if node.suspected:
        test = f", next test at {format_time(node.next_test_at)}" if node.next_test_at is not None else ""
        return Text("probation" if node.on_probation else "suspected", style="yellow"), node.suspected + test
    if node.cordon is not None:
        return Text("cordoned", style="yellow"), node.cordon.reason
    return Text("alive", style="green"), _use_of_others(node)


def _use_of_others(node: NodeView) -> str:
    used = ((node.cpus_of_others, "CPU"), (node.gpus_of_others, "GPU"))
    amounts = " and ".join(f"{amount:g} {unit}{'' if amount == 1 else 's'}" for amount, unit in used if amount)
    return f"{amounts} reserved by others" if amounts else ""


def render_webhooks(hooks: Sequence[WebhookView], now: float) -> RenderableType:
    """Return a table with one line per hook, as of the time `now`."""
    return make_table(
        ("hook", "job", "receiver", "events", ">delivered", ">given up", "state"),
        [
            (
                hook.hook,
                hook.job_id or "all",
                hook.receiver,
                ", ".join(hook.events),
                hook.delivered,
                hook.gave_up,
                _delivery(hook, now),
            )
            for hook in hooks
        ],
        empty="no webhook; docs/webhooks.md says how to set one",
    )


def _delivery(hook: WebhookView, now: float) -> Text:
    if hook.waiting_since is None:
        last = "nothing sent yet" if hook.delivered_at is None else f"last {duration_text(now - hook.delivered_at)} ago"
        return Text(last, style="dim" if hook.delivered_at is None else "green")
    waits = f"waits for {duration_text(now - hook.waiting_since)}"
    due = "" if hook.next_at is None else f", next attempt in {duration_text(max(0.0, hook.next_at - now))}"
    return Text(f"{waits}: {hook.error}{due}", style="red")


def render_queue(queue: QueueView, now: float, names: Mapping[str, str]) -> list[Any]:
    """Render the jobs that wait, those that run with fewer workers than they may have, and the projects.

    `names`: names of jobs, by id.
    """
    held_back = [Text(""), _render_held_back(queue.held_back)] if queue.held_back else []
    below = [*held_back, Text(""), render_projects(queue.projects)]
    if not queue.items:
        return [Text("no job waits", style="dim"), *below]
    table = make_table(
        (">#", "id", "name", "project", "user", ">priority", ">waits", "starts", "why"),
        [
            (
                job.place.position if job.place is not None else "-",
                job.job_id,
                job.name,
                job.project,
                job.user,
                job.priority,
                duration_text(max(0.0, now - _find_waiting_since(job))),
                describe_start_time(None if job.place is None else job.place.expected_at, now),
                _explain_wait(job, names),
            )
            for job in queue.items
        ],
    )
    num_omitted = queue.num_queued - len(queue.items)
    if num_omitted > 0:
        below.insert(0, Text(f"and {count_text(num_omitted, 'more job')}; see --limit", style="dim"))
    return [table, *below]


def _render_held_back(jobs: Sequence[HeldBackJob]) -> RenderableType:
    return make_table(
        ("running", "name", "project", "user", ">priority", ">workers", "why no more"),
        [
            (
                job.job_id,
                job.name,
                job.project,
                job.user,
                job.priority,
                f"{job.workers} of {job.answer.max_workers}",
                job.answer.reason,
            )
            for job in jobs
        ],
    )


def render_projects(projects: Sequence[ProjectView]) -> RenderableType:
    return make_table(
        ("project", "parent", ">weight", ">guaranteed", ">limit", ">workers", ">share", ">running", ">queued"),
        [
            (
                _style_name(project),
                project.parent or "-",
                f"{project.weight:g}",
                project.guaranteed,
                "-" if project.limit is None else project.limit,
                project.workers,
                f"{project.share:.0%}",
                _format_count(project.running, project.max_running),
                _format_count(project.queued, project.max_queued),
            )
            for project in projects
        ],
    )


def render_usage(rows: Sequence[ProjectUsage], by: Period, project: str | None) -> RenderableType:
    """Render the use of projects, a row for each period and project."""
    whose = f"of project {project} " if project is not None else ""
    return make_table(
        (f"{by} of", "project", ">worker hours", ">productive", ">jobs"),
        [
            (
                f"{datetime.datetime.fromtimestamp(row.since, UTC):%Y-%m-%d}",
                row.project,
                f"{row.worker_s / 3600:,.1f}",
                f"{row.productive_s / row.worker_s:.0%}",
                row.num_jobs,
            )
            for row in rows
        ],
        empty=f"no job {whose}has had workers in this time",
    )


def render_users(users: Sequence[UserView]) -> RenderableType:
    return make_table(
        ("user", ">workers", ">running", ">queued"),
        [
            (
                _style_name(user),
                user.workers,
                _format_count(user.running, user.max_running),
                _format_count(user.queued, user.max_queued),
            )
            for user in users
        ],
    )


def _find_waiting_since(job: QueuedJob) -> float:
    return (None if job.place is None else job.place.waiting_since) or job.submitted_at


def _explain_wait(job: QueuedJob, names: Mapping[str, str]) -> str:
    if job.place is None:
        return "not considered by the scheduler yet"
    return (
        f"{job.place.reason} Waiting for {join_holders(job.place, names)}." if job.place.holders else job.place.reason
    )


def _style_name(view: ProjectView | UserView) -> Text:
    return Text(view.name, style="" if view.is_defined else "dim")


def _format_count(count: int, limit: int | None) -> str:
    return str(count) if limit is None else f"{count} of {limit}"


def is_valid(token: TokenView, now: float) -> bool:
    return token.revoked_at is None and (token.expires_at is None or now < token.expires_at)


def render_tokens(tokens: Sequence[TokenView], now: float) -> RenderableType:
    """Return a table with one row per token, in the given order."""
    return make_table(
        ("id", "name", "role", "for", "ends", "last use", "made by"),
        [
            (
                token.id,
                token.name,
                token.role,
                _scope(token),
                _end(token, now),
                "never" if token.last_used_at is None else _time(token.last_used_at),
                token.created_by,
            )
            for token in tokens
        ],
    )


def render_audit(events: Sequence[AuditEvent]) -> RenderableType:
    """Return a table with one row per event, in the given order."""
    return make_table(
        ("time", "who", "role", "token", "from", "what", "job", "outcome"),
        [
            (
                _time(event.at),
                event.actor,
                event.role,
                event.token_id,
                event.address,
                event.operation,
                event.job_id,
                event.outcome,
            )
            for event in events
        ],
    )


def _scope(token: TokenView) -> str:
    if token.cluster is not None:
        return f"cluster {token.cluster}"
    return "all" if token.projects is None else ", ".join(token.projects)


def _end(token: TokenView, now: float) -> str:
    if token.revoked_at is not None:
        return "revoked"
    if token.expires_at is None:
        return "never"
    return "expired" if token.expires_at <= now else _time(token.expires_at)


def _time(at: float) -> str:
    return datetime.datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M")
