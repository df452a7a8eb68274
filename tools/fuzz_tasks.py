"""Draws tasks, or loops, and trains each in many ways: `make fuzz-tasks N=500 SEED=1`, `make fuzz-loops`. See
tests/kit/fuzz.

    python tools/fuzz_tasks.py --num 500 --seed 1 --out build/fuzz-tasks.jsonl     it goes on there
    python tools/fuzz_tasks.py --shrink 17                                         the smallest that fails so
    python tools/fuzz_tasks.py --table build/fuzz-tasks.jsonl                      only the counts
    python tools/fuzz_tasks.py --loops --num 200 --out build/fuzz-loops.jsonl      loops of a program's own

The exit status is 0 if every task was equal or refused in one sentence before its first step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
_TAIL_CHARS = 1500
sys.path.insert(0, str(TESTS))

from kit.fuzz.draw import Description, draw, simpler  # noqa: E402
from kit.fuzz.kinds import OPTIMIZERS, PIECES, SPELLINGS  # noqa: E402
from kit.fuzz.loops import LoopDescription, draw_loop, simpler_loops  # noqa: E402


def main() -> int:
    arguments = _arguments()
    if arguments.table:
        return _report(arguments.table, None)
    if arguments.shrink is not None:
        return _shrink(arguments)
    if arguments.part:
        _run_part(arguments)
        return 0
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, *sys.argv[1:]]
    parts = [subprocess.Popen([*command, "--part", f"{n}/{arguments.jobs}"]) for n in range(arguments.jobs)]
    try:
        for part in parts:
            part.wait()
    finally:
        for part in parts:
            part.terminate()
    return _report(arguments.out, range(arguments.seed, arguments.seed + arguments.num))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--num", type=int, default=500, help="number of tasks")
    parser.add_argument("--seed", type=int, default=1, help="of the first task; the others follow")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "fuzz-tasks.jsonl", help="a line for each task")
    parser.add_argument("--jobs", type=int, default=2, help="tasks that are tried side by side")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds after which a group counts as hung")
    parser.add_argument("--kinds", default=",".join(PIECES), help="of pieces to draw")
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS), help="to draw")
    parser.add_argument("--plans", type=float, default=0.3, help="fraction of the tasks that have a plan")
    parser.add_argument("--spelled", type=float, default=0.4, help="fraction of the others with sizes and spellings")
    parser.add_argument("--spellings", default=",".join(SPELLINGS), help="of things that are written or reached")
    parser.add_argument("--loops", action="store_true", help="loops instead of tasks")
    parser.add_argument("--shrink", type=int, help="seed of a task that fails")
    parser.add_argument("--table", type=Path, help="a file of results")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    return parser.parse_args()


def _drawn(arguments: argparse.Namespace, seed: int) -> Description | LoopDescription:
    if arguments.loops:
        return draw_loop(seed)
    texts = (arguments.kinds, arguments.optimizers, arguments.spellings)
    kinds, optimizers, spellings = ([name for name in text.split(",") if name] for text in texts)
    return draw(
        seed,
        kinds=kinds,
        optimizers=optimizers,
        plans=arguments.plans,
        spelled=arguments.spelled,
        spellings=spellings,
    )


def _run_part(arguments: argparse.Namespace) -> None:
    """Runs every n-th seed that is not in the file yet."""
    number, _, count = arguments.part.partition("/")
    done = {line["seed"] for line in _lines(arguments.out)}
    with _Trials(arguments.limit) as trials, arguments.out.open("a") as out:
        for seed in range(arguments.seed, arguments.seed + arguments.num):
            if seed % int(count) != int(number) or seed in done:
                continue
            found = trials.outcome(_drawn(arguments, seed))
            out.write(json.dumps(found) + "\n")
            out.flush()
            print(f"{seed}: {_line(found)}", flush=True)


def _shrink(arguments: argparse.Namespace) -> int:
    from kit.fuzz.outcome import Outcome
    from kit.fuzz.shrink import shrunk

    with _Trials(arguments.limit) as trials:

        def try_it(candidate: Description | LoopDescription) -> Outcome:
            found = trials.outcome(candidate)
            return Outcome(**{name: value for name, value in found.items() if name != "description"})

        description = _drawn(arguments, arguments.shrink)
        first = try_it(description)
        print(_line(first.to_json()), flush=True)
        if first.is_good:
            return 0
        plainer = simpler_loops if arguments.loops else simpler
        small, outcome = shrunk(description, first, try_it, lambda text: print(text, flush=True), plainer)
    print(json.dumps(small.to_json()))
    print(f"{outcome.outcome} in {outcome.run}: {', '.join(small.features)}\n{outcome.detail}")
    return 1


class _Trials:
    """One preloaded process and all that is forked from it."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s

    def __enter__(self) -> _Trials:
        os.environ.update({"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"})
        self._directory = tempfile.TemporaryDirectory()
        self._errors = tempfile.TemporaryFile()
        self._screen = os.dup(2)
        os.dup2(self._errors.fileno(), 2)  # of the workers: shown only if one dies
        self._start()
        return self

    def _start(self) -> None:
        from kit.processes.fleet import Fleet

        self._fleet = Fleet(Path(tempfile.mkdtemp(dir=self._directory.name)))

    def __exit__(self, *_: object) -> None:
        self._fleet.close()
        os.dup2(self._screen, 2)
        self._directory.cleanup()

    def outcome(self, description: Description | LoopDescription) -> dict[str, Any]:
        from kit.fuzz.lives import Limits
        from kit.fuzz.outcome import outcome_of

        self._errors.seek(0)
        self._errors.truncate()
        if not self._fleet.can_start:  # somebody has killed it
            self._start()
        try:
            found = outcome_of(self._fleet, description, Limits(run_s=self._limit_s))
        except OSError:  # of the process that forks: it ends, or has ended
            self._start()
            found = outcome_of(self._fleet, description, Limits(run_s=self._limit_s))
        document = {**found.to_json(), "description": description.to_json()}
        if found.outcome in ("died", "hang", "collective_failed"):
            self._errors.seek(0)
            document["detail"] += "\n" + self._errors.read().decode(errors="replace")[-_TAIL_CHARS:]
        return {name: value for name, value in document.items() if name != "description" or not found.is_good} | {
            "features": list(found.features)
        }


