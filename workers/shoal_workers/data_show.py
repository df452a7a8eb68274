"""`python -m shoal_workers.data_show`: what training will read of a spec's data, before anything trains.

The spec is read from standard input, as JSON; the document goes to standard output:

    {"task": ..., "remarks": [...], "splits": {
        "train": {"samples": 12, "left_out": {"lines without an answer": 3}, "tokens": [least, median, most],
                  "in_loss": [least, median, most], "num_cut": 2, "labels": {"good": 0.5}, "rows": [...]},
        "validation": ... or null}}

The task prepares and opens its data as in a job. Lengths and labels are those of up to 1,000 samples of a split; rows
are the samples that training reads first. The rows of each kind of task are in `tasks.shown`. Called by the command
line, which loads no torch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal_workers.contract.batch_partition import sample_at
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.spec import JobSpec
from shoal_workers.data.errors import DataError
from shoal_workers.engine.length_buckets import LengthBuckets
from shoal_workers.engine.task.task import LoadedTask, load_task
from shoal_workers.tasks.shown import SHOWN

_MOST_COUNTED = 1_000
_FEW = 1
"""Tokens in the loss of a sample that are probably not meant to be so few."""


def main() -> int:
    """Exit status 1 if the data cannot be read; errors and progress go to standard error."""
    parser = argparse.ArgumentParser(prog="python -m shoal_workers.data_show")
    parser.add_argument("--samples", type=int, default=3, help="rows of each split")
    arguments = parser.parse_args()
    spec = parse_spec(json.load(sys.stdin))
    sys.path.insert(0, str(Path(spec.code.working_dir or ".").expanduser()))
    lines, sys.stdout = sys.stdout, sys.stderr  # what the task prints does not belong to the document
    try:
        document = show(spec, arguments.samples)
    except (DataError, ValueError, TypeError, OSError, ImportError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    lines.write(json.dumps(document) + "\n")
    return 0


def show(spec: JobSpec, num_rows: int) -> dict[str, Any]:
    """Returns the document. DataError, or what the task raises: the data cannot be read."""
    task = load_task(spec)
    task.prepare(_say)
    task.open_data()
    splits = {"train": task.train_data, "validation": task.validation_data}
    shown = {name: None if data is None else _split(spec, task, data, num_rows) for name, data in splits.items()}
    remarks = list(task.remarks)
    for name, split in shown.items():
        remarks += _doubts(name, split) if split is not None else ()
    return {"task": spec.task, "remarks": remarks, "splits": shown}


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _split(spec: JobSpec, task: LoadedTask, data: Any, num_rows: int) -> dict[str, Any]:
    data = data.samples if isinstance(data, LengthBuckets) else data
    size = len(data)
    order = getattr(data, "samples_at", None)
    positions = range(min(num_rows, size))
    first = (
        order(positions, spec.seed)
        if order is not None
        else [sample_at(position, num_samples=size, seed=spec.seed) for position in positions]
    )
    about = {"samples": size, "left_out": dict(getattr(data, "left_out", {})), "num_cut": getattr(data, "num_cut", 0)}
    rows_of = SHOWN.get(spec.task)
    if rows_of is None:
        return {**about, "rows": []}
    num_counted = min(size, _MOST_COUNTED)
    counted = list(rows_of(task.instance, data, [number * size // num_counted for number in range(num_counted)]))
    labels = Counter(row["label"] for row in counted if "label" in row)
    return {
        **about,
        "tokens": _range([row["tokens"] for row in counted]),
        "in_loss": _range([row["in_loss"] for row in counted]),
        "num_few": sum(row["in_loss"] <= _FEW for row in counted if "label" not in row),
        "num_counted": num_counted,
        "labels": {label: number / num_counted for label, number in labels.most_common()},
        "rows": list(rows_of(task.instance, data, first)),
    }


def _range(values: Sequence[int]) -> list[int]:
    """Least, median and most."""
    return [min(values), statistics.median_low(values), max(values)]


def _doubts(name: str, split: dict[str, Any]) -> list[str]:
    """What is probably not meant."""
    doubts = []
    if split.get("num_few"):
        doubts.append(f"{split['num_few']:,} of {split['num_counted']:,} {name} samples have 1 token in the loss.")
    if len(split.get("labels", ())) == 1:
        doubts.append(f"all {name} samples have the label {next(iter(split['labels']))!r}.")
    return doubts


if __name__ == "__main__":
    sys.exit(main())
