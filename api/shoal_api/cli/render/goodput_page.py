"""The page of `shoal goodput`: how a job's worker-seconds were spent. Pure."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from shoal_api.cli.render.bars import Part, bar
from shoal_api.cli.render.tables import STATE_STYLE, clock, new_table
from shoal_service.core.goodput import Category, Goodput, account, resume, show
from shoal_service.core.quantities import duration_text
from shoal_service.views import JobView
from shoal_workers.contract.job import JobState

_WIDTH = 60
_LOOK = {
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


def goodput_page(job: JobView, now: float) -> list[Any]:
    goodput = _with_the_queue(job, now)
    head = Text.assemble((job.name, "bold"), f"  {job.id}  ", (job.status.state, STATE_STYLE[job.status.state]))
    if goodput is None or goodput.total <= 0:
        return [head, Text("no worker-second is booked yet", style="dim")]
    parts = [Part(c, goodput.seconds.get(c, 0.0), style) for c, (style, _) in _LOOK.items()]
    lines = [head, _summary(goodput), bar(parts, _WIDTH), _table(goodput)]
    if goodput.at is not None and not job.status.state.ended:
        lines.append(Text(f"booked up to {clock(goodput.at)}", style="dim"))
    return lines


def _with_the_queue(job: JobView, now: float) -> Goodput | None:
    """The goodput with the current time in the queue, which the service books only when the job leaves the queue."""
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


def _table(goodput: Goodput) -> Any:
    table = new_table("", "category", ">worker time", ">share", "")
    for category, (style, meaning) in _LOOK.items():
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
