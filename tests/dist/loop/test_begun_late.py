"""What a loop does not track and begins to use after the first steps: it ends with its name, or goes on rightly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kit.worlds import plain_loop
from shoal_workers.contract.layout import replicated
from shoal_workers.contract.messages import ExitKind

ROOT = Path(__file__).parents[3]
FILE = ROOT / "tests" / "kit" / "loops" / "begun_late.py"
SOON = {
    "mixup": "mixing",
    "numpy": "noise",
    "python": "draws",
    "teacher": "",
    "masks": "masks",
    "lookahead": "ahead.slow",
    "schedule": "schedule",
    "history": "history",
    "deque": "",
    "global": "COUNTED",
}
"""What shows in the late trials of the proof, and the name that is said."""
LATER = {
    "teacher": "teacher",
    "masks": "masks",
    "lookahead": "ahead.slow",
    "schedule": "schedule",
    "ema": "ema.shadow",
    "average": "averaged",
    "best_weights": "best_weights",
}
"""What a state says that holds something else than a restored program does."""
HARMLESS = (
    "plot",
    "clock",
    "metrics",
    "confusion",
    "logger",
    "loader",
    "seeded",
    "accepted",
    "frozen",
    "remade",
    "strange",
)


def spec_of(how: str, begin: int, steps: int) -> dict[str, Any]:
    return {
        "task": None,
        "loop": {"file": str(FILE.relative_to(ROOT)), "args": [how, str(begin), str(steps)]},
        "elasticity": {"max_workers": plain_loop.MOST_WORKERS},
        "snapshot": {"budget": 1.0},
    }


def lose_a_worker(make_job: Any, how: str, begin: int, *, step: int, steps: int) -> tuple[Any, list[Any], Any]:
    """Return the job, the workers of its second group and their end, after a kill in this step."""
    job = make_job(memory=True, **spec_of(how, begin, steps))
    workers = job.workers(2)
    workers[1].strike("forward", step, "kill")
    job.start(workers, layout=replicated(2))
    assert workers[1].died()
    source = job.in_memory(job.interrupt(workers[:1]), workers[:1])
    assert source.step >= step - 1
    [end] = job.run(workers[:1], layout=replicated(1), restore_snapshot=source)
    return job, workers[:1], end


@pytest.mark.cells(3, 10)
@pytest.mark.parametrize("how", SOON)
def test_what_begins_soon_is_refused_before_the_third_step(make_job: Any, how: str) -> None:
    job = make_job(**spec_of(how, 4, 24))
    workers = job.workers(1)
    [end] = job.run(workers, layout=replicated(1))
    assert end.kind is ExitKind.USER_ERROR and end.error is not None, end
    assert "this loop trains another model after a restore" in end.error.message
    assert SOON[how] in end.error.message and "Two ways out: " in end.error.message
    assert max(job.losses(workers)) <= 3


@pytest.mark.cells(3, 7)
@pytest.mark.parametrize("how", LATER)
def test_what_begins_later_is_said_and_ends_a_restore_with_its_name(make_job: Any, how: str) -> None:
    _, [worker], end = lose_a_worker(make_job, how, 19, step=22, steps=26)
    said = [line.text for line in worker.logs if "is not tracked, and has changed" in line.text]
    assert len(said) == 1 and f"{LATER[how]} (begun_late.py:" in said[0], said
    assert end.kind is ExitKind.USER_ERROR and end.error is not None, end
    missing = [part for part in (f"{LATER[how]} (begun_late.py:", "Two ways out: ") if part not in end.error.message]
    assert missing == [], end.error.message


@pytest.mark.cells(1, 3)
@pytest.mark.parametrize(("how", "name"), [("mixup", "mixing"), ("numpy", "noise"), ("python", "draws")])
def test_a_restore_says_which_generators_begin_anew(make_job: Any, how: str, name: str) -> None:
    """They may be those of a validation: the job goes on."""
    _, [worker], end = lose_a_worker(make_job, how, 19, step=22, steps=26)
    assert end.kind is ExitKind.FINISHED, end
    [said] = [line.text for line in worker.logs if "changed before this restore" in line.text]
    assert f"{name} (begun_late.py:" in said, said


@pytest.mark.cells(3, 11)
@pytest.mark.parametrize("how", HARMLESS)
def test_what_the_model_does_not_depend_on_stops_no_job(make_job: Any, how: str) -> None:
    job, workers, end = lose_a_worker(make_job, how, 5, step=9, steps=12)
    assert end.kind is ExitKind.FINISHED, end
    plain = plain_loop.undisturbed(FILE, how, "5", "12")[0]
    losses = job.losses(workers)
    assert losses.keys() >= {10, 11, 12}
    assert losses == pytest.approx({step: plain[step] for step in losses}, abs=3e-7)
    said = [line.text for line in workers[0].logs if "changed before this restore" in line.text]
    assert len(said) == 1 and "history (begun_late.py:" in said[0], said
