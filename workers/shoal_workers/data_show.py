"""`python -m shoal_workers.data_show`: what training will read of a spec's data, before anything trains.

The spec is read from standard input, as JSON; a `DataPreview` goes to standard output. The task prepares and opens its
data as in a job, and its first micro-batch is read twice. Called by the command line, which loads no torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import torch

from shoal_workers.contract import JobSpec
from shoal_workers.contract.batch_partition import randomness_seed
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.data_preview import DataPreview
from shoal_workers.data.errors import DataError
from shoal_workers.engine.randomness import seed_everything
from shoal_workers.engine.step.batches import Batches
from shoal_workers.engine.step.data_preview import Extent, describe
from shoal_workers.engine.step.first_look import look
from shoal_workers.engine.task.task import load_task

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
        preview = show(spec, arguments.samples)
    except (DataError, ValueError, TypeError, OSError, ImportError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    lines.write(preview.model_dump_json() + "\n")
    return 0


def show(spec: JobSpec, num_rows: int) -> DataPreview:
    """Return what training will read. DataError, or what the task raises: the data cannot be read."""
    task = load_task(spec)
    task.prepare(_say)
    task.open_data()
    preview = describe(task, spec, Extent(rows=num_rows, counted=_MOST_COUNTED, chars=sys.maxsize, seconds=60.0))
    remarks = list(preview.remarks)
    place = task.line_of("build_dataset")
    first_look = partial(look, data=task.train_data, place=place, say=remarks.append)
    seed_everything(randomness_seed(spec.seed, 0, 0))
    Batches(task, task.train_data, torch.device("cpu"), first_look=first_look).training(spec, 0, 0)
    return preview.model_copy(update={"remarks": tuple(remarks)})


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
