"""Each task of a researcher is done on the real pages, without an address being typed, and takes no more clicks, texts
and keys than docs/researcher-tasks.md says."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.processes.chromium import Browser
from kit.researcher.changing import CHANGING
from kit.researcher.looking import LOOKING
from kit.researcher.person import Task
from kit.researcher.running import TASKS, make_history, perform, read_rows, served_history
from kit.worlds.written_service import Service

PAGE = Path(__file__).parents[2] / "docs" / "researcher-tasks.md"
LEAST_TASKS = 30


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_history(tmp_path_factory.mktemp("history"))


@pytest.fixture(scope="module")
def looked_at(history: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """For the tasks that change no job."""
    with served_history(history, tmp_path_factory.mktemp("looked-at") / "service") as service:
        yield service


@pytest.mark.first
def test_the_page_has_a_row_for_each_task() -> None:
    assert list(read_rows(PAGE.read_text(encoding="utf-8"))) == [one.words for one in TASKS], (
        "run `make researcher-tasks`"
    )
    assert len(TASKS) >= LEAST_TASKS


@pytest.mark.parametrize("task", LOOKING, ids=lambda task: task.name)
def test_a_task_that_looks_takes_no_more_than_the_page_says(
    task: Task, _browser: Browser, looked_at: Service, tmp_path: Path
) -> None:
    _takes_no_more_than_the_page_says(task, _browser, looked_at, tmp_path)


@pytest.mark.parametrize("task", CHANGING, ids=lambda task: task.name)
def test_a_task_that_changes_something_takes_no_more_than_the_page_says(
    task: Task, _browser: Browser, history: Path, tmp_path: Path, address: socket.socket
) -> None:
    with served_history(history, tmp_path / "service", address) as service:
        _takes_no_more_than_the_page_says(task, _browser, service, tmp_path)


def _takes_no_more_than_the_page_says(task: Task, browser: Browser, service: Service, folder: Path) -> None:
    said = read_rows(PAGE.read_text(encoding="utf-8"))[task.words]
    taken = perform(task, browser, service, folder / "downloads").counts
    assert taken.clicks <= said.clicks and taken.texts <= said.texts and taken.keys <= said.keys
