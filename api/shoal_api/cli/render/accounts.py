"""Where the time of a job went, as pages for a terminal: goodput, incidents by phase, profiled steps, stacks of ranks;
and how its losses differ from another job's. Called by `shoal goodput`, `incidents`, `profiles`, `stacks` and `parity`.

Pure: every function takes views and returns objects that rich prints.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from shoal_api.cli.render.terminal import STATE_STYLE, Part, bar, clock, new_table, sparkline
from shoal_service.core.downsampling import SeriesPoint
from shoal_service.core.goodput import Category, Goodput, account, resume, show
from shoal_service.core.quantities import count_text, duration_text, size_text
from shoal_service.views import IncidentView, JobView, ParityView, ProfileState, ProfileView
from shoal_workers.contract.job import JobState
from shoal_workers.contract.messages import StackCluster, Stacks
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


def goodput_page(job: JobView, now: float) -> list[Any]:
    goodput = _with_the_queue(job, now)
    head = Text.assemble((job.name, "bold"), f"  {job.id}  ", (job.status.state, STATE_STYLE[job.status.state]))
    if goodput is None or goodput.total <= 0:
        return [head, Text("no worker-second is booked yet", style="dim")]
    parts = [Part(c, goodput.seconds.get(c, 0.0), style) for c, (style, _) in _WORKER_TIME.items()]
    lines = [head, _summary(goodput), bar(parts, _WIDTH), _goodput_table(goodput)]
    if goodput.at is not None and not job.status.state.ended:
        lines.append(Text(f"booked up to {clock(goodput.at)}", style="dim"))
    return lines


def _with_the_queue(job: JobView, now: float) -> Goodput | None:
    """Return the goodput with the current time in the queue, which the service books only when the job leaves the
    queue."""
    goodput = job.status.goodput
    if goodput is None or job.status.state is not JobState.QUEUED:
        return goodput
    asked = job.spec.elasticity.max_workers
    return show(account(resume(goodput, at=now), Category.QUEUED, requested=asked, now=now))


def _summary(goodput: Goodput) -> Text:
    had = goodput.total - sum(goodput.seconds.get(c, 0.0) for c in (Category.DEGRADED, Category.QUEUED))
    productive = goodput.seconds.get(Category.PRODUCTIVE, 0.0)
    text = Text.assemble("goodput ", (_percent(productive, goodput.total), "bold"))
    text.append(f" of {duration_text(goodput.total)} of requested worker time", style="dim")
    if had > 0:
        text.append(f"; {_percent(productive, had)} of the worker time that it had", style="dim")
    return text


def _goodput_table(goodput: Goodput) -> Any:
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


def incidents_table(incidents: Sequence[IncidentView]) -> Table | Text:
    if not incidents:
        return Text("no incidents", style="dim")
    table = new_table(
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
    )
    for one in incidents:
        table.add_row(
            name_of(one),
            clock(one.at),
            Text(one.cause, style="red"),
            _ranks(one),
            _workers(one),
            one.action or "-",
            duration_text(one.detect_s),
            duration_text(one.recovery_s) if one.closed else Text("open", style="yellow"),
            "?" if one.steps_lost is None else str(one.steps_lost),
            one.state_source or "-",
            _moved(one),
            one.message,
        )
    return table


def incident_page(one: IncidentView) -> list[Any]:
    head = Text.assemble((f"incident {name_of(one)}", "bold"), "  ", (one.cause, "red"), f"  {one.message}")
    rows = (
        ("at", clock(one.at)),
        ("noticed by", one.witness),
        ("suspected", "" if one.suspect is None else one.suspect.words()),
        ("ranks", _ranks(one)),
        ("worker ids", ", ".join(one.worker_ids)),
        ("node", one.node_id),
        ("generation", str(one.generation)),
        ("workers", _workers(one)),
        ("layout", " -> ".join(part for part in (one.from_layout, one.to_layout) if part)),
        ("action", one.action),
        ("state from", one.state_source or ""),
        ("moved", "" if one.bytes_moved is None else size_text(one.bytes_moved)),
        ("steps lost", "" if one.steps_lost is None else str(one.steps_lost)),
        ("bound", "" if one.node_loss is None else one.node_loss.words()),
    )
    facts = Table.grid(padding=(0, 2))
    for label, value in rows:
        if value:
            facts.add_row(Text(label, style="dim"), value)
    stacks = [Text(""), *stacks_page(one.stacks)] if one.stacks is not None else []
    return [head, facts, *_timeline(one), *stacks]


def name_of(one: IncidentView) -> str:
    """`attempt.id`: incidents are numbered within an attempt."""
    return f"{one.attempt}.{one.id}"


def find(incidents: Sequence[IncidentView], name: str) -> list[IncidentView]:
    """The incidents that match `name`, which is `attempt.id` or an id."""
    return [one for one in incidents if name in (name_of(one), str(one.id))]


def _timeline(one: IncidentView) -> list[Any]:
    known = [(phase, getattr(one, f"{phase}_s"), style, words) for phase, style, words in _PHASES]
    parts = [Part(phase, spent_s, style) for phase, spent_s, style, _ in known if spent_s is not None]
    if not parts:
        return [Text("open: no phase is complete yet", style="yellow")]
    table = new_table("", "phase", ">took", "")
    for phase, spent_s, style, words in known:
        table.add_row(Text("█", style=style), phase.replace("_", " "), duration_text(spent_s), Text(words, style="dim"))
    whole = f"recovered {duration_text(one.recovery_s)} after detection" if one.closed else "still open"
    return [bar(parts, _WIDTH), table, Text(whole, style="green" if one.closed else "yellow")]


def _ranks(one: IncidentView) -> str:
    return ",".join(str(rank) for rank in one.ranks) or "-"


def _workers(one: IncidentView) -> str:
    return f"{one.from_workers} -> {'?' if one.to_workers is None else one.to_workers}"


def _moved(one: IncidentView) -> str:
    return "-" if one.bytes_moved is None else size_text(one.bytes_moved)


def stacks_page(stacks: Stacks) -> list[Any]:
    """Return one line that says where the ranks are, then each cluster with its frames, innermost first."""
    page: list[Any] = [Text(stacks.summary or "no worker is warm", style="bold")]
    page.append(Text(f"{clock(stacks.at)}, generation {stacks.generation}, {stacks.reason}", style="dim"))
    for one in stacks.clusters:
        page.extend((Text(""), _stack_head(one)))
        page.extend(Text(f"  {f.file}:{f.line}  {f.function}") for f in one.frames[:_MAX_FRAMES])
        if len(one.frames) > _MAX_FRAMES:
            page.append(Text(f"  ... {len(one.frames) - _MAX_FRAMES} more frames, see --json", style="dim"))
    return page


def _stack_head(one: StackCluster) -> Text:
    ranks = ", ".join(str(rank) for rank in one.ranks)
    who = f"rank {ranks}" if one.ranks else ", ".join(one.worker_ids)
    return Text.assemble((who, "bold cyan"), f"  {one.words}", (f"  ({one.source})", "dim"))


def profile_page(view: ProfileView) -> list[Any]:
    """Return one line about the profile, then the table of its steps, then its files."""
    head = Text.assemble((f"profile {view.number}", "bold"), f"  rank {view.rank}  ", _profile_state(view))
    if view.state is not ProfileState.DONE or not view.times:
        return [head, Text(view.reason or "it has not ended yet", style="dim")]
    steps = [str(one.step) for one in view.times]
    taken = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    lines = [head, Text(f"{taken}, {duration_text(view.step_s)} each, generation {view.generation}")]
    lines.append(bar([Part(c, view.mean_s(c), style) for c, (style, _) in _STEP_TIME.items()], _WIDTH))
    page: list[Any] = [*lines, _profile_table(view)]
    if view.peak_bytes is not None:
        page.append(Text(f"tensors took {size_text(view.peak_bytes)} at most (on a CPU: beyond those before)"))
    page.append(Text(f"training was held up for {duration_text(view.held_s)}", style="dim"))
    page.extend(Text(f"{file.name}  {size_text(file.bytes)}", style="cyan") for file in view.files)
    if view.note:
        page.append(Text(view.note, style="yellow"))
    return page


def profiles_table(views: Sequence[ProfileView]) -> Table | Text:
    if not views:
        return Text("no profiles; `shoal profile-job JOB` takes one", style="dim")
    names = (">number", "state", ">rank", "steps", ">s per step", ">compute", ">communication", "requested", "")
    table = new_table(*names)
    for view in views:
        known = bool(view.times)
        steps = f"{view.times[0].step} to {view.times[-1].step}" if known else count_text(view.steps, "step")
        shares = [f"{view.mean_s(c) / view.step_s:.0%}" if known and view.step_s else "-" for c in list(_STEP_TIME)[:2]]
        length = f"{view.step_s:.3g}" if known else "-"
        after = (str(view.rank), steps, length, *shares, clock(view.requested_at), view.reason or view.note)
        table.add_row(str(view.number), _profile_state(view), *after)
    return table


def _profile_state(view: ProfileView) -> Text:
    return Text(view.state, style=_PROFILE_STYLE[view.state])


def _profile_table(view: ProfileView) -> Table:
    table = new_table("", "category", ">mean", ">share", *(f">step {one.step}" for one in view.times[:6]), "what it is")
    for category, (style, words) in _STEP_TIME.items():
        mean_s = view.mean_s(category)
        if not mean_s and category not in _ALWAYS:
            continue
        table.add_row(
            Text("█", style=style),
            category.value,
            duration_text(mean_s),
            f"{mean_s / view.step_s:.1%}" if view.step_s else "-",
            *(duration_text(one.seconds.get(category, 0.0)) for one in view.times[:6]),
            Text(words, style="dim"),
        )
    return table


def parity_page(report: ParityView, series: Sequence[Sequence[SeriesPoint]]) -> list[Any]:
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
            f"NO PARITY: the jobs agree as far as both go, and {count_text(others, 'step')} only one has", "bold red"
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
    rows = (
        ("steps compared", ", ".join([str(report.steps_compared), *unmatched])),
        ("largest relative difference", _at(report.max_rel_diff, report.max_rel_diff_step)),
        ("largest absolute difference", _at(report.max_abs_diff, report.max_abs_diff_step)),
        ("first step that differs", _step_or_none(report.first_step_different)),
        ("first step over tolerance", _step_or_none(report.first_step_over_tolerance)),
    )
    grid = Table.grid(padding=(0, 2))
    for label, value in rows:
        grid.add_row(Text(label, style="dim"), value)
    return grid


def _picture(report: ParityView, series: Sequence[Sequence[SeriesPoint]]) -> Table:
    """Draw both loss curves, and below them the difference on a logarithmic scale."""
    grid = Table.grid(padding=(0, 2))
    for job_id, points in zip((report.job_id, report.against_id), series, strict=True):
        grid.add_row(Text(job_id, style="dim"), Text(sparkline([p.loss for p in points], _WIDTH), style="cyan"))
    magnitudes = [math.log10(max(min(point.rel_diff, 1.0), 1e-17)) for point in report.points]
    style = "green" if report.within_tolerance else "red"
    grid.add_row(Text("difference (log)", style="dim"), Text(sparkline(magnitudes, _WIDTH), style=style))
    return grid


def _differences(report: ParityView) -> Table:
    table = new_table("key", report.job_id, report.against_id)
    for one in report.differs_in:
        table.add_row(one.path, json.dumps(one.value), json.dumps(one.against))
    return table


def _at(value: float | None, step: int | None) -> str:
    return "-" if value is None else f"{value:.3g}" + (f" at step {step}" if step is not None else "")


def _step_or_none(step: int | None) -> str:
    return "none" if step is None else str(step)
