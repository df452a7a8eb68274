"""The figures of bench/layouts as Markdown tables: for the terminal, docs/planner.md and docs/measured/layouts.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_MIB = 1 << 20
Document = dict[str, Any]
"""Part of the JSON that `make bench-layouts` prints."""


def reality_table(reality: Document) -> str:
    """Ordered by step time, slowest last."""
    rows = sorted(reality["layouts"], key=lambda one: one["measured_s"] or 0.0)
    lines = [
        "| ranks | layout | memory predicted | measured | | step predicted | measured |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {one['world_size']} | {one['name']} | {_mib(one['predicted_bytes'])} | {_mib(one['measured_bytes'])} | "
        f"{100 * one['memory_error']:+.1f} % | {_ms(one['predicted_s'])} | {_ms(one['measured_s'])} |"
        for one in rows
    ]
    largest, median = 100 * reality["memory_error_largest"], 100 * reality["memory_error_median"]
    lines += ["", f"Memory: off by at most {largest:.1f} %, median {median:.1f} %."]
    if "spearman" in reality:
        over = 100 * (reality["best_predicted_over_best_measured"] - 1)
        lines[-1] += (
            f" Step time: rank correlation (Spearman) {reality['spearman']:.2f}; the layout that is predicted to be "
            f"the fastest takes {over:.0f} % longer than the one that is."
        )
    return "\n".join(lines)


def techniques_table(techniques: Document) -> str:
    lines = [
        "| | layout | peak predicted | measured | saved, predicted | measured |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for name, rows in techniques["techniques"].items():
        first = rows[0]
        lines += [
            f"| {name} | {one['name']} | {_mib(one['predicted_bytes'])} | {_mib(one['measured_bytes'])} | "
            f"{_mib(first['predicted_bytes'] - one['predicted_bytes'])} | "
            f"{_mib(first['measured_bytes'] - one['measured_bytes'])} |"
            for one in rows
        ]
    return "\n".join(lines)


def changes_table(relayout: Document) -> str:
    lines = ["| from | to | pause | a step then | steps lost | same processes |", "|---|---|---:|---:|---:|---|"]
    lines += [
        f"| {one['before']} | {one['after']} | {_ms(one['pause_s'])} | {_ms(one['step_s'])} | {one['steps_lost']} | "
        f"{'yes' if one['is_same_pids'] else 'no'} |"
        for one in relayout["changes"]
    ]
    return "\n".join([*lines, "", f"Median pause {_ms(relayout['median_pause_s'])}."])


def moves_table(moving: Document) -> str:
    lines = [
        "| from | to | state | read in | rate | copying | share | CPU time | to copy | fresh pages | extra memory |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {one['before']} | {one['after']} | {one['state_bytes'] / 1e9:.2f} GB | {one['load_s']:.2f} s | "
        f"{one['bytes_per_s'] / 1e9:.1f} GB/s | {one['copy_bytes_per_s'] / 1e9:.1f} GB/s | "
        f"{one['share']:.1%} | {one['cpu_s']:.2f} s | {_seconds(one.get('copy_cpu_s'))} | "
        f"{one['fresh_bytes'] / 1e9:.2f} GB | {one['extra']:.2f} x |"
        for one in moving["moves"]
    ]
    return "\n".join(lines)


def planner_table(figures: Sequence[Document]) -> str:
    lines = ["| model | GPUs | layouts | seconds | limit |", "|---|---:|---:|---:|---:|"]
    lines += [
        f"| {one['spec']} | {one['gpus']:,} | {one['layouts']:,} | {one['seconds']:.2f} | {one['limit_s']:g} |"
        for one in figures
    ]
    return "\n".join(lines)


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / _MIB:,.1f} MiB"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:,.0f} ms"
