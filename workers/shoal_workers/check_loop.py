"""`python -m shoal_workers.check_loop`: tries a loop on one machine, to find what it does not track.

    file        runs up to shoal.run(train), once; each trial is a fork of what it leaves
    trials      of four steps, with two micro-batches each: see engine/loop/trials.py
    ... and three of them once more, if an epoch is short: with the newcomer at its end, where callbacks are called

Standard input is the spec as JSON, the working directory that of the code; the argument is an empty directory, where
all of Shoal's files are. Each line of standard output is a JSON object: {"phase": ...} when a trial begins, and at last
{"found": ...} or {"failed": ...}. Called by `shoal check`.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.messages import Phase
from shoal_workers.contract.spec import JobSpec
from shoal_workers.engine.engine import Engine
from shoal_workers.engine.generation_ends import TaskFailed
from shoal_workers.engine.loop.entry import function_of
from shoal_workers.engine.loop.proof import reduced
from shoal_workers.engine.loop.run import Run
from shoal_workers.engine.loop.trials import Crashed, Plan, describe_failure, run_trials
from shoal_workers.engine.loop.verdict import NEWCOMER, REPEATED, SPLIT, SURVIVOR, UNDISTURBED, Trial
from shoal_workers.engine.process.packages import add_packages
from shoal_workers.engine.task.randomness import seed_everything
from shoal_workers.engine.task.user_code import report_of
from shoal_workers.training_thread import on_training_thread

ENTERED_AFTER, _STEPS_AFTER = 2, 2
_LONGEST_EPOCH, _LONGEST_EPOCH_S = 64, 20.0
_MOST_MICRO_BATCHES = 1


def main() -> int:
    """Exit status 1 if the loop fails, or does not track all of its state."""
    faulthandler.enable()
    directory = Path(sys.argv[1]).absolute()
    spec = parse_spec(json.load(sys.stdin))
    lines, sys.stdout = sys.stdout, sys.stderr  # what the loop prints does not belong to the answer
    torch.set_num_threads(1)  # the threads of a parallel region do not survive a fork
    importlib.import_module("torch._dynamo")  # the first optimizer would, in each trial

    def say(document: dict[str, Any]) -> None:
        lines.write(json.dumps(document) + "\n")
        lines.flush()

    say({"phase": "the file up to shoal.run", "note": ""})
    try:
        function = on_training_thread(lambda: _function_of(spec), lambda: None)
    except TaskFailed as error:
        say({"failed": describe_failure(error.report)})
        return 1
    findings: dict[str, Any] = {}
    entered_after: int | None = ENTERED_AFTER
    on_gpu = bool(spec.worker.gpus) and torch.cuda.is_available()
    is_split = spec.elasticity.max_workers > 1 and not on_gpu  # two ranks cannot have one GPU
    names = [UNDISTURBED, REPEATED, NEWCOMER, SURVIVOR, *([SPLIT] if is_split else [])]
    while entered_after is not None:
        folder = directory / f"after-{entered_after}"
        folder.mkdir()
        plan = Plan(
            spec=reduced(spec, directory, entered_after=entered_after, on_gpu=on_gpu, in_memory=True),
            function=function,
            make_engine=Engine,
            directory=folder,
            entered_after=entered_after,
            steps_after=_STEPS_AFTER,
            most_micro_batches=_MOST_MICRO_BATCHES,
            is_silent=False,
            on_thread=on_training_thread,
        )
        try:
            newest, whole = run_trials(plan, names, lambda name: say({"phase": f"the {name} trial", "note": ""}))
        except Crashed as crashed:
            if crashed.code < 0:
                os.kill(os.getpid(), -crashed.code)  # `shoal check` says how the program has crashed
            return crashed.code
        if "failed" in newest:
            say(newest)
            return 1
        if not findings or len(whole.losses) > entered_after:
            findings = newest
        entered_after = _end_of_epoch(whole) if findings["is_whole"] and SURVIVOR in names else None
        names = names[:3]
    say({"found": findings})
    return 0 if findings["is_whole"] else 1


def _end_of_epoch(whole: Trial) -> int | None:
    """The step that ends the first epoch, if it can be reached soon."""
    steps = whole.steps_per_epoch
    if steps is None or not ENTERED_AFTER < steps <= _LONGEST_EPOCH:
        return None
    return steps if 3 * steps * whole.step_s < _LONGEST_EPOCH_S else None


def _function_of(spec: JobSpec) -> Callable[[Run], None]:
    assert spec.loop is not None
    seed_everything(spec.seed)
    add_packages(spec.code, lambda text: None)
    try:
        return function_of(spec.loop)
    except (Exception, SystemExit) as error:
        raise TaskFailed(report_of(error, Phase.PREPARING, in_task_call=True)) from None


if __name__ == "__main__":
    sys.exit(main())
