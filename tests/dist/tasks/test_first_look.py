"""What is said, or refused, of the first samples of a job: those that differ when they are read again, and labels and
images that cannot teach anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kit.worlds.encoder_worlds import small_spec
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


def test_white_images_of_one_class_are_said_and_an_accuracy_of_1_too(make_job: Any, tmp_path: Path) -> None:
    for split, name, num in (
        ("train", "cat", 12),
        ("train", "dog", 0),
        ("validation", "cat", 6),
        ("validation", "dog", 0),
    ):
        folder = tmp_path / split / name
        folder.mkdir(parents=True)
        for number in range(num):
            np.save(folder / f"{number}.npy", np.full((16, 16, 3), 255, np.uint8))
    spec = small_spec("vit", tmp_path)
    data = {"folder": str(tmp_path / "train"), "validation_folder": str(tmp_path / "validation")}
    spec |= {"data": {**data, "cache_dir": str(tmp_path / "cache")}, "validation": {"samples": 4}}
    spec["model"]["num_labels"] = 2
    job = make_job(**spec)
    [worker] = job.workers(1)
    job.start([worker])
    assert worker.exit().kind is ExitKind.FINISHED
    said = [line.text for line in worker.new_logs()]
    job.commit([worker])
    for expected in (
        "all 12 examples of the training split have the label 0.",
        "all 6 examples of the validation split have the label 0.",
        "the first 2 samples of 'pixels' are of one colour (the first pixel is [1.0, 1.0, 1.0]).",
        "accuracy is 1 in the first validation, after step 3, on 4 samples.",
    ):
        assert sum(text.startswith(expected) for text in said) == 1, (expected, said)
