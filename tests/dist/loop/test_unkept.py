"""What a loop keeps outside of what it tracks, or does to gradients, trains as plain torch does, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kit.worlds import plain_loop
from shoal_workers.contract.layout import replicated
from shoal_workers.contract.messages import ExitKind

ROOT = Path(__file__).parents[3]
FILE = ROOT / "tests" / "kit" / "loops" / "unkept.py"
AFTER_A_RESTORE = "trains another model after a restore: in step 2"
WITH_TWO_WORKERS = "with two workers this loop trains another model than in one process: in step 1"
REFUSED = {
    "data": ("a micro-batch had other samples", "a sample changes: 'generator' of Points (unkept.py:"),
    "data_processes": ("a micro-batch had other samples", "a sample changes: 'generator' of Points (unkept.py:"),
    **dict.fromkeys(("clip", "zero", "clip_once"), (WITH_TWO_WORKERS, "run.steps(optimizer, clip=...)")),
    **dict.fromkeys(("clip_by_hand", "clip_value"), (WITH_TWO_WORKERS, "run.steps(optimizer, clip=...)")),
}
REFUSED |= {
    how: (AFTER_A_RESTORE, f"{name} (unkept.py:")
    for how, name in {
        "buffer": "model.mean",
        "listed": "optimizer.rates.all",
        "number": "number",
        "tensor": "center",
        "object": "kept.value",
        "list": "rows",
        "count": "count",
        "global": "GLOBAL",
        "rate": "rate",
        "generator": "noise",
        "iterator": "offsets, an iterator",
        "method": "kept.value",
        "module": "model.scale",
        "teacher": "teacher.weight",
    }.items()
}
EQUAL = ("nothing", "optimizer", "saving", "scaled", "centred", "seeded", "recomputed")
"""The last three were refused by how they are spelled."""
RANKS_ONLY = {"clip_late": ("by another factor on each rank", "run.steps(optimizer, clip=...)")}
"""What begins after the steps that are proven."""


def spec_of(how: str) -> dict[str, Any]:
    return {
        "task": None,
        "loop": {"file": str(FILE.relative_to(ROOT)), "args": [how]},
        "elasticity": {"max_workers": plain_loop.MOST_WORKERS},
        "snapshot": {"budget": 1.0},
    }


@pytest.mark.cells(42, 42)
@pytest.mark.parametrize("world_size", [2, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", [*REFUSED, *RANKS_ONLY])
def test_it_is_refused_with_its_name_the_line_and_two_ways_out(make_job: Any, how: str, world_size: int) -> None:
    words = (REFUSED | (RANKS_ONLY if world_size > 1 else {})).get(how)
    job = make_job(**spec_of(how))
    [end, *_] = job.run(job.workers(world_size), layout=replicated(world_size))
    if words is None:  # what one worker does as plain torch does
        assert end.kind is ExitKind.FINISHED, end
        return
    assert end.kind is ExitKind.USER_ERROR, end
    missing = [part for part in (*words, "wo ways out: ") if part not in end.error.message]
    assert missing == [], end.error.message


@pytest.mark.cells(14, 14)
@pytest.mark.parametrize("world_size", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", EQUAL)
def test_what_is_only_logged_or_saved_or_right_trains_as_plain_torch_does(
    make_job: Any, how: str, world_size: int
) -> None:
    job = make_job(**spec_of(how))
    workers = job.workers(world_size)
    ends = job.run(workers, layout=replicated(world_size))
    assert [end.kind for end in ends] == [ExitKind.FINISHED] * world_size, ends
    assert job.losses(workers) == pytest.approx(plain_loop.undisturbed(FILE, how)[0], abs=3e-7)


@pytest.mark.parametrize("how", ["optimizer", "saving"])
def test_a_number_of_an_own_optimizer_outlives_a_lost_worker(make_job: Any, how: str) -> None:
    job = make_job(memory=True, **spec_of(how))
    workers = job.workers(2)
    workers[1].strike("forward", 3, "kill")
    job.start(workers, layout=replicated(2))
    assert workers[1].died()
    source = job.in_memory(job.interrupt(workers[:1]), workers[:1])
    assert source.step >= 2
    [end] = job.run(workers[:1], layout=replicated(1), restore_snapshot=source)
    assert end.kind is ExitKind.FINISHED, end
    losses, plain = job.losses(workers[:1]), plain_loop.undisturbed(FILE, how)[0]
    assert losses.keys() >= {4, 5, 6}
    assert losses == pytest.approx({step: plain[step] for step in losses}, abs=3e-7)


def test_a_clip_that_begins_right_after_a_restore_is_refused_as_at_any_other_time(make_job: Any) -> None:
    """The first updates of a group that goes on from another one's state are not the proven ones."""
    job = make_job(memory=True, **spec_of("clip_late"))
    workers = job.workers(3)
    workers[2].strike("forward", 3, "kill")
    job.start(workers, layout=replicated(3))
    assert workers[2].died()
    source = job.in_memory(job.interrupt(workers[:2]), workers[:2])
    assert source.step >= 2
    [end, *_] = job.run(workers[:2], layout=replicated(2), restore_snapshot=source)
    assert end.kind is ExitKind.USER_ERROR, end
    assert [part for part in RANKS_ONLY["clip_late"] if part not in end.error.message] == []
