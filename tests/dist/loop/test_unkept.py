"""What a loop keeps outside of what it tracks trains as plain torch does, also after a lost worker, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kit.worlds import plain_loop
from shoal_workers.contract.layout import replicated
from shoal_workers.contract.messages import ExitKind

ROOT = Path(__file__).parents[3]
FILE = ROOT / "tests" / "kit" / "loops" / "unkept.py"
REFUSED = {
    "buffer": ("the buffer model.mean (unkept.py:", "register it with persistent=True"),
    "listed": ("step() of Listing changes \"rates['all']\" (unkept.py:", "numbers as attributes of the optimizer"),
    "clip": ("change between two micro-batches of a step", "run.steps(optimizer, clip=...)"),
    "zero": ("change between two micro-batches of a step", "run.steps(optimizer, clip=...)"),
    "data": ("a micro-batch had other samples", "a sample changes: 'generator' of Points (unkept.py:"),
    "data_processes": ("a micro-batch had other samples", "a sample changes: 'generator' of Points (unkept.py:"),
}
EQUAL = ("nothing", "optimizer", "saving", "scaled")
REFUSED |= {
    how: (f"{name} (", "unkept.py:", "changes from step to step, the loss or the learning rate depends on it")
    for how, name in {
        "number": "number",
        "tensor": "center",
        "object": "kept.value",
        "list": "rows",
        "count": "count",
        "global": "GLOBAL",
        "rate": "rate",
        "generator": "noise",
        "iterator": "offsets",
        "method": "kept.value",
        "module": "model.scale",
        "teacher": "teacher",
    }.items()
}
RANKS_ONLY = {
    "clip_once": ("by another factor on each rank", "run.steps(optimizer, clip=...)"),
    "clip_by_hand": ("by another factor on each rank", "run.steps(optimizer, clip=...)"),
    "clip_value": ("by another factor on each rank", "run.steps(optimizer, clip=...)"),
}
"""What one rank does as plain torch does."""


def spec_of(how: str) -> dict[str, Any]:
    return {
        "task": None,
        "loop": {"file": str(FILE.relative_to(ROOT)), "args": [how]},
        "elasticity": {"max_workers": plain_loop.MOST_WORKERS},
        "snapshot": {"budget": 1.0},
    }


@pytest.mark.parametrize("world_size", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_it_is_refused_with_its_name_the_line_and_two_ways_out(make_job: Any, world_size: int) -> None:
    differing = []
    for how, words in (REFUSED | (RANKS_ONLY if world_size > 1 else {})).items():
        job = make_job(how, **spec_of(how))
        [end, *_] = job.run(job.workers(world_size), layout=replicated(world_size))
        message = end.error.message if end.error is not None else ""
        if end.kind is not ExitKind.USER_ERROR or not all(part in message for part in (*words, "wo ways out: ")):
            differing.append((how, end.kind, message))
    assert differing == []


@pytest.mark.parametrize("world_size", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_what_is_only_logged_or_saved_trains_as_plain_torch_does(make_job: Any, world_size: int) -> None:
    for how in EQUAL:
        job = make_job(how, **spec_of(how))
        workers = job.workers(world_size)
        ends = job.run(workers, layout=replicated(world_size))
        assert [end.kind for end in ends] == [ExitKind.FINISHED] * world_size, (how, ends)
        assert job.losses(workers) == pytest.approx(plain_loop.undisturbed(FILE, how)[0], abs=3e-7), how


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
