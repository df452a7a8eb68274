"""A frozen part of a model has no optimizer state, no gradient and no entry in the log, and keeps the state in shared
memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kit.worlds.snapshot_spec import snapshot_spec
from shoal_workers.contract.worker_reports import SnapshotCost

STEPS = 8
FROZEN = ({"match": "blocks.0.*", "frozen": True}, {"match": "embed.*", "frozen": True})
_PLAIN = snapshot_spec(STEPS)


def _spec(name: str = "adamw") -> dict[str, Any]:
    return {**_PLAIN, "optimizer": {"name": name, "lr": 0.02, "groups": list(FROZEN)}}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_kill_costs_no_completed_step_and_no_copy_is_made(
    make_job: Any, reference: Any, tmp_path: Path, optimizer: str
) -> None:
    """With adamw an update writes to the other buffer; with another elementwise optimizer the state is copied there."""
    spec = _spec(optimizer)
    job = make_job(memory=True, **spec)
    workers = job.workers(3)
    victim, survivors = workers[1], [workers[0], workers[2]]
    victim.strike("backward", 5, "kill")
    job.start(workers)
    assert victim.died()
    assert list(tmp_path.rglob("own-live-*"))
    assert not list(tmp_path.rglob("own-[0-9]*"))
    source = job.in_memory(job.interrupt(survivors), survivors)
    assert source.step == 5
    survivors[0].strike("forward", 7, "dump")
    job.finish(survivors, restore_snapshot=source)
    names = survivors[0].dumped()
    assert {"model.blocks.0.up.weight", "model.blocks.1.up.weight"} <= names.keys()
    assert not [name for name in names if name.startswith(("optim.blocks.0", "optim.embed"))]
    if optimizer == "adamw":
        assert "optim.blocks.1.up.weight.exp_avg" in names
    assert not [one.copies_reason for one in job.reported(survivors, SnapshotCost) if one.copies_reason]
    assert job.losses(survivors) == pytest.approx(reference(STEPS, **spec), abs=1e-5)


def test_both_buffers_have_the_frozen_parameters(make_job: Any, reference: Any) -> None:
    """Survivors that are a step ahead return to the buffer before."""
    spec = _spec()
    job = make_job(memory=True, **spec)
    workers = job.workers(3)
    victim, survivors = workers[1], [workers[0], workers[2]]
    victim.strike("optimizer", 4, "stop")
    for worker in survivors:
        worker.strike("forward", 5, "hold")
    generation = job.start(workers)
    for worker in (victim, *survivors):
        worker.reached()
    victim.kill()
    for worker in survivors:
        worker.call("interrupt", generation)
        worker.call("go")
    source = job.in_memory(job.interrupt(survivors), survivors)
    assert source.step == 4
    job.finish(survivors, restore_snapshot=source)
    assert job.losses(survivors) == pytest.approx(reference(STEPS, **spec), abs=1e-5)


def test_frozen_parameters_that_were_read_from_a_checkpoint_are_in_both_buffers(make_job: Any, reference: Any) -> None:
    """Values are read into one buffer; the first update writes the other one, from which the next group goes on."""
    spec = {**_spec(), "checkpoint": {"every_steps": 3}}
    job = make_job(memory=True, **spec)
    first = job.workers(2)
    first[0].strike("forward", 4, "hold")
    generation = job.start(first)
    job.wait_until_committed(first, 3)
    for worker in first:
        worker.call("interrupt", generation)
    first[0].call("go")
    job.interrupt(first)
    workers = job.workers(3)
    workers[2].strike("backward", 5, "kill")
    job.start(workers)
    assert workers[2].died()
    source = job.in_memory(job.interrupt(workers[:2]), workers[:2])
    assert source.step in (4, 5), "a survivor may not have ended the step before"
    job.finish(workers[:2], restore_snapshot=source)
    assert job.losses([*first, *workers]) == pytest.approx(reference(STEPS, **spec), abs=1e-5)
