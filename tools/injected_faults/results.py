"""The file of results: a JSON line for each fault that was tried, and the table that the page shows.

A fault that no test catches has a sentence in `equivalent.toml` why it changes nothing, or gets a test. It is then
tried again, and its line says that the test was written for it.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from injected_faults.changes import Fault
from injected_faults.sources import ROOMS
from injected_faults.trials import How, Judgement

EQUIVALENT = Path(__file__).with_name("equivalent.toml")


@dataclass(frozen=True, kw_only=True)
class Result:
    """One fault, and what the tests said."""

    seed: int
    room: str
    key: str
    path: str
    line: int
    kind: str
    before: str
    after: str
    num_tests: int
    """Tests of the first tier that reach it."""
    caught: str
    how: str
    test: str
    seconds: float
    has_escaped: bool = False
    """An earlier trial ended without a catch: the test that catches it was written for it."""


def make_result(
    fault: Fault, source: str, *, seed: int, room: str, num_tests: int, judgement: Judgement, has_escaped: bool
) -> Result:
    before, after = fault.describe(source)
    run = judgement.run
    return Result(
        seed=seed,
        room=room,
        key=fault.key,
        path=fault.path,
        line=fault.line,
        kind=fault.kind,
        before=before,
        after=after,
        num_tests=num_tests,
        caught=judgement.caught,
        how=run.how,
        test=run.test,
        seconds=run.seconds,
        has_escaped=has_escaped,
    )


def read_results(path: Path) -> list[Result]:
    """The last line of each fault, in the order in which they were first tried."""
    results: dict[tuple[int, str], Result] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            result = Result(**json.loads(line))
            results[result.seed, result.key] = result
    return list(results.values())


def append_result(path: Path, result: Result) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(asdict(result)) + "\n")


def read_equivalent() -> dict[tuple[str, str, str], str]:
    """Module, line before, line after -> why the change has no effect."""
    entries = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8")).get("equivalent", [])
    return {(entry["path"], entry["before"], entry["after"]): entry["why"] for entry in entries}


def format_tables(results: Sequence[Result]) -> str:
    """The counts by room, and a line for each fault."""
    return f"{_format_counts(results)}\n\n{_format_faults(results)}"


def _format_counts(results: Sequence[Result]) -> str:
    rows = [_count(room, [result for result in results if result.room == room]) for room in ROOMS]
    head = ["room", "drawn", "caught by the first tier", "by the second only", "by none: changes nothing"]
    head += ["by none: a test was added, which catches it", "by none", "undecided"]
    return _table(head, [*rows, _count("all", results)])


def _count(name: str, results: Sequence[Result]) -> list[str]:
    equivalent = read_equivalent()
    columns = dict.fromkeys(("first", "second", "equivalent", "added", "none", "undecided"), 0)
    for result in results:
        is_equivalent = result.caught == "none" and _identity(result) in equivalent
        columns["added" if result.has_escaped and result.caught == "first" else result.caught] += not is_equivalent
        columns["equivalent"] += is_equivalent
    return [name, str(len(results)), *map(str, columns.values())]


def _format_faults(results: Sequence[Result]) -> str:
    equivalent = read_equivalent()
    rows = [
        [f"{result.path}:{result.line}", result.kind, _code(result.before), _code(result.after), reason]
        for result in sorted(results, key=lambda result: (ROOMS.index(result.room), result.path, result.line))
        for reason in [_describe_catch(result, equivalent.get(_identity(result), ""))]
    ]
    return _table(["place", "what", "before", "after", "caught by"], rows)


def _describe_catch(result: Result, why: str) -> str:
    if result.caught == "none":
        return f"none, changes nothing: {why}" if why else "**none**"
    if result.caught == "undecided":
        return f"undecided after {result.seconds:.0f} s"
    tier = {"first": "", "second": "second tier: "}[result.caught]
    note = " (added for it)" if result.has_escaped else ""
    how = {How.HUNG: " hangs", How.CRASHED: " ends its process"}.get(How(result.how), "")
    name = f"`{result.test.removeprefix('tests/')}`" if result.test else "import of the module"
    return f"{tier}{name}{how}{note}, {result.seconds:.0f} s"


def _identity(result: Result) -> tuple[str, str, str]:
    return result.path, result.before, result.after


def _code(text: str) -> str:
    return f"`{text.replace('|', chr(92) + '|')}`"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)
