"""The parts that every page is made of: tables, numbers and times as text, curves and bars of block characters. Pure.

`new_table` hides how a table fits into a narrow terminal: values that do not fit into a row stand below it.
"""

from __future__ import annotations

import datetime
import itertools
import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shoal_workers.contract import JobState, ProgramFile, ScriptSpec

STATE_STYLE = {
    JobState.QUEUED: "dim",
    JobState.STARTING: "cyan",
    JobState.RUNNING: "bold green",
    JobState.RECOVERING: "bold yellow",
    JobState.RESIZING: "yellow",
    JobState.WAITING: "yellow",
    JobState.PAUSING: "dim",
    JobState.PAUSED: "dim",
    JobState.CANCELLING: "dim",
    JobState.SUCCEEDED: "green",
    JobState.FAILED: "bold red",
    JobState.CANCELLED: "red",
}
_GAP = 2
_MIN_SENTENCE_COLUMNS = 40
"""Columns that a sentence at the end of a row needs to be readable."""
_MAX_VALUE_COLUMNS = 40
"""Columns of a value that is not the last one; a longer one is folded."""
_BLOCKS = "▁▂▃▄▅▆▇█"
_BLOCK = "█"


def format_number(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


NOT_REPORTED = "not reported"
"""What a script has not reported."""


def format_steps(step: int, total_steps: int | None) -> str:
    """Return `120/400`, for a narrow column. "-": no step is known, as of a script that reports none."""
    return f"{step}/{total_steps}" if total_steps else str(step) if step else "-"


def command_text(program: ProgramFile) -> str:
    """Return the command of a program as it is typed: `train.py --lr 3e-4, as by torchrun`."""
    what = ["-m", program.module] if program.module is not None else [str(program.file)]
    how = f"as by {program.launcher}" if isinstance(program, ScriptSpec) else "in place"
    return f"{shlex.join([*what, *program.args])}, {how}"


def format_time(at: float) -> str:
    """Return the local time, with the date if it is not today."""
    moment = datetime.datetime.fromtimestamp(at)
    today = datetime.datetime.now().date()
    return moment.strftime("%H:%M:%S" if moment.date() == today else "%Y-%m-%d %H:%M:%S")


class Listing(Table):
    """A table that is readable at any width. What does not fit beside the first columns stands under its row, as names
    and values; so no id is broken and no sentence is squeezed."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = [max(_width(cell) for cell in (str(column.header), *column.cells)) for column in self.columns]
        *first, last = [min(width, _MAX_VALUE_COLUMNS) for width in widths[:-1]] + widths[-1:]
        if sum(first) + _GAP * len(first) + min(last, _MIN_SENTENCE_COLUMNS) <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        beside = first[:1]
        while len(beside) < len(first) and sum(beside) + first[len(beside)] + _GAP * len(beside) <= options.max_width:
            beside.append(first[len(beside)])
        yield self._line(beside, [Text(str(column.header), style="bold") for column in self.columns])
        for index, row in enumerate(self.rows):
            cells = [_text(next(iter(list(column.cells)[index : index + 1]), "")) for column in self.columns]
            yield self._line(beside, cells)
            rest = zip(self.columns[len(beside) :], cells[len(beside) :], strict=True)
            others = [_named(str(column.header), cell) for column, cell in rest if cell.plain not in ("", "-")]
            if others:
                yield Padding(Text(", ", style=row.style or "").join(others), (0, 0, 0, 2 * _GAP))

    def _line(self, widths: Sequence[int], cells: Sequence[Text]) -> Table:
        line = Table.grid(padding=(0, _GAP, 0, 0))
        for column, width in zip(self.columns, widths, strict=False):
            line.add_column(justify=column.justify, width=width, overflow="fold")
        line.add_row(*cells[: len(widths)])
        return line


def _text(cell: Any) -> Text:
    return cell if isinstance(cell, Text) else Text(str(cell))


def _width(cell: Any) -> int:
    return max((cell_len(line) for line in _text(cell).plain.splitlines()), default=0)


def _named(name: str, cell: Text) -> Text:
    value = Text(" ").join(cell.split("\n"))
    return Text.assemble((f"{name} " if name else "", "dim"), value)


def make_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str = "") -> Listing | Text:
    """Make a table of rows whose cells are texts or numbers; `empty` is shown if there are no rows."""
    table = new_table(*columns)
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else str(cell) for cell in row))
    return table if table.row_count or not empty else Text(empty, style="dim")


def make_facts_grid(*sections: Iterable[tuple[str, str | Text]]) -> Table:
    """Make two columns, names and facts, with an empty line between sections; a fact that is empty has no row."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    for section in sections:
        rows = [(name, _text(fact)) for name, fact in section if str(fact)]
        if rows and grid.row_count:
            grid.add_row()
        for name, fact in rows:
            grid.add_row(name, fact)
    return grid


def new_table(*columns: str) -> Listing:
    """Make a table without rows. Columns whose name starts with ">" are aligned to the right."""
    table = Listing(box=None, padding=(0, _GAP, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left", overflow="fold")
    return table


def draw_sparkline(values: Sequence[float], width: int) -> str:
    """Return at most `width` characters, oldest value first; each is the mean of its share of the values.

    Values that are not finite are left out; otherwise one NaN would flatten the whole line.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite or width < 1:
        return ""
    scale = max(map(abs, finite)) or 1.0  # without it, sums and differences of the largest floats would be infinite
    columns = compute_bucket_means([value / scale for value in finite], width)
    low, high = min(columns), max(columns)
    if high == low:
        return _BLOCKS[0] * len(columns)
    return "".join(_BLOCKS[round((value - low) / (high - low) * (len(_BLOCKS) - 1))] for value in columns)


def compute_bucket_means(values: Sequence[float], num_buckets: int) -> list[float]:
    """Return the means of `num_buckets` contiguous, nearly equal shares of the values; fewer when there are fewer
    values."""
    count = min(num_buckets, len(values))
    edges = [index * len(values) // count for index in range(count + 1)] if count else []
    return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]


def draw_worker_bar(workers: int, desired: int) -> str:
    """Return the world size as a bar: one filled square per worker that trains, one hollow square per missing
    worker."""
    shown = max(workers, desired)
    if shown > 16:
        return f"{workers}/{shown}"
    return f"{'■' * workers}{'□' * (shown - workers)} {workers}/{shown}"


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    amount: float
    style: str


def draw_bar(parts: Sequence[Part], width: int) -> Text:
    """Return a line of `width` blocks; empty if all parts are zero. If `width` allows, each part above zero has a
    block."""
    line = Text()
    for part, blocks in zip(parts, split_width([part.amount for part in parts], width), strict=True):
        line.append(_BLOCK * blocks, style=part.style)
    return line


def split_width(amounts: Sequence[float], width: int) -> list[int]:
    """Split `width` in proportion to the amounts, by the largest-remainder method."""
    total = sum(amounts)
    if total <= 0:
        return [0] * len(amounts)
    visible = sum(1 for amount in amounts if amount > 0)
    least = 1 if visible <= width else 0
    spare = width - least * visible
    exact = [spare * amount / total for amount in amounts]
    blocks = [int(share) + (least if amount > 0 else 0) for share, amount in zip(exact, amounts, strict=True)]
    by_remainder = sorted(range(len(amounts)), key=lambda i: exact[i] - int(exact[i]), reverse=True)
    for index in by_remainder[: width - sum(blocks)]:
        blocks[index] += 1
    return blocks