def _line(found: dict[str, Any]) -> str:
    words = f"{found['outcome']} {found['kind']}".strip()
    where = (
        ""
        if found["outcome"] == "equal"
        else f" [{found['run']}] {found['detail'].splitlines()[0] if found['detail'] else ''}"
    )
    return f"{words}{where[:300]} ({found['seconds']:.0f} s; {', '.join(found['features'])})"


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        for line in path.read_text().splitlines():
            yield json.loads(line)


def _report(path: Path, seeds: range | None) -> int:
    """Prints the counts, and returns the exit status."""
    found = [line for line in _lines(path) if seeds is None or line["seed"] in seeds]
    outcomes = Counter(line["outcome"] for line in found)
    print(f"\n{len(found)} drawn: " + ", ".join(f"{count} {name}" for name, count in outcomes.most_common()))
    kinds = Counter(f"{line['kind']} [{line['run'].split(' ')[0]}]" for line in found if line["outcome"] == "refused")
    for kind, count in kinds.most_common():
        print(f"  refused {count:4d}  {kind}")
    features = sorted({feature for line in found for feature in line["features"]})
    print("  feature: tasks, equal, refused, faults")
    for feature in features:
        own = [line["outcome"] for line in found if feature in line["features"]]
        counts = [len(own), own.count("equal"), own.count("refused")]
        print(f"  {feature:28s} " + " ".join(f"{n:4d}" for n in (*counts, len(own) - counts[1] - counts[2])))
    bad = [line for line in found if line["outcome"] not in ("equal", "refused")]
    for line in bad:
        print(f"{line['seed']}: {_line(line)}")
    return 1 if bad or not found else 0


if __name__ == "__main__":
    sys.exit(main())
