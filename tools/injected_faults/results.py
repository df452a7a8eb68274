"""The file of results: a JSON line for each fault that was tried, and the table that the page shows.

A fault that no test catches has a sentence in `escaped.toml` why it changes nothing, or gets a test, which is named
there too. The fault is then tried again.
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

ESCAPED = Path(__file__).with_name("escaped.toml")


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


def make_result(fault: Fault, source: str, *, seed: int, room: str, num_tests: int, judgement: Judgement) -> Result:
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
    entries = tomllib.loads(ESCAPED.read_text(encoding="utf-8"))["equivalent"]
    return {(entry["path"], entry["before"], entry["after"]): entry["why"] for entry in entries}


def read_added_tests() -> list[str]:
    """The tests that were written for a fault that had escaped, without their parameters."""
    return list(tomllib.loads(ESCAPED.read_text(encoding="utf-8"))["added"])


def format_tables(results: Sequence[Result]) -> str:
    """The counts by room, and a line for each fault."""
    return f"{_format_counts(results)}\n\n{_format_faults(results)}"


def _format_counts(results: Sequence[Result]) -> str:
    rows = [_count(room, [result for result in results if result.room == room]) for room in ROOMS]
    head = ["room", "drawn", "caught by the first tier", "by the second only", "by none: changes nothing"]
    head += ["by none: a test was added, which catches it", "by none", "undecided"]
    return _table(head, [*rows, _count("all", results)])


def _count(name: str, results: Sequence[Result]) -> list[str]:
    kinds = ("first", "second", "equivalent", "added", "none", "undecided")
    columns = [_classify(result) for result in results]
    return [name, str(len(results)), *(str(columns.count(kind)) for kind in kinds)]


def _classify(result: Result) -> str:
    if result.caught == "none" and _identity(result) in read_equivalent():
        return "equivalent"
    is_added = result.caught == "first" and result.test.split("[")[0] in read_added_tests()
    return "added" if is_added else result.caught


def _format_faults(results: Sequence[Result]) -> str:
    rows = [
        [
            f"{result.path}:{result.line}",
            result.kind,
            _code(result.before),
            _code(result.after),
            _describe_catch(result),
        ]
        for result in sorted(results, key=lambda result: (ROOMS.index(result.room), result.path, result.line))
    ]
    return _table(["place", "what", "before", "after", "caught by"], rows)


def _describe_catch(result: Result) -> str:
    match _classify(result):
        case "equivalent":
            return f"none, changes nothing: {read_equivalent()[_identity(result)]}"
        case "none":
            return "**none**"
        case "undecided":
            return f"undecided after {result.seconds:.0f} s"
        case caught:
            tier = {"second": "second tier: ", "added": "added for it: "}.get(caught, "")
            how = {How.HUNG: " hangs", How.CRASHED: " ends its process"}.get(How(result.how), "")
            name = f"`{result.test.removeprefix('tests/')}`" if result.test else "import of the module"
            return f"{tier}{name}{how}, {result.seconds:.0f} s"


def _identity(result: Result) -> tuple[str, str, str]:
    return result.path, result.before, result.after


def _code(text: str) -> str:
    return f"`{text.replace('|', chr(92) + '|')}`"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)
