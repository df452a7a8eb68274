"""A misspelt field of the attempt's state is a type error: mypy refuses each of these updates, and only these."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mypy import api

REPOSITORY = Path(__file__).parents[6]
UPDATES = """
from dataclasses import replace

from shoal_service.core.attempt.state.parts import Quiescing, Running, Waiting
from shoal_service.core.attempt.state.parts import Worker
from shoal_service.core.attempt.turn import Turn


def correct(turn: Turn, worker: Worker) -> None:
    turn.group = replace(turn.group, start_step=3)
    turn.pool = turn.pool.with_worker(replace(worker, in_run=True))
    turn.enter(Quiescing(since=turn.now, durable=False))
    if isinstance(turn.current, Running):
        turn.set_stage(replace(turn.current, draining_since=turn.now))


def misspelt(turn: Turn, worker: Worker) -> None:
    turn.group = replace(turn.group, start_stepp=3)  # wrong
    turn.budgets = replace(turn.budgets, recoverys=1)  # wrong
    turn.grup = replace(turn.group, start_step=3)  # wrong
    turn.group = replace(turn.group, start_step="three")  # wrong
    turn.pool = turn.pool.with_worker(replace(worker, in_runn=True))  # wrong
    turn.enter(Quiescing(since=turn.now, durable=False, acknowleged=()))  # wrong
    if isinstance(turn.current, Waiting):
        turn.set_stage(replace(turn.current, draining_since=turn.now))  # wrong: of another stage
"""


@pytest.mark.slow  # mypy reads all of the core
@pytest.mark.timeout(300)
def test_mypy_refuses_every_misspelt_update_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    updates = tmp_path / "updates.py"
    updates.write_text(UPDATES, encoding="utf-8")
    monkeypatch.chdir(REPOSITORY)
    printed, errors, _ = api.run(["--no-incremental", "--follow-imports=silent", str(updates)])
    refused = {int(line) for line in re.findall(r"updates\.py:(\d+): error", printed)}
    wrong = {number for number, line in enumerate(UPDATES.splitlines(), start=1) if "# wrong" in line}
    assert refused == wrong, printed + errors
