"""The package `shoal` in a script: its values become step reports, and it never disturbs the script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from kit.processes.script_bench import Events, ScriptBench
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import StepReport

Bench = Callable[..., ScriptBench]

_LOGS = """
import os, shoal
import numpy, torch

rank = int(os.environ["RANK"])
weight = torch.ones(1, requires_grad=True)
for step in range(5, 8):
    shoal.log(
        step, (weight * step).sum() + 100 * rank, lr=numpy.float32(0.5), tokens=torch.tensor(64), total_steps=7,
        accuracy=1, wrong="text", matrix=torch.ones(2, 2),
    )
assert shoal.checkpoint_dir() == os.environ["SHOAL_CHECKPOINT_DIR"]
assert os.path.isdir(shoal.checkpoint_dir())
"""


def test_the_steps_of_rank_0_are_reported(bench: Bench) -> None:
    runners = bench(_LOGS, 2)
    assert [end.kind for end in runners.run()] == [ExitKind.FINISHED] * 2
    reports = runners.reports(StepReport)
    assert [(one.step, one.loss, one.generation, one.world_size) for one in reports] == [
        (step, float(step), 1, 2) for step in (5, 6, 7)
    ]
    assert {(one.lr, one.tokens, one.total_steps, one.grad_norm) for one in reports} == {(0.5, 64, 7, None)}
    assert reports[0].metrics == {"accuracy": 1.0}
    assert runners.reports(StepReport, rank=1) == []
    assert runners.said() == [
        "shoal.log: wrong is not a number, and is left out.",
        "shoal.log: matrix is not a number, and is left out.",
    ]
    assert [runner.progress.step for runner in runners.runners] == [7, 7]


def test_a_process_that_the_script_has_started_logs_too(bench: Bench) -> None:
    text = """
import multiprocessing, shoal
shoal.log(step=1)
child = multiprocessing.get_context("fork").Process(target=shoal.log, args=(2,))
child.start()
child.join()
"""
    runners = bench(text)
    assert runners.run()[0].kind is ExitKind.FINISHED
    assert [one.step for one in runners.reports(StepReport)] == [1, 2]


def test_logging_shows_that_a_script_goes_on(bench: Bench, events: Events) -> None:
    runners = bench("import events, shoal\nshoal.log(step=3)\nevents.say(ready=True)\nevents.wait()")
    runners.start()
    events.next(ready=True)
    runners.outboxes[0].poll(1, 60.0, runners.runners[0].progress)  # GroupFormed is the first one
    assert runners.runners[0].progress.step == 3


_WRITES = """
import sys
import shoal
from tensorboardX import SummaryWriter

writer = SummaryWriter("runs/first")
for step in (1, 2, 3):
    writer.add_scalar("train/loss", step / 2, step)
    writer.add_scalar("train/lr", 0.25, step)
if "hook" in sys.argv:
    shoal.log(step=7, loss=7.0)
writer.close()
"""
_OF_FILES, _OF_THE_HOOK = [(1, 0.5, 0.25), (2, 1.0, 0.25), (3, 1.5, 0.25)], [(7, 7.0, None)]


@pytest.mark.parametrize(
    ("progress", "args", "expected"),
    [
        ("auto", [], _OF_FILES),
        ("auto", ["hook"], _OF_THE_HOOK),
        ("tensorboard", ["hook"], _OF_FILES),
        ("hook", ["hook"], _OF_THE_HOOK),
        ("hook", [], []),
        ("none", ["hook"], []),
    ],
)
@pytest.mark.cells(3, 6)
def test_event_files_are_read_unless_the_script_says_more_itself(
    bench: Bench, progress: str, args: list[str], expected: list[tuple[int, float, float | None]]
) -> None:
    runners = bench(_WRITES, script={"progress": progress, "args": args})
    assert runners.run()[0].kind is ExitKind.FINISHED
    assert [(one.step, one.loss, one.lr) for one in runners.reports(StepReport)] == expected
    assert runners.said() == []


@pytest.mark.slow
def test_event_files_are_read_while_the_script_runs_and_only_those_of_its_generation(
    bench: Bench, events: Events
) -> None:
    runners = bench(_WRITES + "import events; events.say(written=True); events.wait()")
    for generation in (1, 2):
        runners.start()
        events.next(written=True)
        seq, steps = 0, []
        while steps[-3:] != [1, 2, 3]:
            found = runners.outboxes[0].poll(seq, 60.0, runners.runners[0].progress, acknowledged=0)
            seq = found.seq
            reports = [one for one in found.reports if isinstance(one, StepReport)]
            steps += [one.step for one in reports if one.generation == generation]
        assert steps == [1, 2, 3]
        assert runners.interrupt()[0].kind is ExitKind.INTERRUPTED


_ELSEWHERE = """
import json, sys, time
before = set(sys.modules)
import shoal
begin = time.perf_counter()
for step in range(3):
    shoal.log(step=step, loss=object(), whatever="text")
print(json.dumps({"dir": shoal.checkpoint_dir(), "foreign": [n for n in sys.modules if n.startswith("shoal_")]}))
"""


@pytest.mark.parametrize("hook", ["", "@shoal-script-nobody-listens"])
def test_elsewhere_it_does_nothing(hook: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ELSEWHERE],
        env=os.environ | {"SHOAL_HOOK": hook},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == {"dir": None, "foreign": []}
    assert done.stderr.count("\n") == (1 if hook else 0), "a worker that has gone is said once"
