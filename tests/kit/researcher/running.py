"""Runs tasks over copies of one history, and writes their counts as a table; reads the table, too.

The test compares what a task takes now with the table of docs/researcher-tasks.md; tools/researcher_tasks.py makes it.
"""

import re
import shutil
import socket
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
    """Writes the history once; returns the folder that `served_history` copies."""
    with _served(folder) as service:
        write_history(service, folder / "checkpoints", time.time())
    return folder


@contextmanager
def served_history(history: Path, folder: Path, address: socket.socket | None = None) -> Iterator[Service]:
    """A service with a copy of the history in a new folder. `address`: see `served`."""
    shutil.copytree(history, folder)
    with _served(folder, address) as service:
        yield service


def perform(task: Task, browser: Browser, service: Service, downloads: Path) -> Taken:
    """Does the task over a served history. Raises an exception if the answer does not appear."""
    person = Person(browser, downloads)
    _begin(person, service)
    try:
        task.do(person, service)
        place = person.place
        half_written = re.compile(
            "/v1/specs/validate .* status of 400 |status of 422 "
        )  # a spec, which is validated as it is written
        failed = [one for one in browser.complaints() if not half_written.search(one)]
        assert failed == [], failed
    finally:
        browser.forget()  # no stream is open when the server ends
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
def _served(folder: Path, address: socket.socket | None = None) -> Iterator[Service]:
    folder.mkdir(parents=True, exist_ok=True)
    database, checkpoints = f"sqlite:///{folder / 'shoal.db'}", folder / "checkpoints"
    with written_service(database, state_dir=folder, checkpoints=checkpoints, address=address) as service:
        yield service


def _begin(person: Person, service: Service) -> None:
    """Logged in, at the page of all jobs."""
    browser = person.browser
    browser.look(width=_WIDTH, height=_HEIGHT)
    allow = {"behavior": "allow", "downloadPath": str(person.downloads)}
    browser.driver.execute_cdp_cmd("Browser.setDownloadBehavior", allow)
    with service.client as client:
        browser.log_in(f"{service.url}{client.session_link().path}")
    browser.open(f"{service.url}/")
    browser.until(lambda: browser.count("#jobs tr"), "the table of jobs")
    browser.complaints()
