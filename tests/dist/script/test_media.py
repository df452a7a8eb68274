"""Media that scripts log: kept beside the checkpoints, once for each step, also if a step is redone after a kill."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from kit.processes.script_bench import Events, ScriptBench
from kit.processes.server import until
from shoal_workers.contract.media import FOLDER, MediaRecord, RecordName, counted
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import StepReport

Bench = Callable[..., ScriptBench]

_STEPS = """
import json, os, pathlib, sys
import events, shoal, torch

saved = pathlib.Path(shoal.checkpoint_dir()) / f"step-{os.environ['RANK']}"  # another rank may be ahead
start = int(saved.read_text()) if saved.exists() else 0
for step in range(start + 1, 7):
    x = torch.full((3, 4, 6), step / 10)
    shoal.log(
        step, loss=step / 2, images={"x": x}, histogram={"h": x * 2}, text={"words": f"step {step}"},
        table={"t": [{"step": step, "rank": os.environ["RANK"]}]},
    )
    x.zero_()
    if step == 3:
        saved.write_text("3")
    if step == 5 and "hold" in sys.argv and start == 0:
        events.say(reached=5)
        events.wait()
"""


def records(folder: Path) -> list[MediaRecord]:
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    return [MediaRecord.model_validate_json((folder / str(one)).read_text()) for one in counted(names)]


def shown(found: list[MediaRecord], folder: Path) -> list[tuple[object, ...]]:
    """What a page shows of each record: not when it was logged, nor by which generation."""
    return [
        (
            one.step,
            one.rank,
            [(folder / image.file).read_bytes() for image in one.images],
            one.histograms,
            one.tables,
            one.texts,
        )
        for one in found
    ]


def test_what_rank_0_logs_is_kept_with_its_step_and_numbers_are_reported_as_before(bench: Bench) -> None:
    runners = bench(_STEPS, 2)
    assert [end.kind for end in runners.run()] == [ExitKind.FINISHED] * 2
    assert runners.said() == []
    found = records(runners.checkpoints / FOLDER)
    assert [(one.step, one.rank, one.generation) for one in found] == [(step, 0, 1) for step in range(1, 7)]
    assert [one.texts[0].text for one in found] == [f"step {step}" for step in range(1, 7)]
    assert [one.histograms[0].mean for one in found] == pytest.approx([step / 5 for step in range(1, 7)])
    assert (found[0].images[0].width, found[0].images[0].height) == (6, 4)
    assert found[4].tables[0].rows == ((5, "0"),)
    assert [(one.step, one.loss) for one in runners.reports(StepReport)] == [(step, step / 2) for step in range(1, 7)]


def test_what_was_logged_before_and_after_a_kill_is_there_once_and_as_in_an_undisturbed_run(
    bench: Bench, events: Events
) -> None:
    undisturbed = bench(_STEPS)
    folder = undisturbed.checkpoints / FOLDER
    assert undisturbed.run()[0].kind is ExitKind.FINISHED
    expected = shown(records(folder), folder)
    shutil.rmtree(undisturbed.checkpoints)

    runners = bench(_STEPS, script={"args": ["hold"]})
    runners.start()
    held = events.next(reached=5)
    until(lambda: len(records(folder)) == 5, "what was logged before the kill is stored")
    os.kill(held["pid"], signal.SIGKILL)
    assert runners.exits()[0].kind is ExitKind.SCRIPT_DIED
    assert runners.run()[0].kind is ExitKind.FINISHED
    found = records(folder)
    assert [(one.step, one.generation) for one in found] == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2)]
    there = [parsed.step for path in folder.glob("*.json") if (parsed := RecordName.parse(path.name)) is not None]
    assert sorted(there) == [1, 2, 3, 4, 5, 6], "the older record of a step that was done again is deleted"
    assert shown(found, folder) == expected


_CALLS = """
import multiprocessing, shoal

shoal.log(text={"before": "the first step"})
shoal.log(loss=1.0)
shoal.log(text={"after": "step 1"})
shoal.log(loss=0.5, text={"with": "step 2"})
shoal.log(images={"bad name": 3})
shoal.log(loss=0.25)
child = multiprocessing.get_context("fork").Process(target=shoal.log, kwargs={"text": {"child": "x"}})
child.start()
child.join()
"""


def test_a_call_without_step_belongs_to_the_step_of_the_call_before(
    bench: Bench, capfd: pytest.CaptureFixture[str]
) -> None:
    runners = bench(_CALLS)
    assert runners.run()[0].kind is ExitKind.FINISHED
    found = records(runners.checkpoints / FOLDER)
    assert [(one.step, one.texts[0].name) for one in found] == [(0, "before"), (1, "after"), (2, "with")]
    assert [(one.step, one.loss) for one in runners.reports(StepReport)] == [(1, 1.0), (2, 0.5), (3, 0.25)]
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("shoal.log")]
    assert len(said) == 1 and "'bad name' is not a name" in said[0], "what is wrong is said once in each process"


def test_a_script_whose_media_are_not_wanted_copies_nothing(bench: Bench) -> None:
    text = _STEPS + "\nassert 'shoal_workers.script.media' not in sys.modules\n"
    runners = bench(text, media={"enabled": False})
    assert runners.run()[0].kind is ExitKind.FINISHED
    assert records(runners.checkpoints / FOLDER) == []
