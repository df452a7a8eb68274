"""Scripts with the trainers and checkpoints of other libraries, as examples/gallery has them: a process is killed in
the middle, the group starts again, and each script goes on from its own checkpoint."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kit.processes.script_bench import ScriptBench
from kit.processes.server import until
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import StepReport

Bench = Callable[..., ScriptBench]
GALLERY = Path(__file__).parents[3] / "examples" / "gallery"
STEPS, KILLED_AFTER, SAVE_EVERY = 100, 50, 20


@dataclass(frozen=True)
class Case:
    name: str
    logs_every: int = 1
    launcher: str = "torchrun"
    sizes: tuple[int, int] = (2, 2)
    tolerance: float | None = 1e-6
    """Largest difference of the losses before and after the kill, of the steps that both groups have made; None: the
    library does not keep the order of the samples."""
    save_every: int = SAVE_EVERY


CASES = (
    Case("fsdp", sizes=(2, 1)),
    Case("accelerate", launcher="accelerate"),
    Case("trainer", logs_every=5),
    Case("lightning", logs_every=5, tolerance=None, save_every=10),
    Case("deepspeed", launcher="deepspeed_env", sizes=(2, 1)),
)


@pytest.mark.cells(1, 3)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_killed_script_goes_on_from_its_checkpoint(bench: Bench, case: Case) -> None:
    text = (GALLERY / case.name / "train.py").read_text(encoding="utf-8")
    runners = bench(text, 2, script={"args": [str(STEPS)], "launcher": case.launcher})
    runners.start(case.sizes[0])
    _wait_for_step(runners, KILLED_AFTER)
    os.kill(runners.runners[1].pid_of_script, signal.SIGKILL)
    assert runners.exit_of(1).kind is ExitKind.SCRIPT_DIED
    runners.interrupt()
    ends = runners.run(case.sizes[1])
    assert [end.kind for end in ends] == [ExitKind.FINISHED] * case.sizes[1], ends

    before, after = (_losses(runners, generation) for generation in (1, 2))
    assert max(after) == STEPS
    saved = min(after) - case.logs_every
    assert KILLED_AFTER - case.save_every <= saved and saved % case.save_every == 0, (
        "it went on from its last checkpoint"
    )
    repeated = before.keys() & after.keys()
    assert repeated and set(before) | set(after) == set(range(case.logs_every, STEPS + 1, case.logs_every))
    if case.tolerance is not None:
        assert {step: after[step] for step in repeated} == pytest.approx(
            {step: before[step] for step in repeated}, abs=case.tolerance
        )
    assert {one.total_steps for one in runners.reports(StepReport)} == {STEPS}


@pytest.mark.slow
def test_a_script_that_does_not_know_shoal_goes_on_and_its_event_files_are_shown(bench: Bench) -> None:
    steps, logs_every, save_every = 6_000, 10, 500
    text = (GALLERY / "python" / "train.py").read_text(encoding="utf-8")
    assert "shoal" not in text.lower().replace("shoal_checkpoint_dir", "").split('"""')[2]
    runners = bench(text, 1, script={"args": [f"--steps={steps}"], "launcher": "python"})
    runners.start()
    until((runners.checkpoints / "last.pt").exists, "its first checkpoint")
    os.kill(runners.runners[0].pid_of_script, signal.SIGKILL)
    assert runners.exit_of(0).kind is ExitKind.SCRIPT_DIED
    assert [end.kind for end in runners.run()] == [ExitKind.FINISHED]
    before, after = (_losses(runners, generation) for generation in (1, 2))
    assert max(after) == steps and (min(after) - logs_every) % save_every == 0 < min(after) - logs_every
    for step in before.keys() & after.keys():
        assert before[step] == after[step]
    assert {one.total_steps for one in runners.reports(StepReport)} == {None}
    assert [one.lr for one in runners.reports(StepReport)] == pytest.approx([3e-3] * (len(before) + len(after)))


def _wait_for_step(runners: ScriptBench, step: int) -> None:
    seq = 0
    while True:
        found = runners.outboxes[0].poll(seq, 60.0, runners.runners[0].progress, acknowledged=0)
        seq = found.seq
        if any(isinstance(one, StepReport) and one.step >= step for one in found.reports):
            return


def _losses(runners: ScriptBench, generation: int) -> dict[int, float]:
    reports = (one for one in runners.reports(StepReport) if one.generation == generation)
    return {one.step: one.loss for one in reports if one.loss is not None}
