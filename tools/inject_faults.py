"""Draws small faults over the product and says which tests catch each: `make faults N=40 SEED=1`.

    python tools/inject_faults.py --map [PATH ...]        which tests reach which statement; the first tier, or these
    python tools/inject_faults.py --num 40 --seed 1       tries the faults; results in build/faults.jsonl
    python tools/inject_faults.py --num 40 --again        tries those again that no test has caught
    python tools/inject_faults.py --num 40 --list         only shows the faults to be tried

Both can be interrupted, and go on where they were. A fault is a comparison turned, a bound moved by one, a statement
dropped, two arguments swapped, a boolean operator turned, or a constant changed, at one place inside a function of the
rooms in `injected_faults.sources`, each room as often as the others. Only statements are changed that a test of the map
reaches; how the map is made, and why not by coverage.py, says `injected_faults.reach`. The map holds for the sources
that it was made from, and is kept in build/faults/. Faults are tried in a copy of the tree, never in the tree.

The exit status is 0 if a test caught every fault, or a sentence in `escaped.toml` says why it changes nothing.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator
from functools import reduce
from itertools import zip_longest
from operator import or_
from pathlib import Path

from injected_faults.changes import Fault, draw_faults
from injected_faults.reach import PIECES, ReachingTest, make_map, map_path, number_statements, read_map
from injected_faults.results import Result, append_result, make_result, read_equivalent, read_results
from injected_faults.sources import ROOMS, ROOT
from injected_faults.trials import Trials

_FIRST_TIER = "not (slow or matrix or soak)"
_ESCAPED = ("none", "undecided")


def main() -> int:
    arguments = _arguments()
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell lets what it starts in the background ignore SIGINT
        signal.signal(number, signal.default_int_handler)
    if arguments.map is not None:
        make_map(arguments.map or PIECES, _FIRST_TIER)
        return 0
    tests = [test for test in read_map() if test.is_first_tier]
    if not tests:
        print(f"{map_path()} is missing: make it with `python tools/inject_faults.py --map`")
        return 2
    done = [result for result in read_results(arguments.out) if result.seed == arguments.seed]
    faults = list(_draw(arguments, tests, done))
    if arguments.list:
        for _, fault, reaching in faults:
            before, after = fault.describe((ROOT / fault.path).read_text(encoding="utf-8"))
            print(f"{fault.path}:{fault.line} {fault.kind}, {len(reaching)} tests\n    {before}\n    {after}")
        return 0
    with Trials(arguments.limit) as trials:
        for room, fault, reaching in faults:
            print(
                f"{time.strftime('%H:%M:%S')} {fault.path}:{fault.line} {fault.kind}, {len(reaching)} tests", flush=True
            )
            result = make_result(
                fault,
                (ROOT / fault.path).read_text(encoding="utf-8"),
                seed=arguments.seed,
                room=room,
                num_tests=len(reaching),
                judgement=trials.judge(fault, reaching),
            )
            append_result(arguments.out, result)
            print(
                f"    {result.before}\n    {result.after}\n    {result.caught} {result.how} {result.test}", flush=True
            )
    return _report([result for result in read_results(arguments.out) if result.seed == arguments.seed])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--num", type=int, default=40, help="number of faults")
    parser.add_argument("--seed", type=int, default=1, help="of the draw")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "faults.jsonl", help="a line for each fault")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for the tests of one tier")
    parser.add_argument("--again", action="store_true", help="try the faults again that no test has caught")
    parser.add_argument("--list", action="store_true", help="show the faults to be tried")
    parser.add_argument("--map", nargs="*", metavar="PATH", help="add the tests of these paths to the map")
    return parser.parse_args()


def _draw(
    arguments: argparse.Namespace, tests: list[ReachingTest], done: list[Result]
) -> Iterator[tuple[str, Fault, list[ReachingTest]]]:
    """The faults that are still to be tried, by turns of the rooms, each with its room and the tests that reach it.

    Faults in the file count, whatever the map was when they were drawn.
    """
    numbers, equivalent = number_statements(), read_equivalent()
    any_test = reduce(or_, (test.statements for test in tests))

    def bit(fault: Fault) -> int:
        return numbers[fault.path] + fault.statement

    def draw_in_room(room: str, num_faults: int) -> Iterator[tuple[str, Fault, list[ReachingTest]]]:
        in_room = {result.key: result for result in done if result.room == room}
        again = {key for key, result in in_room.items() if arguments.again and _has_escaped(result, equivalent)}
        num_new = num_faults - len(in_room)
        for fault in draw_faults(room, arguments.seed, lambda fault: any_test >> bit(fault) & 1 == 1):
            if num_new <= 0 and not again:
                return
            is_new = fault.key not in in_room and num_new > 0
            if is_new or fault.key in again:
                num_new -= is_new
                again.discard(fault.key)
                yield room, fault, [test for test in tests if test.statements >> bit(fault) & 1]

    share, rest = divmod(arguments.num, len(ROOMS))
    rooms = [draw_in_room(room, share + (number < rest)) for number, room in enumerate(ROOMS)]
    for turn in zip_longest(*rooms):
        yield from filter(None, turn)


def _report(results: list[Result]) -> int:
    """Prints the counts, and returns the exit status."""
    print(", ".join(f"{count} {name}" for name, count in Counter(result.caught for result in results).items()))
    equivalent = read_equivalent()
    escaped = [result for result in results if _has_escaped(result, equivalent)]
    for result in escaped:
        print(f"{result.caught}: {result.path}:{result.line} {result.kind}\n    {result.before}\n    {result.after}")
    return 1 if escaped else 0


def _has_escaped(result: Result, equivalent: Collection[tuple[str, str, str]]) -> bool:
    return result.caught in _ESCAPED and (result.path, result.before, result.after) not in equivalent


if __name__ == "__main__":
    sys.exit(main())
