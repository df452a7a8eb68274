"""The commands of docs/researcher-tasks.md are run over the history of the tasks, and show what the page says."""

import re
import shlex
import time
from pathlib import Path
from typing import Any

import pytest

from kit.worlds.team_history import write_history
from kit.worlds.written_service import Service

PAGE = Path(__file__).parents[3] / "docs" / "researcher-tasks.md"
_ROW = re.compile(r"^\| [A-Z].+ \| `shoal (?P<command>.+)` \| `(?P<shows>.+)` \|$", re.M)
ROWS = [(found["command"], found["shows"]) for found in _ROW.finditer(PAGE.read_text(encoding="utf-8"))]


@pytest.fixture
def history(service: Service, tmp_path: Path) -> None:
    write_history(service, tmp_path / "checkpoints", time.time())


def test_the_commands_show_what_the_page_says(shoal: Any, history: None) -> None:
    wrong: dict[str, Any] = {}
    for command, shows in ROWS:
        ran = shoal(*shlex.split(command))
        if ran.code or shows not in " ".join(ran.out.split()):
            wrong[command] = (ran.code, shows, ran.out, ran.err)
    assert wrong == {} and len(ROWS) >= 13
