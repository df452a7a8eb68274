"""The results as Markdown: the sections of docs/measured/schedule.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from schedule.comparison import OURS, Compared
from schedule.speed import Timing
from schedule.targets import Target, ratio
from shoal_service.simulator.metrics import Metrics, percentile

YARDSTICK = {
    "first-come": {"philly-1": 2.50, "saturn-1": 6.47, "newtrace-1": 5.79},
    "fifo-gang": {"philly-1": 1.83, "saturn-1": 3.87, "newtrace-1": 0.78},
    "srtf-gang": {"philly-1": 0.352, "saturn-1": 0.395, "newtrace-1": 0.384},
    "max-min": {"philly-1": 0.286, "saturn-1": 0.352, "newtrace-1": 0.329},
    "optimus": {"philly-1": 0.319, "saturn-1": 0.485, "newtrace-1": 0.361},
    "elastic-srpt": {"philly-1": 0.275, "saturn-1": 0.319, "newtrace-1": 0.300},
}
"""Mean JCT in hours that another simulator found for the same traces at 1 s a move."""
_COLUMNS: dict[str, Callable[[Metrics], str]] = {
    "mean JCT": lambda one: f"{one.mean_jct_h:.3f}",
    "median": lambda one: f"{one.median_jct_h:.3f}",
    "p99": lambda one: f"{one.p99_jct_h:.2f}",
    "makespan": lambda one: f"{one.makespan_h:.1f}",
    "fairness": lambda one: f"{one.fairness:.3f}",
    "utilisation": lambda one: f"{one.utilisation:.1%}",
    "goodput": lambda one: f"{one.goodput:.2%}",
    "moves": lambda one: f"{one.num_moves:,}",
    "preemptions": lambda one: f"{one.num_preemptions:,}",
}


def means(compared: Sequence[Compared]) -> str:
    """Mean JCT in hours: a line for each policy, a column for each trace; the best in bold."""
    rows = []
    for name in compared[0].metrics:
        values = [one.metrics[name].mean_jct_h for one in compared]
        best = [min(metrics.mean_jct_h for metrics in one.metrics.values()) for one in compared]
        rows.append([name, *(_bold(f"{v:.3f}", v == b) for v, b in zip(values, best, strict=True))])
    return table(["policy", *(one.case.trace for one in compared)], rows)


def yardstick(compared: Sequence[Compared]) -> str:
    rows = [
        [
            name,
            *(
                f"{one.metrics[name].mean_jct_h:.3f} / {given:g} ({one.metrics[name].mean_jct_h / given - 1:+.1%})"
                for one in compared
                if (given := values.get(one.case.trace)) is not None
            ),
        ]
        for name, values in YARDSTICK.items()
    ]
    return table(["policy", *(one.case.trace for one in compared)], rows)


def variant(compared: Sequence[Compared]) -> str:
    """Mean and p99 JCT of one variant of every trace, and what the variant is about."""
    rows = []
    for name in compared[0].metrics:
        row = [name]
        for one in compared:
            metrics = one.metrics[name]
            row.append(f"{metrics.mean_jct_h:.3f}; {metrics.p99_jct_h:.2f}")
            if one.case.market.projects:
                row[-1] += f"; {metrics.project_fairness:.3f}"
            if one.case.urgent:
                row[-1] += f"; {one.urgent_jct_h[name]:.3f}; {one.urgent_wait_s[name]:,.0f} s"
        rows.append(row)
    return table(["policy", *(one.case.trace for one in compared)], rows)


def distribution(compared: Sequence[Compared]) -> str:
    """Mean JCT / best peer's over markets: all of them, and those with projects, priorities or spot capacity."""
    rows = []
    for words in ("", "projects", "priorities", "spot"):
        found = [one for one in compared if words in one.case.words]
        if len(found) > 1:
            ratios = [ratio(one) for one in found]
            p99 = statistics.median(one.metrics[OURS].p99_jct_h / one.peers[one.best_peer].p99_jct_h for one in found)
            better = sum(one < 1 for one in ratios)
            shares = [percentile(ratios, share) for share in (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)]
            values = [*(f"{value:.3f}" for value in (statistics.mean(ratios), *shares, p99))]
            rows.append([words or "all", f"{len(found)}", f"{better}", *values])
    header = ["markets", "number", "better than every peer", "mean", "least", "10 %", "25 %", "median", "75 %", "90 %"]
    return table([*header, "most", "median of p99 / best peer's"], rows)


def markets(compared: Sequence[Compared]) -> str:
    """A table with a line for each market."""
    rows = [
        [
            one.case.trace,
            f"{one.case.words}, {len(one.case.jobs)} jobs",
            f"{one.metrics[OURS].mean_jct_h:.3f}",
            f"{one.best_peer} {one.peers[one.best_peer].mean_jct_h:.3f}",
            f"{ratio(one):.3f}",
        ]
        for one in compared
    ]
    return table(["market", "what it has", "mean JCT", "best peer", "ratio"], rows)


def details(one: Compared) -> str:
    """Every metric of one case; times in hours."""
    rows = [[name, *(show(metrics) for show in _COLUMNS.values())] for name, metrics in one.metrics.items()]
    return table(["policy", *_COLUMNS], rows)


def reached(found: Mapping[str, Sequence[Target]]) -> str:
    """A table with a line for each case. What misses its target is in bold."""
    columns = {one.words: one for targets in found.values() for one in targets}
    header = [f"{words} ({'>=' if one.at_least else '<='} {one.limit:g})" for words, one in columns.items()]
    rows = []
    for case, targets in found.items():
        cells = {one.words: _bold(f"{one.value:.3f}", not one.holds) for one in targets}
        rows.append([case, *(cells.get(words, "") for words in columns)])
    return table(["case", *header], rows)


def speed(timings: Sequence[Timing]) -> str:
    rows = [[one.words, f"{one.num_decisions:,}", f"{1000 * one.seconds:.0f} ms"] for one in timings]
    return table(["10,000 jobs, 1,000 nodes of 8 workers", "decisions", "time (median)"], rows)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _bold(text: str, is_bold: bool) -> str:
    return f"**{text}**" if is_bold else text
