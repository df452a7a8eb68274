"""Ranks that read different data form no group; a job goes on only with its own data, a job made with --from with any.

A worker of the same job reads something else: as after an edit of the files between two attempts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal_workers.checkpoint.reader import read_catalogue
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import GroupFormed, StepReport

SPEC: dict[str, Any] = {"task": "hashed_tasks:Hashed", "stop": {"steps": 3}, "checkpoint": {"every_steps": 3}}


def _spec(tmp_path: Path, *contents: str, **more: Any) -> dict[str, Any]:
    taken = tmp_path / "taken" / "-".join(contents)
    taken.mkdir(parents=True)
    return {**SPEC, "data": {"contents": contents, "taken": str(taken)}, **more}


def test_ranks_with_different_data_end_before_the_first_step(make_job: Any, tmp_path: Path) -> None:
    job = make_job("job", **_spec(tmp_path, "old", "new"))
    group = job.workers(2)
    ends = job.run(group)
    assert [end.kind for end in ends] == [ExitKind.USER_ERROR] * 2
    messages = {end.error.message for end in ends if end.error is not None}
    assert len(messages) == 1, "every rank says the same"
    (message,) = messages
    assert "Rank 1 on 127.0.0.1 reads other data than rank 0 on 127.0.0.1: numbers.bin is not numbers.bin." in message
    assert not job.reported(group, StepReport)


def test_a_job_goes_on_with_its_own_data_only_and_a_new_job_with_any(make_job: Any, tmp_path: Path) -> None:
    first = make_job("first", **_spec(tmp_path, "old"))
    assert [end.kind for end in first.run(first.workers(1))] == [ExitKind.FINISHED]
    url = first.committed[-1]
    assert read_catalogue(url)[1]["data"] == "old"

    changed = make_job("changed", **_spec(tmp_path, "new", stop={"steps": 5}))
    (end,) = changed.run(changed.workers(1), restore_from=url)
    assert end.kind is ExitKind.USER_ERROR and end.error is not None
    assert "The data of this job has changed since step 3: its content hash was old, now new" in end.error.message

    origin = {"job": "first", "step": 3, "checkpoint": Path(url).name, "url": url}
    other = make_job("other", **_spec(tmp_path, "newer", stop={"steps": 5}, continue_from=origin))
    group = other.workers(1)
    (end,) = other.run(group, restore_from=url)
    assert (end.kind, end.step) == (ExitKind.FINISHED, 5), end.error
    (formed,) = other.reported(group, GroupFormed)
    assert (formed.data, formed.data_before) == ("newer", "old")
