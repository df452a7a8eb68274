"""Jobs with errors in build, in step 1, in step 50 or in their data fail soon and report the cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal_workers.contract.job import EndReason, JobState

TINY_LM = {
    "task": "shoal_workers.tasks.lm:LanguageModel",
    "code": {},
    "model": {"dim": 16, "num_layers": 1, "num_heads": 2, "seq_len": 16},
    "workers": 1,
}


def _describe(run: Any, *messages: str) -> tuple[Any, ...]:
    """Return of a failed job: reason, type, phase and ranks of its failure, attempts, and what is not reported."""
    status = run.finish(JobState.FAILED).status
    failure = status.failure
    assert failure is not None, status
    missing = [text for text in (failure.message, *messages) if text not in status.message]
    missing += [] if "Traceback" in failure.traceback else ["Traceback"]
    return status.reason, failure.type, failure.phase, failure.ranks, status.attempt, missing


@pytest.mark.first
def test_an_error_in_step_1_is_grouped_over_the_ranks_and_not_tried_again(submit: Any) -> None:
    run = submit(min_workers=2, strikes=[{"at": "step", "n": 1, "do": "raise"}])
    described = _describe(run, "no step was completed")
    assert described == (EndReason.USER_ERROR, "ValueError", "forward", (0, 1), 1, []), "no endless retry"
    status = run.now().status
    assert (status.step, status.failure.step) == (0, 0)
    assert "tiny.py" in status.failure.traceback and "in loss" in status.failure.traceback
    assert "/engine/" not in status.failure.traceback, "the user reads of the user's code"


def test_each_mistake_fails_its_job_with_its_cause(submit: Any, tmp_path: Path) -> None:
    """All jobs are submitted together, since most of their time is the start."""
    (tmp_path / "empty.txt").touch()
    late = submit(
        min_workers=2,
        steps=60,
        checkpoint={"every_steps": 20},
        strikes=[{"at": "step", "rank": 1, "n": 50, "do": "raise"}, {"at": "step", "n": 2, "do": "print"}],
    )
    storage = submit(workers=1, checkpoint={"url": str(tmp_path / "empty.txt" / "below")})
    module = submit(workers=1, task="nowhere:Tiny")
    cls = submit(workers=1, task="tiny:Tinny")
    build = submit(min_workers=2, strikes=[{"at": "build", "n": 1, "do": "raise"}])
    files = submit(**TINY_LM, data={"paths": [str(tmp_path / "nowhere" / "*.txt")]})
    text = submit(**TINY_LM, data={"paths": [str(tmp_path / "empty.txt")]})
    secret = submit(workers=1, secrets={"HUB_TOKEN": {"file": str(tmp_path / "nowhere")}})
    garbled = submit(workers=1, retry={"max_failures": 0}, strikes=[{"at": "step", "n": 3, "do": "garble"}])

    data = "shoal_workers.data.errors"
    described = {
        "module": _describe(module, "nowhere"),
        "class": _describe(cls, "tiny has no 'Tinny'", "Points, Tiny"),
        "files": _describe(files, "nowhere/*.txt"),
        "text": _describe(text),
        "build": _describe(build),
        "step 50": _describe(late),
    }
    error = EndReason.USER_ERROR
    assert described == {
        "module": (error, "ModuleNotFoundError", "preparing", (), 1, []),
        "class": (error, "AttributeError", "preparing", (), 1, []),
        "files": (error, f"{data}.MissingTextError", "preparing", (), 1, []),
        "text": (error, f"{data}.EmptyCorpusError", "preparing", (), 1, []),
        "build": (error, "ValueError", "building", (0, 1), 1, []),
        "step 50": (error, "ValueError", "forward", (1,), 2, []),
    }
    assert "in build_model" in build.now().status.failure.traceback
    assert late.now().status.step == 49
    assert late.events("generation.forming")[1].data["restore"] == "step-000000000040-a1-g1"
    for rank in (0, 1):
        lines = [line.text for line in late.client.logs(late.id, rank=rank) if line.stream == "stdout"]
        assert lines.count(f"hello from rank {rank} at step 2") == 1

    status = storage.finish(JobState.FAILED).status
    assert (status.reason, status.step) == (EndReason.STORAGE_FAILED, 0)
    assert str(Path("empty.txt") / "below") in status.message

    status = secret.finish(JobState.FAILED).status
    assert status.reason == error
    assert f"secrets.HUB_TOKEN: {tmp_path / 'nowhere'} cannot be read on this node" in status.message

    # A file name goes into an exception and into the log: neither the journal nor the database can store it as it is.
    status = garbled.finish(JobState.FAILED).status
    assert status.reason == error and status.failure.message == r"bad sample in caf\udce9.txt"
    assert r"cannot read caf\udce9.txt" in [line.text for line in garbled.client.logs(garbled.id)]
