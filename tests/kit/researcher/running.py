"""Runs tasks, each over a copy of one history, and writes their counts as a table; reads the table, too.

The test compares what a task takes now with the table of docs/researcher-tasks.md; tools/researcher_tasks.py makes it.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kit.processes.chromium import Browser
from kit.researcher.changing import CHANGING
from kit.researcher.looking import LOOKING
from kit.researcher.person import Counts, Person, Task
from kit.worlds.team_history import write_history
from kit.worlds.written_service import Service, written_service

TASKS: tuple[Task, ...] = (*LOOKING, *CHANGING)
_WIDTH, _HEIGHT = 1400, 1000
_ROW = re.compile(r"^\| \d+ \| (?P<words>.+) \| (?P<clicks>\d+) \| (?P<texts>\d+) \| (?P<keys>\d+) \| .+ \|$", re.M)
HEAD = "| | task | clicks | texts | keys | where it ends |\n|---|---|---|---|---|---|\n"


@dataclass(frozen=True)
class Taken:
    """What a task took, and the page where it ended."""

    counts: Counts
    place: str


def make_history(folder: Path) -> Path:
    """Writes the history once; returns the folder that `perform` copies."""
    with _served(folder) as service:
        write_history(service, folder / "checkpoints", time.time())
    return folder


def perform(task: Task, browser: Browser, history: Path, folder: Path) -> Taken:
    """Does the task over a copy of the history, in a new folder. Raises an exception if the answer does not appear."""
    shutil.copytree(history, folder)
    with _served(folder) as service:
        person = Person(browser, folder / "downloads")
        _begin(person, service)
        task.do(person, service)
        place = person.place
        half_written = re.compile(
            "/v1/specs/validate .* status of 400 |status of 422 "
        )  # a spec, which is validated as it is written
        failed = [one for one in browser.complaints() if not half_written.search(one)]
        assert failed == [], failed
        browser.open("about:blank")  # no stream is open when the server ends
    return Taken(person.counts, place)


def rows(taken: Iterable[tuple[Task, Taken]]) -> str:
    """The table of docs/researcher-tasks.md."""
    lines = []
    for number, (task, done) in enumerate(taken, 1):
        counts = done.counts
        cells = (number, task.words, counts.clicks, counts.texts, counts.keys, f"`{done.place}`")
        lines.append(f"| {' | '.join(map(str, cells))} |\n")
    return HEAD + "".join(lines)


def read_rows(page: str) -> Mapping[str, Counts]:
    """By the words of a task, what the table says it takes."""
    return {
        found["words"]: Counts(int(found["clicks"]), int(found["texts"]), int(found["keys"]))
        for found in _ROW.finditer(page)
    }


@contextmanager
def _served(folder: Path) -> Iterator[Service]:
    folder.mkdir(parents=True, exist_ok=True)
    database = f"sqlite:///{folder / 'shoal.db'}"
    with written_service(database, state_dir=folder, checkpoints=folder / "checkpoints") as service:
        yield service


def _begin(person: Person, service: Service) -> None:
    """Logged in, at the page of all jobs, without anything that an earlier task has left in the browser."""
    browser = person.browser
    browser.open(f"{service.url}/login")
    browser.driver.delete_all_cookies()
    browser.look(width=_WIDTH, height=_HEIGHT)
    allow = {"behavior": "allow", "downloadPath": str(person.downloads)}
    browser.driver.execute_cdp_cmd("Browser.setDownloadBehavior", allow)
    browser.open("about:blank")
    with service.client as client:
        browser.log_in(f"{service.url}{client.session_link().path}")
    browser.until(lambda: browser.count("#jobs tr"), "the table of jobs")
    browser.complaints()
