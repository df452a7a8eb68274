"""Trainers in place lose a worker in the middle of an epoch and at its end: they train, stop and end as undisturbed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal_workers.contract.layout import replicated
from shoal_workers.contract.messages import ExitKind


def _run(make_job: Any, name: str, file: Path, *, kill_in: int | None) -> tuple[dict[int, float], Any]:
    """The losses by step, and what rank 0 has written at the end."""
    job = make_job(
        file.stem,
        memory=True,
        task=None,
        loop={"file": f"tests/kit/loops/{name}.py", "args": [str(file)]},
        elasticity={"max_workers": 4},
        snapshot={"budget": 1.0},
    )
    workers = job.workers(2)
    if kill_in is None:
        ends = job.run(workers, layout=replicated(2))
    else:
        source = job.lose(workers, workers[1], "backward", kill_in, layout=replicated(2))
        workers = workers[:1]
        ends = job.run(workers, layout=replicated(1), restore_snapshot=source)
    assert {end.kind for end in ends} == {ExitKind.FINISHED}, ends
    return job.losses(workers), json.loads(file.read_text())


UNDISTURBED = {
    "lightning_epochs": [16, 4, [0, 1, 2, 3], 4, 15],
    "trainer_stops": [16, [1.0, 2.0, 3.0, 4.0], 4, 0.2, [5.8, 5.5, 5.2, 4.9, 4.6], 10],
}


@pytest.mark.parametrize("name", ["lightning_epochs", "trainer_stops"])
def test_a_trainer_that_loses_a_worker_ends_as_the_undisturbed_one(make_job: Any, tmp_path: Path, name: str) -> None:
    losses, ended = _run(make_job, name, tmp_path / "whole.json", kill_in=None)
    assert len(losses) == 16 and ended == UNDISTURBED[name]
    assert [path.name for path in tmp_path.glob("*-saved-by-*")] == ["whole.json-saved-by-0"], "all ranks call it"
    for kill_in in (6, 8, 11):  # in the middle of an epoch, in its first step, in its last one
        again = _run(make_job, name, tmp_path / f"killed-{kill_in}.json", kill_in=kill_in)
        assert again == (pytest.approx(losses, abs=5e-7), ended), kill_in
