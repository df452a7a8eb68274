"""Preparation with a progress bar, for a person at a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from shoal_workers.contract.model.lm import TextDataConfig
from shoal_workers.data.index import Corpus
from shoal_workers.data.prepare import prepare_corpus
from shoal_workers.data.progress import PrepareProgress


def prepare_with_bar(config: TextDataConfig, console: Console | None = None) -> Corpus:
    """As `prepare_corpus`, with a bar on standard error (or `console`)."""
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

        return prepare_corpus(config, show)
