"""`python -m shoal_workers.check_loop`: tries a loop, to find what it does not track.

    file        runs up to shoal.run(train), once; each trial is a fork of this process
    trials      run four steps, with two micro-batches each: see engine/loop/trials.py
    ... and three of them once more, if an epoch is short: the newcomer enters at its end, where callbacks are called

Standard input is the spec as JSON. The working directory is that of the code. The argument is an empty directory for
all of Shoal's files. Each line of standard output is a JSON object: {"phase": ...} when a trial begins, and at last
{"found": ...} or {"failed": ...}. `shoal check` runs this program.
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

from shoal_workers.contract import JobSpec, Phase
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.engine.engine import Engine
from shoal_workers.engine.generation_ends import TaskFailed
from shoal_workers.engine.loop.entry import load_function
from shoal_workers.engine.loop.proof import make_trial_spec
from shoal_workers.engine.loop.run import Run
from shoal_workers.engine.loop.trials import Crashed, TrialPlan, describe_failure, run_trials
from shoal_workers.engine.loop.verdict import NEWCOMER, REPEATED, SPLIT, SURVIVOR, UNDISTURBED, Trial
from shoal_workers.engine.process.packages import add_packages
from shoal_workers.engine.randomness import seed_everything
from shoal_workers.engine.task.user_code import make_error_report
from shoal_workers.training_thread import run_on_training_thread

ENTERED_AFTER, _STEPS_AFTER = 2, 2
_MAX_EPOCH_STEPS, _MAX_EPOCH_S = 64, 20.0
_MOST_MICRO_BATCHES = 1


def main() -> int:
    """Run the trials. Return exit status 1 if the loop fails, or does not track all of its state."""
    faulthandler.enable()
    directory = Path(sys.argv[1]).absolute()
    spec = parse_spec(json.load(sys.stdin))
    lines, sys.stdout = sys.stdout, sys.stderr  # what the loop prints does not belong to the answer
    torch.set_num_threads(1)  # the threads of a parallel region do not survive a fork
    importlib.import_module("torch._dynamo")  # the first optimizer would, in each trial

    def write_line(document: dict[str, Any]) -> None:
        lines.write(json.dumps(document) + "\n")
        lines.flush()

    write_line({"phase": "the file up to shoal.run", "note": ""})
    try:
        function = run_on_training_thread(lambda: _load_function(spec), lambda: None)
    except TaskFailed as error:
        write_line({"failed": describe_failure(error.report)})
        return 1
    findings: dict[str, Any] = {}
    entered_after: int | None = ENTERED_AFTER
    on_gpu = bool(spec.worker.gpus) and torch.cuda.is_available()
    is_split = spec.elasticity.max_workers > 1 and not on_gpu  # two ranks cannot have one GPU
    names = [UNDISTURBED, REPEATED, NEWCOMER, SURVIVOR, *([SPLIT] if is_split else [])]
    while entered_after is not None:
        folder = directory / f"after-{entered_after}"
        folder.mkdir()
        plan = TrialPlan(
            spec=make_trial_spec(spec, directory, entered_after=entered_after, on_gpu=on_gpu, in_memory=True),
            function=function,
            make_engine=Engine,
            directory=folder,
            entered_after=entered_after,
            steps_after=_STEPS_AFTER,
            most_micro_batches=_MOST_MICRO_BATCHES,
            is_silent=False,
            on_thread=run_on_training_thread,
        )
        try:
            new_findings, undisturbed = run_trials(
                plan, names, lambda name: write_line({"phase": f"the {name} trial", "note": ""})
            )
        except Crashed as crashed:
            if crashed.code < 0:
                os.kill(os.getpid(), -crashed.code)  # `shoal check` describes how the program has crashed
            return crashed.code
        if "failed" in new_findings:
            write_line(new_findings)
            return 1
        if not findings or len(undisturbed.losses) > entered_after:
            findings = new_findings
        entered_after = _find_end_of_epoch(undisturbed) if findings["is_whole"] and SURVIVOR in names else None
        names = names[:3]
    write_line({"found": findings})
    return 0 if findings["is_whole"] else 1


def _find_end_of_epoch(undisturbed: Trial) -> int | None:
    """Return the step that ends the first epoch; None if the trials would take too long to reach it."""
    steps = undisturbed.steps_per_epoch
    if steps is None or not ENTERED_AFTER < steps <= _MAX_EPOCH_STEPS:
        return None
    return steps if 3 * steps * undisturbed.step_s < _MAX_EPOCH_S else None


def _load_function(spec: JobSpec) -> Callable[[Run], None]:
    assert spec.loop is not None
    seed_everything(spec.seed)
    add_packages(spec.code, lambda text: None)
    try:
        return load_function(spec.loop)
    except (Exception, SystemExit) as error:
        raise TaskFailed(make_error_report(error, Phase.PREPARING, in_task_call=True)) from None


if __name__ == "__main__":
    sys.exit(main())
