"""The tables are made from trials alone, and so is the page that shows them."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from measurements.recovery_tables import ratios, rows, spread, table
from measurements.trial import Event, EventFailed, System, Trial, read_trials, strike_all

SHOAL = [
    Trial(System.SHOAL, Event.WORKER_KILL, pause, pause + 0.5, lost, 4, 3, 0.5, figures={"state_source": "memory"})
    for pause, lost in ((0.4, 0), (0.2, 1), (0.9, 1))
]
PEER = [Trial(System.TORCHRUN, Event.WORKER_KILL, 8.0, 12.0, 6, 4, 4, 0.5)]
HANG = [Trial(System.TORCHRUN, Event.WORKER_STOP, from_workers=4, note="no recovery within 40 s")]


def test_a_line_of_json_is_the_trial() -> None:
    path_lines = [trial.line() for trial in [*SHOAL, *HANG]]
    assert all("\n" not in line for line in path_lines)


def test_trials_survive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    path.write_text("\n".join(['{"machine": {}}', *(trial.line() for trial in [*SHOAL, *HANG])]))
    assert read_trials(path) == [*SHOAL, *HANG]


def test_a_row_has_min_median_max_and_common_remarks() -> None:
    ours, theirs, hang = rows([*HANG, *PEER, *SHOAL])
    assert ours.cells()[2:] == ("3", "0.20 / 0.40 / 0.90", "0.70 / 0.90 / 1.40", "0 to 1", "4 → 3", "from memory")
    assert theirs.cells()[3:6] == ("8.00", "12.00", "6")
    assert hang.cells()[3:] == ("–", "–", "–", "–", "no recovery within 40 s")
    assert spread([]) == "–"


def test_an_event_that_fails_is_noted_with_its_reason_and_the_next_ones_go_on() -> None:
    trials: list[Trial] = []
    starts: list[list[Event]] = []

    def strike(remaining: list[Event]) -> None:
        starts.append(list(remaining))
        while remaining:
            if remaining[0] is Event.DRAIN:
                raise EventFailed("the cluster has 3 of 4 CPUs")
            trials.append(Trial(System.SHOAL, remaining.pop(0)))

    strike_all(System.SHOAL, [Event.SHRINK, Event.DRAIN, Event.HEAD_KILL], trials.append, strike)
    assert starts == [[Event.SHRINK, Event.DRAIN, Event.HEAD_KILL], [Event.HEAD_KILL]]
    assert [trial.event for trial in trials] == [Event.SHRINK, Event.DRAIN, Event.HEAD_KILL]
    assert [trial.failed for trial in trials] == ["", "EventFailed: the cluster has 3 of 4 CPUs", ""]
    assert json.loads(trials[1].line())["failed"] == trials[1].failed
    row = next(row for row in rows(trials) if row.event is Event.DRAIN).cells()
    assert (row[2], row[-1]) == ("0", "failed: EventFailed: the cluster has 3 of 4 CPUs")


def test_ratios_are_of_medians() -> None:
    [line] = ratios([*SHOAL, *PEER])
    assert line.endswith("torchrun / Shoal: pause 20.0 x, regain 13.3 x")


def test_every_line_of_the_table_has_the_same_width() -> None:
    assert len({len(line) for line in table([*SHOAL, *PEER, *HANG]).splitlines()}) == 1


def test_the_committed_page_and_picture_are_made_from_the_committed_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Path(__file__).resolve().parents[3] / "tools" / "recovery_page.py"
    spec = importlib.util.spec_from_file_location("shoal_docs_recovery_page", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where dataclasses look for their module
    spec.loader.exec_module(module)

    trials = read_trials(module.TRIALS)
    page = module.PAGE.read_text(encoding="utf-8")
    assert module.with_results(page, trials, module.machine()) == page, "run `python tools/recovery_page.py`"
    assert module.with_matrix(page) == page, "run `python tools/recovery_page.py`"
    assert module.PICTURE.read_text(encoding="utf-8") == module.picture(trials)
