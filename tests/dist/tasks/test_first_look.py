"""What is said, or refused, of the first samples of a job: those that differ when they are read again, and labels and
images that cannot teach anything."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kit.worlds.encoder_worlds import small_spec
from shoal_workers.contract.data_preview import DATA_FILE, DataPreview
from shoal_workers.contract.layout import fully_sharded
from shoal_workers.contract.media import FOLDER
from shoal_workers.contract.messages import ExitKind, ProofDemand
from shoal_workers.engine.media.encode import encode_png

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


@pytest.mark.parametrize("num_processes", [0, 1])
@pytest.mark.parametrize(
    ("task", "named"),
    [("OwnGenerator", "'generator' of DrawnSequences"), ("Counted", "'num_read' of CountedSequences")],
)
def test_it_is_refused_with_the_attribute_that_reading_changes(
    make_job: Any, num_processes: int, task: str, named: str
) -> None:
    batch = {**SPEC["batch"], "num_workers": num_processes}
    job = make_job(**{**SPEC, "task": f"read_ahead_tasks:{task}", "batch": batch})
    [end] = job.run(job.workers(1))
    assert (end.kind, end.step) == (ExitKind.USER_ERROR, 0), end
    message = end.error.message
    assert message.startswith("read_ahead_tasks.py:") and FOUND in message
    assert "Two ways out: draw from torch, numpy.random or random, " in message
    assert f"What reading a sample changes: {named} (read_ahead_tasks.py:" in message


def test_samples_that_draw_from_torch_train_and_the_layout_is_not_what_differs(make_job: Any) -> None:
    job = make_job("seeded", **{**SPEC, "task": "read_ahead_tasks:Seeded"})
    [end] = job.run(job.workers(1))
    assert end.kind is ExitKind.FINISHED, end
    job = make_job("layout", **{**SPEC, "model": {"dropout": 0}})
    ends = job.run(job.workers(2), proof=ProofDemand.REQUIRED)
    assert all("the layout fsdp2 was not proven: read_ahead_tasks.py" in end.error.message for end in ends)
    assert all(FOUND in end.error.message for end in ends), "it is not the layout that differs"


def test_a_job_describes_its_data_before_its_first_step_or_says_why_not(make_job: Any, tmp_path: Path) -> None:
    """Whatever samples of its own class do when they are read, nothing reads them for this."""
    wrong = []
    for name, changes in (
        ("described", {}),
        ("odd", {"task": "read_ahead_tasks:OddCounts"}),
        ("off", {"media": {"enabled": False}}),
    ):
        job = make_job(name, **{**SPEC, "task": "read_ahead_tasks:Seeded", **changes})
        workers = job.workers(2)
        job.start(workers, layout=fully_sharded(2))
        ends = [worker.exit().kind for worker in workers]
        said = [line.text for line in workers[0].new_logs() if "the data could not be described" in line.text]
        job.commit(workers)
        file = tmp_path / name / FOLDER / DATA_FILE
        preview = DataPreview.model_validate_json(file.read_bytes()) if file.exists() else None
        train = preview.splits["train"] if preview is not None else None
        described = (train.samples, train.rows) if train is not None else None
        expected = {"described": (50, ()), "odd": None, "off": None}[name]
        if ends != [ExitKind.FINISHED] * 2 or described != expected or len(said) != (name == "odd"):
            wrong.append((name, ends, described, said))
    assert wrong == []


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
    preview = DataPreview.model_validate_json((tmp_path / "job" / FOLDER / DATA_FILE).read_bytes())
    train, validation = preview.splits["train"], preview.splits["validation"]
    assert train is not None and validation is not None
    assert (train.samples, train.labels, validation.samples, validation.validated) == (12, {"cat": 1.0}, 6, 4)
    assert [row.label for row in train.rows] == ["cat"] * 5
    assert [text.partition(" have the label ")[2] for text in preview.remarks] == ["0.", "0."]
    assert train.rows[0].png == base64.b64encode(encode_png(np.full((16, 16, 3), 255, np.uint8))).decode()
    for expected in (
        "all 12 examples of the training split have the label 0.",
        "all 6 examples of the validation split have the label 0.",
        "the first 2 samples of 'pixels' are of one colour (the first pixel is [1.0, 1.0, 1.0]).",
        "accuracy is 1 in the first validation, after step 3, on 4 samples.",
    ):
        assert sum(text.startswith(expected) for text in said) == 1, (expected, said)
