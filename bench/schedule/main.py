"""The scheduler's policy against others on job traces: `make bench-schedule`.

    python bench/schedule/main.py [--parts yardstick,costs,restart,variants,generated,speed] [--traces FOLDER]
                                  [--seeds test|choice] [--out PAGE.md]

    yardstick  the peers at 1 s a move against what another simulator found for the same traces
    costs      all policies at the costs measured on Shoal: mean JCT, and every metric
    restart    the peers at the restart costs of the traces (15 to 250 s)
    variants   the same with projects and quotas, with priorities, and on spot capacity
    generated  all policies on 48 generated markets, and on the shipped example. `--seeds choice` plays other markets:
               the policy is chosen with those and the traces, and judged by these
    speed      time of one decision at 10,000 jobs and 1,000 nodes

Prints Markdown; --out also writes it, as docs/measured/schedule.md. Takes about two minutes. The traces are read from
../shared/traces if that folder is there; otherwise the repository's own small trace stands for them. The exit status is
0 if the service's policy reaches every target.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

# Started as a script from any directory: the shared modules are found beside this folder.
sys.path.extend(str(Path(__file__).parents[2] / name) for name in ("bench", "tools"))

from choices import some_of
from measurements.machine import describe
from schedule import cases, speed, tables
from schedule.comparison import OURS, Compared, compare
from schedule.generated import CHOICE_SEEDS, TEST_SEEDS, generated
from schedule.targets import Target, example_targets, generated_targets, ratio, targets
from schedulers import POLICIES

_RULES = (
    "The peers know neither projects nor priorities, so these rules are put around them (see "
    "[simulation.md](../simulation.md#policies-to-compare-with)); a rigid job then waits until its project is due as "
    "many workers as it asks for. Weights 2, 1 and 1; two projects have a quarter of the cluster guaranteed each, the "
    "third is limited to half of it."
)
_PARTS = ("yardstick", "costs", "restart", "variants", "generated", "speed")
_SEEDS = {"test": TEST_SEEDS, "choice": CHOICE_SEEDS}


@dataclass(slots=True)
class _Bench:
    """What was measured so far."""

    folder: Path
    workers: dict[str, int]
    trials: int
    seeds: str
    lines: list[str] = field(default_factory=list)
    reached: dict[str, list[Target]] = field(default_factory=dict)
    same_costs: list[Compared] = field(default_factory=list)
    too_slow: bool = False

    @property
    def has_targets(self) -> bool:
        """The targets are for the published traces; the repository's small one crowds no cluster."""
        return cases.EXAMPLE not in self.workers

    def say(self, text: str) -> None:
        print(text, flush=True)
        self.lines.append(text)

    def plain(self, costs: cases.Costs) -> list[cases.Case]:
        return [cases.plain(self.folder, name, workers, costs) for name, workers in self.workers.items()]


def main() -> int:
    arguments = _arguments()
    folder, workers = cases.traces(arguments.traces)
    bench = _Bench(folder, workers, arguments.trials, arguments.seeds)
    bench.say(_head(bench, arguments.traces))
    parts: dict[str, Callable[[_Bench], None]] = {
        "yardstick": _yardstick,
        "costs": _costs,
        "restart": _restart,
        "variants": _variants,
        "generated": _generated,
        "speed": _speed,
    }
    for part in arguments.parts:
        parts[part](bench)
    if bench.reached:
        bench.say(f"\n## Targets\n\nOf the policy `{OURS}`, at the costs of Shoal.\n\n{tables.reached(bench.reached)}")
    if arguments.out is not None:
        arguments.out.write_text("\n".join(bench.lines) + "\n", encoding="utf-8")
    missed = [target for found in bench.reached.values() for target in found if not target.holds]
    return 1 if missed or bench.too_slow else 0


def _head(bench: _Bench, asked: Path) -> str:
    where = "the published traces of `shared/traces`" if bench.folder == asked else "the small trace of `examples`"
    clusters = ", ".join(f"{workers} workers for {name}" for name, workers in bench.workers.items())
    return (
        f"# Scheduling, measured\n\nMade by `make bench-schedule`, in virtual time, from {where}; {clusters}; "
        f"{cases.WORKERS_PER_NODE} workers a node. [simulation.md](../simulation.md) says what is simulated, what the "
        f"metrics mean, and who the peers are. Times are hours unless a unit is given."
    )


