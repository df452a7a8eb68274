"""`python -m shoal_workers.data SPEC.json [--json]`: prepare the token shards of a job spec, ahead of the job.

A separate program, so that the command line (`shoal data prepare`) does not import torch. Shows a progress bar.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from shoal_workers.contract.text_data import TextDataConfig
from shoal_workers.data.corpus import Corpus
from shoal_workers.data.errors import DataError
from shoal_workers.data.prepare import PrepareProgress, prepare_corpora


def main() -> int:
    """Exit status 1 if the text cannot be read; the bar and errors go to standard error."""
    parser = argparse.ArgumentParser(prog="python -m shoal_workers.data", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("spec", help='job spec, JSON; "-": standard input')
    parser.add_argument("--json", action="store_true", help="one line of JSON about the result on standard output")
    arguments = parser.parse_args()
    text = sys.stdin.read() if arguments.spec == "-" else Path(arguments.spec).read_text()
    config = TextDataConfig.model_validate(json.loads(text).get("data", {}))
    try:
        corpora = prepare_with_bar(config)
    except DataError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if arguments.json:
        results = [
            {"directory": str(corpus.directory), "content_hash": corpus.index.content_hash} for corpus in corpora
        ]
        sys.stdout.write(json.dumps({"sources": results} if config.sources else results[0]) + "\n")
    return 0


def prepare_with_bar(config: TextDataConfig, console: Console | None = None) -> list[Corpus]:
    """Call `prepare_corpora` and show a bar on standard error (or `console`)."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console or Console(stderr=True)) as bars:
        bar = bars.add_task("reading", total=None)

        def show(state: PrepareProgress) -> None:
            bars.update(
                bar,
                description=state.describe(),
                completed=state.done_bytes if state.total_bytes else None,
                total=state.total_bytes or None,
            )

        return prepare_corpora(config, show)


if __name__ == "__main__":
    sys.exit(main())
