"""The pages of `shoal profile-job` and `shoal profiles`: where the time of a step goes. Pure, as `tables`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from shoal_api.cli.render.bars import Part, bar
from shoal_api.cli.render.tables import clock, new_table
from shoal_service.core.quantities import count_text, duration_text, size_text
from shoal_service.views import ProfileState, ProfileView
from shoal_workers.contract.profiles import Category

_WIDTH = 60
_LOOK = {
    Category.COMPUTE: ("green", "forward and backward passes"),
    Category.COMMUNICATION: ("red", "waiting for other ranks, not hidden by computing"),
    Category.DATA: ("yellow", "making batches"),
    Category.OPTIMIZER: ("blue", "clipping, update and report of the step"),
    Category.SNAPSHOT: ("cyan", "copying the state in memory"),
    Category.CHECKPOINT: ("magenta", "staging a durable checkpoint"),
    Category.VALIDATION: ("white", "validation between the steps"),
    Category.OTHER: ("dim", "none of the above"),
}
_ALWAYS = frozenset(list(_LOOK)[:5])
_STATE_STYLE = {ProfileState.REQUESTED: "cyan", ProfileState.DONE: "green", ProfileState.FAILED: "red"}


def profile_page(view: ProfileView) -> list[Any]:
    """One line about the profile, then the table of its steps, then its files."""
    head = Text.assemble((f"profile {view.number}", "bold"), f"  rank {view.rank}  ", _state(view))
    if view.state is not ProfileState.DONE or not view.times:
        return [head, Text(view.reason or "it has not ended yet", style="dim")]
    steps = [str(one.step) for one in view.times]
    taken = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    lines = [head, Text(f"{taken}, {duration_text(view.step_s)} each, generation {view.generation}")]
    lines.append(bar([Part(c, view.mean_s(c), style) for c, (style, _) in _LOOK.items()], _WIDTH))
    page: list[Any] = [*lines, _table(view)]
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
        shares = [f"{view.mean_s(c) / view.step_s:.0%}" if known and view.step_s else "-" for c in list(_LOOK)[:2]]
        length = f"{view.step_s:.3g}" if known else "-"
        after = (str(view.rank), steps, length, *shares, clock(view.requested_at), view.reason or view.note)
        table.add_row(str(view.number), _state(view), *after)
    return table


def _state(view: ProfileView) -> Text:
    return Text(view.state, style=_STATE_STYLE[view.state])


def _table(view: ProfileView) -> Table:
    table = new_table("", "category", ">mean", ">share", *(f">step {one.step}" for one in view.times[:6]), "what it is")
    for category, (style, words) in _LOOK.items():
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
