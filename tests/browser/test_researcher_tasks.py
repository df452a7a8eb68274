"""Each task of a researcher is done on the real pages, without an address being typed, and takes no more clicks, texts
and keys than docs/researcher-tasks.md says."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit.processes.chromium import Browser
from kit.researcher.person import Task
from kit.researcher.running import TASKS, make_history, perform, read_rows

PAGE = Path(__file__).parents[2] / "docs" / "researcher-tasks.md"
LEAST_TASKS = 30


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_history(tmp_path_factory.mktemp("history"))


@pytest.mark.first
def test_the_page_has_a_row_for_each_task() -> None:
    assert list(read_rows(PAGE.read_text(encoding="utf-8"))) == [one.words for one in TASKS], (
        "run `make researcher-tasks`"
    )
    assert len(TASKS) >= LEAST_TASKS


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_task_takes_no_more_than_the_page_says(task: Task, _browser: Browser, history: Path, tmp_path: Path) -> None:
    said = read_rows(PAGE.read_text(encoding="utf-8"))[task.words]
    taken = perform(task, _browser, history, tmp_path / "service").counts
    assert taken.clicks <= said.clicks and taken.texts <= said.texts and taken.keys <= said.keys
