"""The tables are made from trials alone, and so is the page that shows them."""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from measurements.disturbance import Aftermath, Control
from measurements.recovery_tables import TITLES, node_losses, ratios, rows, spread, table
from measurements.trial import (
    Event,
    EventFailed,
    Size,
    System,
    Trial,
    Victim,
    control_trial,
    read_trials,
    strike_all,
    with_aftermath,
)


def _trial(
    system: System, pause_s: float, regain_s: float, steps_lost: int, event: Event = Event.WORKER_KILL, **more: Any
) -> Trial:
    costs = {"pause_s": pause_s, "next_step_s": pause_s + 0.5, "regain_s": regain_s, "steps_lost": steps_lost}
    return Trial(system, event, **costs, from_workers=4, to_workers=3, step_s=0.5, **{"run": "one"} | more)


SHOAL = [
    _trial(System.SHOAL, pause, pause + 0.5, lost, figures={"state_source": "memory"})
    for pause, lost in ((0.4, 0), (0.2, 1), (0.9, 1))
]
PEER = [_trial(System.TORCHRUN, 8.0, 12.0, 6)]
NODE = _trial(System.SHOAL, 1.0, 2.0, 0, Event.HOST_CUT, victim=Victim.SUPERVISOR, params=Size.LARGE)
HANG = [Trial(System.TORCHRUN, Event.WORKER_STOP, from_workers=4, note="no recovery within 40 s")]


def test_a_line_of_json_is_the_trial() -> None:
    path_lines = [trial.line() for trial in [*SHOAL, *HANG]]
    assert all("\n" not in line for line in path_lines)


def test_trials_survive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    path.write_text("\n".join(['{"machine": {}}', *(trial.line() for trial in [*SHOAL, *HANG, NODE])]))
    assert read_trials(path) == [*SHOAL, *HANG, NODE]


def test_a_row_has_min_median_max_and_common_remarks() -> None:
    ours, theirs, hang = rows([*HANG, *PEER, *SHOAL])
    spreads = ("0.70 / 0.90 / 1.40", "0.20 / 0.40 / 0.90", "0.70 / 0.90 / 1.40")
    assert ours.cells()[2:] == ("3", *spreads, "–", "–", "0 to 1", "4 → 3", "from memory")
    assert theirs.cells()[3:9] == ("8.50", "8.00", "12.00", "–", "–", "6")
    assert hang.cells()[3:] == ("–", "–", "–", "–", "–", "–", "–", "no recovery within 40 s")
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
    assert line.endswith("torchrun / Shoal: next step 9.4 x, pause 20.0 x, regain 13.3 x")


@pytest.mark.parametrize("runs", [("one", "two"), ("", "")])
def test_trials_of_two_runs_or_of_an_unknown_one_have_no_ratio(runs: tuple[str, str]) -> None:
    ours, theirs = (dataclasses.replace(trial, run=run) for trial, run in zip((SHOAL[0], PEER[0]), runs, strict=True))
    assert ratios([ours, theirs]) == []


def test_models_and_places_of_the_victim_have_rows_of_their_own() -> None:
    trials = [
        _trial(System.SHOAL, 0.4, 0.9, 0, Event.RAYLET_KILL, victim=Victim.AWAY),
        _trial(System.SHOAL, 0.5, 1.9, 1, Event.RAYLET_KILL, victim=Victim.HEAD),
        _trial(System.SHOAL, 4.0, 9.0, 0, Event.RAYLET_KILL, victim=Victim.AWAY, params=Size.LARGE),
    ]
    title = TITLES[Event.RAYLET_KILL]
    assert [row.title for row in rows(trials)] == [title, f"{title}, the head's node", f"{title}, 85m parameters"]


def test_lost_nodes_are_counted_against_the_bound() -> None:
    trials = [
        _trial(System.SHOAL, 0.4, regain, lost, Event.RAYLET_KILL, victim=Victim.AWAY)
        for regain, lost in ((0.9, 0), (1.1, 0), (3.0, 1), (1.0, 0))
    ]
    [line] = node_losses([*trials, *SHOAL])
    assert line.endswith(
        "no completed step lost in 3 of 4 trials (75%), at most 1; regain within pause + 1.5 steps in 3 of 4"
    )


def test_the_window_after_a_signal_is_in_the_trial_and_in_its_row(tmp_path: Path) -> None:
    watched = with_aftermath(SHOAL[0], Aftermath(60.0, None, (3, 3, 4, 4)), global_batch=12)
    back = with_aftermath(SHOAL[1], Aftermath(60.0, 12.5, (4,) * 10), global_batch=12)
    assert (watched.samples, back.samples) == (48, 120)
    [row] = rows([watched, back])
    assert row.cells()[6:8] == ("12.50; 1 of 2 not within 60 s", "48 / 84 / 120")

    replicas = with_aftermath(_trial(System.TORCHFT, 1, 2, 0), Aftermath(60.0, 9.0, (3, 3, 4)), global_batch=12)
    assert replicas.samples == 30, "a step of three replicas has nine samples"


def test_an_undisturbed_window_is_a_trial_whose_next_step_is_its_longest_gap() -> None:
    [row] = rows([control_trial(System.SHOAL, Control(longest_gap_s=0.9, step_s=0.5, new_steps=100), 60.0, 12)])
    assert row.cells()[3:9] == ("0.90", "0.40", "–", "–", "1200", "0")


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
