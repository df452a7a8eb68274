"""Pages that are made from figures of benchmarks, the definitions behind them, and the example trace."""

import dataclasses
import importlib.util
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import trace_generator
from measurements.disturbance import (
    aftermath,
    control,
    is_over,
    longest_gap_s,
    measure,
    measure_switch,
)
from measurements.recovery_tables import ratios, rows
from measurements.stamps import StepEnd
from measurements.trial import (
    Event,
    EventFailed,
    Size,
    System,
    Trial,
    Victim,
    read_trials,
    strike_all,
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


def test_trials_survive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    path.write_text("\n".join(['{"machine": {}}', *(trial.line() for trial in [*SHOAL, *HANG, NODE])]))
    assert read_trials(path) == [*SHOAL, *HANG, NODE]


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


@pytest.mark.parametrize("runs", [("one", "two"), ("", "")])
def test_trials_of_two_runs_or_of_an_unknown_one_have_no_ratio(runs: tuple[str, str]) -> None:
    ours, theirs = (dataclasses.replace(trial, run=run) for trial, run in zip((SHOAL[0], PEER[0]), runs, strict=True))
    assert ratios([ours, theirs]) == []


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


ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    before = list(sys.path)
    found = runpy.run_path(str(ROOT / "tools" / "layouts_page.py"))
    sys.path[:] = before
    return found


def test_pages_show_the_committed_figures(page: dict[str, Any]) -> None:
    if not page["FIGURES"].exists():  # none were ever taken
        return
    figures = json.loads(page["FIGURES"].read_text(encoding="utf-8"))
    for name in page["_PAGES"]:
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert page["with_tables"](name, text, figures) == text


def _steps(first: int, at: list[float], *, world_size: int = 4, life: str = "a") -> list[StepEnd]:
    return [StepEnd(first + index, moment, world_size, life) for index, moment in enumerate(at)]


BEFORE = _steps(11, [11.0, 12.0, 13.0])


def test_a_restart_from_a_checkpoint_costs_its_pause_and_the_steps_that_are_done_again() -> None:
    after = _steps(11, [20.0, 20.5, 21.0, 21.5, 22.0, 22.5, 23.0], world_size=3, life="b")
    cost = measure([*BEFORE, *after], signal_at=13.4)

    assert cost.pause_s == pytest.approx(20.0 - 13.4 - 0.5)
    assert cost.next_step_s == pytest.approx(20.0 - 13.4)
    assert cost.steps_lost == 3
    assert cost.regain_s == pytest.approx(21.5 - 13.4), "the end of step 14"
    assert (cost.from_world_size, cost.to_world_size, cost.step_s) == (4, 3, 0.5)


def test_an_interrupted_step_that_is_redone_is_not_a_lost_one() -> None:
    after = _steps(14, [15.5, 16.5, 17.5, 18.5, 19.5, 20.5, 21.5], life="b")
    cost = measure([*BEFORE, *after], signal_at=13.5)

    assert cost.steps_lost == 0
    assert cost.pause_s == pytest.approx(1.0)
    assert cost.regain_s == pytest.approx(2.0)


def test_a_step_that_the_hit_group_still_completes_is_not_a_recovery() -> None:
    last = _steps(14, [13.6])
    after = _steps(14, [20.0, 21.0, 22.0, 23.0, 24.0, 25.0, 26.0], life="b")
    assert not is_over([*BEFORE, *last, *after[:1]], 13.5)
    cost = measure([*BEFORE, *last, *after], signal_at=13.5)

    assert cost.pause_s == pytest.approx(20.0 - 13.5 - 1.0)
    assert cost.regain_s == pytest.approx(21.0 - 13.5), "the end of step 15"
    assert cost.steps_lost == 1


def test_it_is_not_over_before_the_old_step_is_passed_and_the_new_step_time_is_known() -> None:
    after = _steps(12, [20.0 + index for index in range(8)], life="b")
    assert not is_over(BEFORE, 13.5)
    assert not is_over([*BEFORE, *after[:2]], 13.5), "step 13 was complete before the signal"
    assert not is_over([*BEFORE, *after[:5]], 13.5)
    assert is_over([*BEFORE, *after], 13.5)


def test_training_continues_until_a_requested_change() -> None:
    old = _steps(14, [14.0, 15.0, 16.0])
    new = _steps(17, [17.8, 19.0, 20.0, 21.0, 22.0], world_size=3, life="b")
    assert measure_switch([*BEFORE, *old], 13.5, to_world_size=3) is None

    cost = measure_switch([*BEFORE, *old, *new], 13.5, to_world_size=3)
    assert cost is not None
    assert cost.pause_s == pytest.approx(1.8 - 1.0)
    assert cost.regain_s == pytest.approx(17.8 - 13.5)
    assert cost.steps_lost == 0


def test_the_longest_gap_counts_from_the_moment_itself() -> None:
    steps = _steps(1, [1.0, 2.0, 2.5, 6.0])
    assert longest_gap_s(steps, since=2.0, until=6.0) == 3.5
    assert longest_gap_s(steps, since=6.0, until=10.0) == 4.0


def test_the_window_after_a_signal_counts_new_steps_once_and_knows_when_the_group_is_whole_again() -> None:
    small = _steps(12, [15.0, 16.0, 17.0], world_size=3, life="b")
    whole = _steps(15, [20.0, 21.0], life="c")
    seen = aftermath([*BEFORE, *small, *whole], signal_at=13.5, window_s=7.0)

    assert seen.full_strength_s == pytest.approx(20.0 - 13.5)
    assert seen.new_sizes == (3, 4), "step 14 and step 15; 12 and 13 were repeated, 16 is too late"
    assert aftermath([*BEFORE, *small, *whole], 13.5, window_s=6.0).full_strength_s is None


def test_an_undisturbed_window_shows_its_slowest_step() -> None:
    steps = _steps(11, [11.0, 12.0, 13.0, 14.6, 15.6, 16.6])
    found = control(steps, since=12.2, window_s=4.0)

    assert found.longest_gap_s == pytest.approx(1.6)
    assert (found.step_s, found.new_steps) == (pytest.approx(1.0), 3)


def test_the_committed_example_is_up_to_date() -> None:
    made = trace_generator.generate(trace_generator.NUM_JOBS, trace_generator.SEED)
    assert made == trace_generator.EXAMPLE.read_text(encoding="utf-8"), "run `make docs`"
