"""A data set whose samples differ when they are read again is found before the first update."""

from __future__ import annotations

from typing import Any

from shoal_workers.contract.messages import ExitKind, ProofDemand

SPEC: dict[str, Any] = {
    "task": "read_ahead_tasks:OwnGenerator",
    "batch": {"global_size": 8, "micro_size": 4},
    "optimizer": {"lr": 0.02},
    "stop": {"steps": 2},
    "checkpoint": {"every_steps": None},
    "validation": {"samples": 0},
    "elasticity": {"max_workers": 2},
}
FOUND = "a micro-batch had other samples when it was read again with the same seeds"


def test_it_is_said_once_and_refused_if_the_job_is_deterministic(make_job: Any) -> None:
    wrong = []
    for changes in ({}, {"batch": {**SPEC["batch"], "num_workers": 1}}, {"task": "read_ahead_tasks:Seeded"}):
        job = make_job(f"said-{len(wrong)}-{len(changes)}-{len(str(changes))}", **{**SPEC, **changes})
        [worker] = job.workers(1)
        job.start([worker])
        end = worker.exit()
        said = [line.text for line in worker.new_logs() if FOUND in line.text]
        job.commit([worker])
        if end.kind is not ExitKind.FINISHED or len(said) != ("task" not in changes):
            wrong.append((changes, end, said))
    assert wrong == []
    job = make_job("layout", **{**SPEC, "model": {"dropout": 0}})
    ends = job.run(job.workers(2), proof=ProofDemand.REQUIRED)
    assert all("the layout fsdp2 was not proven: read_ahead_tasks.py" in end.error.message for end in ends)
    assert all(FOUND in end.error.message for end in ends), "it is not the layout that differs"
    job = make_job("refused", **{**SPEC, "deterministic": True})
    [end] = job.run(job.workers(1))
    assert (end.kind, end.step) == (ExitKind.USER_ERROR, 0)
    assert FOUND in end.error.message and "read_ahead_tasks.py" in end.error.message
    assert end.error.message.endswith("or leave deterministic out.")
