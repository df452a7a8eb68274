"""Where the time of a job went, as pages for a terminal: goodput, incidents by phase, profiled steps, stacks of ranks;
and how its losses differ from another job's.

Pure: every function takes views and returns objects that rich prints.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from shoal_api.cli.render.terminal import (
    STATE_STYLE,
    Part,
    draw_bar,
    draw_sparkline,
    format_time,
    make_facts_grid,
    make_table,
    new_table,
)
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.goodput import Category, Goodput, account, resume, show
from shoal_service.core.quantities import count_text, duration_text, size_text
from shoal_service.views import IncidentView, JobView, ParityView, ProfileState, ProfileView
from shoal_workers.contract import JobState, Stacks
from shoal_workers.contract.profiles import Category as StepCategory

_WIDTH = 60
"""Characters of a bar or curve."""
_WORKER_TIME = {
    Category.PRODUCTIVE: ("green", "steps computed for the first time"),
    Category.RECOMPUTED: ("yellow", "steps computed again after a rollback"),
    Category.CHECKPOINT_STALL: ("cyan", "copying the state to memory or to storage"),
    Category.RECOVERING: ("red", "from the last step before an incident to the next group"),
    Category.RESIZING: ("magenta", "planned changes: grow, shrink, drain, pause"),
    Category.DEGRADED: ("bright_black", "requested workers that were not in the group"),
    Category.STARTING: ("blue", "before the first group of an attempt"),
    Category.QUEUED: ("white", "in the queue"),
    Category.IDLE: ("dim", "none of the above"),
}
_PHASES = (
    ("detect", "yellow", "until the failure was noticed"),
    ("quiesce", "red", "until every survivor had left its collective"),
    ("plan", "magenta", "choice of workers, layout and source of the state"),
    ("form", "blue", "new process groups"),
    ("restore", "cyan", "model and state"),
    ("first_step", "green", "the first step of the new group"),
)
_MAX_FRAMES = 30
_STEP_TIME = {
    StepCategory.COMPUTE: ("green", "forward and backward passes"),
    StepCategory.COMMUNICATION: ("red", "waiting for other ranks, not hidden by computing"),
    StepCategory.DATA: ("yellow", "making batches"),
    StepCategory.OPTIMIZER: ("blue", "clipping, update and report of the step"),
    StepCategory.SNAPSHOT: ("cyan", "copying the state in memory"),
    StepCategory.CHECKPOINT: ("magenta", "staging a durable checkpoint"),
    StepCategory.VALIDATION: ("white", "validation between the steps"),
    StepCategory.OTHER: ("dim", "none of the above"),
}
_ALWAYS = frozenset(list(_STEP_TIME)[:5])
_PROFILE_STYLE = {ProfileState.REQUESTED: "cyan", ProfileState.DONE: "green", ProfileState.FAILED: "red"}


def render_goodput(job: JobView, now: float) -> list[Any]:
    goodput = _with_the_queue(job, now)
    head = Text.assemble((job.name, "bold"), f"  {job.id}  ", (job.status.state, STATE_STYLE[job.status.state]))
    if goodput is None or goodput.total <= 0:
        return [head, Text("no worker time is recorded yet", style="dim")]
    parts = [Part(c, goodput.seconds.get(c, 0.0), style) for c, (style, _) in _WORKER_TIME.items()]
    lines = [head, _summary(goodput), draw_bar(parts, _WIDTH), _render_categories(goodput)]
    if goodput.at is not None and not job.status.state.ended:
        lines.append(Text(f"booked up to {format_time(goodput.at)}", style="dim"))
    return lines


def _with_the_queue(job: JobView, now: float) -> Goodput | None:
    """Return the goodput with the current time in the queue, which the service books only when the job leaves the
    queue."""
    goodput = job.status.goodput
    if goodput is None or job.status.state is not JobState.QUEUED:
        return goodput
    requested = job.spec.elasticity.max_workers
    return show(account(resume(goodput, at=now), Category.QUEUED, requested=requested, now=now))


def _summary(goodput: Goodput) -> Text:
    had = goodput.total - sum(goodput.seconds.get(c, 0.0) for c in (Category.DEGRADED, Category.QUEUED))
    productive = goodput.seconds.get(Category.PRODUCTIVE, 0.0)
    text = Text.assemble("goodput ", (_percent(productive, goodput.total), "bold"))
    text.append(f" of {duration_text(goodput.total)} of requested worker time", style="dim")
    if had > 0:
        text.append(f"; {_percent(productive, had)} of the worker time that it had", style="dim")
    return text


def _render_categories(goodput: Goodput) -> Any:
    table = new_table("", "category", ">worker time", ">share", "")
    for category, (style, meaning) in _WORKER_TIME.items():
        amount = goodput.seconds.get(category, 0.0)
        if not amount:
            continue
        row = (Text("█", style=style), category, duration_text(amount), _percent(amount, goodput.total))
        table.add_row(*row, Text(meaning, style="dim"))
        if category is Category.RECOVERING:
            for cause, part in sorted(goodput.recovering.items(), key=lambda item: -item[1]):
                table.add_row("", f"  {cause}", duration_text(part), _percent(part, goodput.total), style="dim")
    return table


def _percent(amount: float, total: float) -> str:
    return f"{100 * amount / total:.1f} %"


def render_incidents(incidents: Sequence[IncidentView]) -> RenderableType:
    return make_table(
        (
            "id",
            "at",
            "cause",
            ">ranks",
            "workers",
            "action",
            ">detect",
            ">recovery",
            ">steps lost",
            "state from",
            ">moved",
            "message",
        ),
        [
            (
                incident_name(incident),
                format_time(incident.at),
                Text(incident.cause, style="red"),
                _ranks(incident),
                _workers(incident),
                incident.action or "-",
                duration_text(incident.detect_s),
                duration_text(incident.recovery_s) if incident.closed else Text("open", style="yellow"),
                "?" if incident.steps_lost is None else incident.steps_lost,
                incident.state_source or "-",
                "-" if incident.bytes_moved is None else size_text(incident.bytes_moved),
                incident.message,
            )
            for incident in incidents
        ],
        empty="no incidents",
    )


def render_incident(incident: IncidentView) -> list[Any]:
    title = (f"incident {incident_name(incident)}", "bold")
    head = Text.assemble(title, "  ", (incident.cause, "red"), f"  {incident.message}")
    facts = make_facts_grid(
        [
            ("at", format_time(incident.at)),
            ("noticed by", incident.witness),
            ("suspected", "" if incident.suspect is None else incident.suspect.describe()),
            ("ranks", _ranks(incident)),
            ("worker ids", ", ".join(incident.worker_ids)),
            ("node", incident.node_id),
            ("generation", str(incident.generation)),
            ("workers", _workers(incident)),
            ("layout", " -> ".join(filter(None, (incident.from_layout, incident.to_layout)))),
            ("action", incident.action),
            ("state from", incident.state_source or ""),
            ("moved", "" if incident.bytes_moved is None else size_text(incident.bytes_moved)),
            ("steps lost", "" if incident.steps_lost is None else str(incident.steps_lost)),
            ("bound", "" if incident.node_loss is None else incident.node_loss.describe()),
        ]
    )
    stacks = [Text(""), *render_stacks(incident.stacks)] if incident.stacks is not None else []
    return [head, facts, *_timeline(incident), *stacks]


def incident_name(incident: IncidentView) -> str:
    """Return `attempt.id`: incidents are numbered within an attempt."""
    return f"{incident.attempt}.{incident.id}"


def _timeline(incident: IncidentView) -> list[Any]:
    phases = [(phase, getattr(incident, f"{phase}_s"), style, meaning) for phase, style, meaning in _PHASES]
    parts = [Part(phase, spent_s, style) for phase, spent_s, style, _ in phases if spent_s is not None]
    if not parts:
        return [Text("open: no phase is complete yet", style="yellow")]
    table = make_table(
        ("", "phase", ">took", ""),
        [
            (Text("█", style=style), phase.replace("_", " "), duration_text(spent_s), Text(meaning, style="dim"))
            for phase, spent_s, style, meaning in phases
        ],
    )
    recovered = f"recovered {duration_text(incident.recovery_s)} after detection"
    if not incident.closed:
        return [draw_bar(parts, _WIDTH), table, Text("still open", style="yellow")]
    return [draw_bar(parts, _WIDTH), table, Text(recovered, style="green")]


def _ranks(incident: IncidentView) -> str:
    return ",".join(str(rank) for rank in incident.ranks) or "-"


def _workers(incident: IncidentView) -> str:
    return f"{incident.from_workers} -> {'?' if incident.to_workers is None else incident.to_workers}"


def render_stacks(stacks: Stacks) -> list[Any]:
    """Return one line that says where the ranks are, then each cluster with its frames, innermost first."""
    page: list[Any] = [Text(stacks.summary or "no worker is warm", style="bold")]
    page.append(Text(f"{format_time(stacks.at)}, generation {stacks.generation}, {stacks.reason}", style="dim"))
    for cluster in stacks.clusters:
        ranks = ", ".join(str(rank) for rank in cluster.ranks)
        who = f"rank {ranks}" if ranks else ", ".join(cluster.worker_ids)
        head = Text.assemble((who, "bold cyan"), f"  {cluster.words}", (f"  ({cluster.source})", "dim"))
        frames = [Text(f"  {frame.file}:{frame.line}  {frame.function}") for frame in cluster.frames[:_MAX_FRAMES]]
        page += [Text(""), head, *frames]
        if len(cluster.frames) > _MAX_FRAMES:
            page.append(Text(f"  ... {len(cluster.frames) - _MAX_FRAMES} more frames, see --json", style="dim"))
    return page


def render_profile(view: ProfileView) -> list[Any]:
    """Return one line about the profile, then the table of its steps, then its files."""
    head = Text.assemble((f"profile {view.number}", "bold"), f"  rank {view.rank}  ", _profile_state(view))
    if view.state is not ProfileState.DONE or not view.times:
        return [head, Text(view.reason or "it has not ended yet", style="dim")]
    steps = [str(times.step) for times in view.times]
    which_steps = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    lines = [head, Text(f"{which_steps}, {duration_text(view.step_s)} each, generation {view.generation}")]
    lines.append(draw_bar([Part(c, view.mean_s(c), style) for c, (style, _) in _STEP_TIME.items()], _WIDTH))
    page: list[Any] = [*lines, _render_categories_of_step(view)]
    if view.peak_bytes is not None:
        page.append(Text(f"tensors took {size_text(view.peak_bytes)} at most (on a CPU: beyond those before)"))
    page.extend(
        Text(f"collectives of {axis.axis}: {duration_text(axis.seconds)}, {axis.hidden:.0%} of it beside computing")
        for axis in view.overlaps
    )
    page.append(Text(f"training was held up for {duration_text(view.held_s)}", style="dim"))
    page.extend(Text(f"{file.name}  {size_text(file.bytes)}", style="cyan") for file in view.files)
    if view.note:
        page.append(Text(view.note, style="yellow"))
    return page


def render_profiles(views: Sequence[ProfileView]) -> RenderableType:
    return make_table(
        (">number", "state", ">rank", "steps", ">s per step", ">compute", ">communication", "requested", ""),
        [
            (
                view.number,
                _profile_state(view),
                view.rank,
                f"{view.times[0].step} to {view.times[-1].step}" if view.times else count_text(view.steps, "step"),
                f"{view.step_s:.3g}" if view.times else "-",
                _share_of_step(view, StepCategory.COMPUTE),
                _share_of_step(view, StepCategory.COMMUNICATION),
                format_time(view.requested_at),
                view.reason or view.note,
            )
            for view in views
        ],
        empty="no profiles; `shoal profile-job JOB` takes one",
    )


def _share_of_step(view: ProfileView, category: StepCategory) -> str:
    return f"{view.mean_s(category) / view.step_s:.0%}" if view.times and view.step_s else "-"


def _profile_state(view: ProfileView) -> Text:
    return Text(view.state, style=_PROFILE_STYLE[view.state])


def _render_categories_of_step(view: ProfileView) -> RenderableType:
    times = view.times[:6]
    return make_table(
        ("", "category", ">mean", ">share", *(f">step {step.step}" for step in times), "what it is"),
        [
            (
                Text("█", style=style),
                category.value,
                duration_text(view.mean_s(category)),
                f"{view.mean_s(category) / view.step_s:.1%}" if view.step_s else "-",
                *(duration_text(step.seconds.get(category, 0.0)) for step in times),
                Text(meaning, style="dim"),
            )
            for category, (style, meaning) in _STEP_TIME.items()
            if view.mean_s(category) or category in _ALWAYS
        ],
    )


def render_parity(report: ParityView, series: Sequence[Sequence[SeriesPoint]]) -> list[Any]:
    """Compare two jobs. `series` has the points of the job, and those of the job that it is compared with."""
    parts: list[Any] = [_verdict(report), _numbers(report)]
    if report.steps_compared:
        parts.append(_picture(report, series))
    if report.differs_in:
        parts += [Text("differs in", style="yellow"), _differences(report)]
    return parts


def _verdict(report: ParityView) -> Text:
    if not report.steps_compared:
        return Text("NOTHING TO COMPARE: the jobs have no step in common", style="bold red")
    if report.bit_identical:
        return Text("BIT-IDENTICAL", style="bold green")
    if report.within_tolerance:
        return Text(f"PARITY within {report.tolerance:g}", style="bold green")
    if not report.steps_over_tolerance:
        others = report.steps_only_in_job + report.steps_only_in_against
        return Text(
            "NO PARITY: the jobs agree in all steps that both have, but only one of them has "
            f"{count_text(others, 'step')}",
            "bold red",
        )
    over = count_text(report.steps_over_tolerance, "step")
    return Text(f"NO PARITY: {over} with a difference above {report.tolerance:g}", "bold red")


def _numbers(report: ParityView) -> Table:
    unmatched = [
        f"{count} only in {job_id}"
        for count, job_id in (
            (report.steps_only_in_job, report.job_id),
            (report.steps_only_in_against, report.against_id),
        )
        if count
    ]
    return make_facts_grid(
        [
            ("steps compared", ", ".join([str(report.steps_compared), *unmatched])),
            ("largest relative difference", _at(report.max_rel_diff, report.max_rel_diff_step)),
            ("largest absolute difference", _at(report.max_abs_diff, report.max_abs_diff_step)),
            ("first step that differs", _step_or_none(report.first_step_different)),
            ("first step over tolerance", _step_or_none(report.first_step_over_tolerance)),
        ]
    )


def _picture(report: ParityView, series: Sequence[Sequence[SeriesPoint]]) -> Table:
    """Draw both loss curves, and below them the difference on a logarithmic scale."""
    grid = Table.grid(padding=(0, 2))
    for job_id, points in zip((report.job_id, report.against_id), series, strict=True):
        grid.add_row(Text(job_id, style="dim"), Text(draw_sparkline([p.loss for p in points], _WIDTH), style="cyan"))
    magnitudes = [math.log10(max(min(point.rel_diff, 1.0), 1e-17)) for point in report.points]
    style = "green" if report.within_tolerance else "red"
    grid.add_row(Text("difference (log)", style="dim"), Text(draw_sparkline(magnitudes, _WIDTH), style=style))
    return grid


def _differences(report: ParityView) -> RenderableType:
    return make_table(
        ("key", report.job_id, report.against_id),
        [
            (difference.path, json.dumps(difference.value), json.dumps(difference.against))
            for difference in report.differs_in
        ],
    )


def _at(value: float | None, step: int | None) -> str:
    return "-" if value is None else f"{value:.3g}" + (f" at step {step}" if step is not None else "")


def _step_or_none(step: int | None) -> str:
    return "none" if step is None else str(step)