def _yardstick(bench: _Bench) -> None:
    known = [case for case in bench.plain(cases.ONE_SECOND) if case.trace in tables.YARDSTICK["max-min"]]
    if not known:
        bench.say(
            "\nThe folder of the published traces is not there, so there is no comparison with another simulator."
        )
        return
    compared = [compare(case, list(tables.YARDSTICK)) for case in known]
    bench.say(
        "\n## Against another simulator\n\n"
        "Mean JCT at 1 s a move or start: this simulator / another, independent one (difference).\n\n"
        + tables.yardstick(compared)
    )


def _costs(bench: _Bench) -> None:
    bench.same_costs = [compare(case) for case in bench.plain(cases.SHOAL)]
    costs = cases.SHOAL
    bench.say(
        f"\n## At the costs of Shoal\n\nMean JCT at {costs.switch_s:g} s a move and {costs.start_s:g} s a start.\n\n"
        + tables.means(bench.same_costs)
    )
    for one in bench.same_costs:
        bench.say(f"\n### {one.case.trace}\n\n{tables.details(one)}")
    if bench.has_targets:
        bench.reached |= {one.case.trace: targets(one, None) for one in bench.same_costs}


def _restart(bench: _Bench) -> None:
    restart = [compare(case) for case in bench.plain(cases.RESTART)]
    bench.say(
        "\n## At restart costs\n\nMean JCT if each start and each move costs what a restart of the application "
        "costs in the system from which the trace comes (column `restart_s`: 15 to 250 s).\n\n" + tables.means(restart)
    )
    if bench.has_targets and bench.same_costs:
        pairs = zip(bench.same_costs, restart, strict=True)
        bench.reached |= {one.case.trace: targets(one, other) for one, other in pairs}


def _variants(bench: _Bench) -> None:
    plain = bench.plain(cases.SHOAL)
    cells = "in each cell mean JCT; p99"
    variants = {
        f"{cases.PROJECTS}; {cells}; project fairness": [cases.with_projects(case) for case in plain],
        f"{cases.PRIORITIES}; {cells}; mean JCT of the urgent jobs; longest wait of one": [
            cases.with_priorities(case) for case in plain
        ],
    }
    if (bench.folder / "spot-p2.csv").exists():
        variants[f"{cases.SPOT}; {cells}"] = [cases.on_spot(case, bench.folder) for case in plain]
    bench.say(f"\n## With projects, priorities and spot capacity\n\n{_RULES}")
    for words, found in variants.items():
        compared = [compare(case) for case in found]
        bench.say(f"\n{words[0].upper()}{words[1:]}:\n\n{tables.variant(compared)}")
        if bench.has_targets:
            bench.reached |= {f"{one.case.trace}, {one.case.words}": targets(one, None) for one in compared}


def _generated(bench: _Bench) -> None:
    compared = [compare(generated(seed)) for seed in _SEEDS[bench.seeds]]
    example = compare(cases.example())
    bench.say(
        f"\n## On generated markets\n\nMean JCT relative to the best peer of each market, on the markets of the "
        f"{bench.seeds} seeds (`bench/schedule/generated.py` has the distributions).\n\n"
        f"{tables.distribution(compared)}\n\n{tables.markets(compared)}\n\n"
        f"### The shipped example\n\n{tables.details(example)}"
    )
    bench.reached[f"markets of the {bench.seeds} seeds"] = generated_targets([ratio(one) for one in compared])
    bench.reached["examples/trace.csv"] = example_targets(example)


def _speed(bench: _Bench) -> None:
    timings = speed.measure_speed(POLICIES[OURS].build(()), bench.trials)
    machine = describe()
    bench.too_slow = any(one.seconds > speed.LIMIT_S for one in timings)
    bench.say(
        f"\n## Time of a decision\n\n{machine['cpu']}, {machine['system']}. The limit is "
        f"{1000 * speed.LIMIT_S:.0f} ms by the clock, with the garbage collector paused, as the control loop does."
        f"\n\n{tables.speed(timings)}"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=some_of(_PARTS), default=_PARTS)
    parser.add_argument("--traces", type=Path, default=cases.TRACES)
    parser.add_argument("--seeds", choices=_SEEDS, default="test")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
