"""The pages of `shoal incidents`: a table of all incidents, or one incident with the duration of its phases. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from shoal_api.cli.render.bars import Part, bar
from shoal_api.cli.render.live.stacks_page import stacks_page
from shoal_api.cli.render.tables import clock, new_table
from shoal_service.core.quantities import duration_text, size_text
from shoal_service.views import IncidentView

_WIDTH = 60
_PHASES = (
    ("detect", "yellow", "until the failure was noticed"),
    ("quiesce", "red", "until every survivor had left its collective"),
    ("plan", "magenta", "choice of workers, layout and source of the state"),
    ("form", "blue", "new process groups"),
    ("restore", "cyan", "model and state"),
    ("first_step", "green", "the first step of the new group"),
)


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
