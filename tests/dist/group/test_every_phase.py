"""A rank is killed or stopped at every phase of a generation that continues from a snapshot; the others leave, re-form
from memory, and end with the losses of the plain run."""

from __future__ import annotations

from typing import Any

import pytest

from shoal_workers.contract.messages import ExitKind

STEPS = 6
BEFORE = 2
SPEC: dict[str, Any] = {
    "batch": {"global_size": 8, "micro_size": 2},
    "optimizer": {"lr": 0.02},
    "stop": {"steps": STEPS},
    "checkpoint": {"every_steps": 100},
    "validation": {"samples": 0},
    "elasticity": {"max_workers": 4},
    "snapshot": {"budget": 1.0},
    "seed": 3,
}
LEFT = {ExitKind.STALE, ExitKind.INTERRUPTED, ExitKind.COLLECTIVE_FAILED, ExitKind.FORM_FAILED}
FORMING = ("forming", "connecting", "published", "building", "restoring")
TRAINING = ("forward", "backward", "optimizer", "snapshot")
SAMPLE = {("kill", "restoring"), ("stop", "optimizer"), ("kill", "snapshot")}


def _cells() -> list[Any]:
    cells = [(action, phase) for action in ("kill", "stop") for phase in FORMING + TRAINING]
    return [
        pytest.param(*cell, id="-".join(cell), marks=() if cell in SAMPLE else pytest.mark.matrix) for cell in cells
    ]


@pytest.mark.cells(1, 3)
@pytest.mark.parametrize(("action", "phase"), _cells())
def test_the_others_continue_without_a_rank_that_is_lost(
    make_job: Any, reference: Any, action: str, phase: str
) -> None:
    job = make_job(memory=True, **SPEC)
    workers = job.workers(4)
    victim, survivors = workers[1], [workers[0], *workers[2:]]
    workers[0].strike("forward", BEFORE - 1, "hold")
    generation = job.start(workers)
    workers[0].reached()
    workers[0].call("request_yield", generation, False)
    workers[0].call("go")
    source = job.in_memory([worker.exit() for worker in workers], workers)
    assert source.step == BEFORE

    step = 0 if phase in FORMING else BEFORE + 2
    victim.strike(phase, step, action)
    job.start(workers, restore_snapshot=source, collective_timeout_s=600.0)
    assert victim.died() if action == "kill" else victim.reached()
    exits = job.interrupt(survivors)
    assert {one.kind for one in exits} <= LEFT
    newest = job.in_memory(exits, survivors)
    assert newest.step >= max(BEFORE, step - 1), "one step is lost at most"
    job.finish(survivors, restore_snapshot=newest)
    assert job.losses(survivors) == pytest.approx(reference(STEPS, **SPEC), abs=1e-5)
