"""Jobs with errors in build, in step 1, in step 50 or in their data fail soon and report the cause."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal_service.views import JobView
from shoal_workers.contract.job import EndReason, JobState

TINY_LM = {
    "task": "shoal_workers.tasks.lm:LanguageModel",
    "code": {},
    "model": {"dim": 16, "num_layers": 1, "num_heads": 2, "seq_len": 16},
}


@pytest.fixture(scope="module")
def bad(submit_for_module: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """`bad(name)`: a run that has failed. All jobs are submitted together, since most of their time is the start."""
    files = tmp_path_factory.mktemp("files")
    (files / "empty.txt").touch()
    submit = submit_for_module
    runs = {
        "step 50 of rank 1": submit(
            min_workers=2,
            steps=60,
            checkpoint={"every_steps": 20},
            strikes=[{"at": "step", "rank": 1, "n": 50, "do": "raise"}, {"at": "step", "n": 2, "do": "print"}],
        ),
        "no module": submit(workers=1, task="nowhere:Tiny"),
        "no class": submit(workers=1, task="tiny:Tinny"),
        "build": submit(min_workers=2, strikes=[{"at": "build", "n": 1, "do": "raise"}]),
        "step 1": submit(min_workers=2, strikes=[{"at": "step", "n": 1, "do": "raise"}]),
        "no files": submit(workers=1, **TINY_LM, data={"paths": [str(files / "nowhere" / "*.txt")]}),
        "no text": submit(workers=1, **TINY_LM, data={"paths": [str(files / "empty.txt")]}),
        "no storage": submit(workers=1, checkpoint={"url": str(files / "empty.txt" / "below")}),
    }

    def ended(name: str) -> Any:
        runs[name].finish(JobState.FAILED)
        return runs[name]

    return ended


def _failed(run: Any, error: str, phase: str, ranks: tuple[int, ...], attempts: int = 1) -> JobView:
    job: JobView = run.now()
    failure = job.status.failure
    assert failure is not None, job.status
    assert job.status.reason == EndReason.USER_ERROR
    assert (failure.type, failure.phase, failure.ranks) == (error, phase, ranks)
    assert failure.message in job.status.message
    assert job.status.attempt == attempts, "no endless retry"
    assert "Traceback" in failure.traceback
    return job


def test_a_module_that_is_not_there(bad) -> None:
    job = _failed(bad("no module"), "ModuleNotFoundError", "preparing", ())
    assert "nowhere" in job.status.message


@pytest.mark.matrix
def test_a_class_that_is_not_there(bad) -> None:
    job = _failed(bad("no class"), "AttributeError", "preparing", ())
    assert "tiny has no 'Tinny'" in job.status.message and "Points, Tiny" in job.status.message


def test_an_error_in_build_model_is_grouped_over_the_ranks(bad) -> None:
    job = _failed(bad("build"), "ValueError", "building", (0, 1))
    traceback = job.status.failure.traceback
    assert "tiny.py" in traceback and "in build_model" in traceback
    assert "/engine/" not in traceback, "the user reads of the user's code"


def test_an_error_in_step_1_is_not_tried_again(bad) -> None:
    job = _failed(bad("step 1"), "ValueError", "forward", (0, 1))
    assert (job.status.step, job.status.failure.step) == (0, 0)
    assert "no step was completed" in job.status.message


@pytest.mark.matrix
def test_an_error_in_step_50_on_one_rank_fails_the_job_after_one_retry(bad) -> None:
    run = bad("step 50 of rank 1")
    job = _failed(run, "ValueError", "forward", (1,), attempts=2)
    assert job.status.step == 49
    assert run.events("generation.forming")[1].data["restore"] == "step-000000000040-a1-g1"


@pytest.mark.slow
def test_what_ranks_print_is_in_the_log_by_rank(bad) -> None:
    run = bad("step 50 of rank 1")
    for rank in (0, 1):
        lines = [line.text for line in run.client.logs(run.id, rank=rank) if line.stream == "stdout"]
        assert lines.count(f"hello from rank {rank} at step 2") == 1


def test_missing_data_files_are_named(bad) -> None:
    job = _failed(bad("no files"), "shoal_workers.data.errors.MissingTextError", "preparing", ())
    assert "nowhere/*.txt" in job.status.message


def test_a_corpus_without_text(bad) -> None:
    _failed(bad("no text"), "shoal_workers.data.errors.EmptyCorpusError", "preparing", ())


def test_a_checkpoint_url_that_cannot_be_written_fails_before_any_step(bad) -> None:
    run = bad("no storage")
    job = run.now()
    assert job.status.reason == EndReason.STORAGE_FAILED
    assert job.status.step == 0
    assert str(Path("empty.txt") / "below") in job.status.message
