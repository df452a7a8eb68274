"""`python -m shoal_workers.data_show`: what training will read of a spec's data, before anything trains.

The spec is read from standard input, as JSON; the document goes to standard output:

    {"task": ..., "remarks": [...], "splits": {
        "train": {"samples": 12, "left_out": {"lines without an answer": 3}, "num_cut": 2, "labels": {"good": 0.5},
                  "tokens": [least, median, most], "in_loss": [least, median, most], "rows": [...]},
        "validation": the same, with "validated", the number of samples that are drawn; or null}}

The task prepares and opens its data as in a job. Samples are in the order of the training, and of the validation.
Lengths are those of the first 1,000, rows the first of them. The rows of each kind of task are in `tasks.shown`. Called
by the command line, which loads no torch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.hugging_face import HF_TASKS
from shoal_workers.contract.spec import JobSpec
from shoal_workers.data.errors import DataError
from shoal_workers.engine.length_buckets import LengthBuckets
from shoal_workers.engine.sample_order import training_order, validation_order
from shoal_workers.engine.step.first_look import remarks_on_labels
from shoal_workers.engine.task.task import load_task
from shoal_workers.tasks.shown import SHOWN

_MOST_COUNTED = 1_000


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
    shown, remarks = {}, list(task.remarks)
    for name, data in (("train", task.train_data), ("validation", task.validation_data)):
        shown[name] = None if data is None else _split(spec, task.instance, name, data, num_rows)
        remarks += [] if data is None else remarks_on_labels(data, name)
        if num_few := (shown[name] or {}).get("num_few"):
            remarks.append(f"{num_few:,} {name} samples have one token in the loss.")
    return {"task": spec.task, "remarks": remarks, "splits": shown}


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _split(spec: JobSpec, task: Any, name: str, data: Any, num_rows: int) -> dict[str, Any]:
    data = data.samples if isinstance(data, LengthBuckets) else data
    if name == "train":
        order = training_order(data, range(min(len(data), _MOST_COUNTED)), seed=spec.seed)
    else:
        order = validation_order(data, spec.validation.samples, seed=spec.seed)
    counts = data.label_counts() if hasattr(data, "label_counts") else {}
    names = task.classes()[0] if counts else ()
    split: dict[str, Any] = {
        "samples": len(data),
        "validated": len(order) if name == "validation" else None,
        "left_out": dict(getattr(data, "left_out", {})),
        "num_cut": getattr(data, "num_cut", 0),
        "labels": {names[label] if names else str(label): count / len(data) for label, count in counts.items()},
        "rows": [],
    }
    if (rows_of := SHOWN.get(spec.task)) is None:
        return split
    rows = list(rows_of(task, data, order[:_MOST_COUNTED]))
    return {
        **split,
        "tokens": _range([row["tokens"] for row in rows]),
        "in_loss": _range([row["in_loss"] for row in rows]),
        "num_few": sum(text["in_loss"] == 1 for row in rows for text in row["texts"] if spec.task in HF_TASKS),
        "rows": rows[:num_rows],
    }


def _range(values: Sequence[int]) -> list[int]:
    """Least, median and most."""
    return [min(values), statistics.median_low(values), max(values)]


if __name__ == "__main__":
    sys.exit(main())
