"""What a loop changes of its modules comes back after a restore, and an optimizer may be made of a set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kit.worlds import plain_loop
from shoal_workers.contract.layout import replicated
from shoal_workers.contract.messages import ExitKind

ROOT = Path(__file__).parents[3]
FILE = ROOT / "tests" / "kit" / "loops" / "late.py"
STEPS = 6
SAVED_AFTER = 4
"""When the change is a step old."""


def spec_of(how: str) -> dict[str, Any]:
    return {
        "task": None,
        "loop": {"file": str(FILE.relative_to(ROOT)), "args": [how]},
        "elasticity": {"max_workers": plain_loop.MOST_WORKERS},
        "checkpoint": {"every_steps": SAVED_AFTER},
        "snapshot": {"budget": 1.0},
    }


@pytest.mark.cells(7, 7)
@pytest.mark.parametrize("how", ["set", "unfrozen", "evaluating", "dropout", "momentum", "two_optimizers", "own_data"])
def test_two_workers_and_a_new_worker_that_goes_on_alone_train_as_plain_torch_does(make_job: Any, how: str) -> None:
    plain = plain_loop.undisturbed(FILE, how)[0]
    job = make_job(**spec_of(how))
    workers = job.workers(2)
    ends = job.run(workers, layout=replicated(2))
    assert [end.kind for end in ends] == [ExitKind.FINISHED] * 2, ends
    assert job.losses(workers) == pytest.approx(plain, abs=3e-7)
    [early] = [directory for directory in job.committed if f"step-{SAVED_AFTER:012d}" in directory]
    resumed = make_job("resumed", **spec_of(how))
    [end] = resumed.run(alone := resumed.workers(1), layout=replicated(1), restore_from=early)
    assert end.kind is ExitKind.FINISHED, end
    assert resumed.losses(alone) == pytest.approx({step: plain[step] for step in (5, 6)}, abs=3e-7)


def test_what_is_not_tracked_and_has_no_effect_in_the_first_steps_is_said_once(make_job: Any) -> None:
    job = make_job(**spec_of("bank"))
    [worker] = job.workers(1)
    [end] = job.run([worker], layout=replicated(1))
    assert end.kind is ExitKind.FINISHED, end
    said = [line.text for line in worker.logs if "not tracked, and not the same after a restore" in line.text]
    assert len(said) == 1 and "bank (late.py:" in said[0], said


def test_a_step_on_data_of_its_own_must_be_committed_before_a_forward_pass_changes_buffers(make_job: Any) -> None:
    job = make_job(**spec_of("own_data_norm"))
    [end] = job.run(job.workers(1), layout=replicated(1))
    assert end.kind is ExitKind.USER_ERROR and end.error is not None
    assert "Call run.commit() at the end of each step, or read the data with run.batches()." in end.error.message
