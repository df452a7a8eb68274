"""`shoal check` as a user runs it, with a task that crashes its process; and the words for what it finds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kit.processes.warm import warm_python
from shoal_api.cli.trial import describe_task
from shoal_workers.exit_status import place_of_crash

TASKS = Path(__file__).parents[2] / "kit" / "tasks"


def check(task: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [warm_python(), "-m", "shoal_api.cli.main", "check", task, *options]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment}
    return subprocess.run(command, cwd=TASKS, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_a_crash_is_reported_with_signal_phase_and_line_and_leaves_no_directory(tmp_path: Path) -> None:
    done = check("mistaken_tasks:Crash", "--json", "--set", "validation.samples=4", TMPDIR=str(tmp_path))
    assert done.returncode == 1, done.stderr
    error = json.loads(done.stdout)["error"]
    assert re.fullmatch(
        r"mistaken_tasks:Crash does not train: its process was killed by signal 11 \(SIGSEGV\) in validation, at "
        r"mistaken_tasks\.py:\d+ in loss\(\)",
        error["message"],
    ), error
    assert error["details"] == []
    assert not list(tmp_path.glob("shoal-check-*"))


@pytest.mark.slow
@pytest.mark.cells(1)
@pytest.mark.parametrize("debug", ["0", "1"])
def test_a_failed_install_is_one_sentence_and_has_its_traceback_where_that_is_asked_for(
    tmp_path: Path, debug: str
) -> None:
    (tmp_path / "wheels").mkdir()
    options = ["--set", "code.pip=[nowhere-to-be-found]", "--set", f"code.wheels={tmp_path / 'wheels'}"]
    done = check("tiny_tasks:Counting", *options, HOME=str(tmp_path), SHOAL_DEBUG=debug)
    sentence = "code.pip: nowhere-to-be-found cannot be installed from code.wheels"
    assert done.returncode == 1 and sentence in done.stderr, done.stderr
    assert ("Traceback" in done.stderr, "in _install" in done.stderr) == (debug == "1", debug == "1")


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        ("NotANumber", "does not train (backward): loss nan and gradient norm nan in step 1. Nothing was updated."),
        ("LazyLayer", "build_model(): the model has lazy modules (nn.LazyLinear and the like)"),
        ("NoSplit", "build_dataset(): Shoal calls build_dataset(split)"),
    ],
)
def test_what_does_not_train_is_one_sentence(task: str, sentence: str) -> None:
    done = check(f"mistaken_tasks:{task}")
    assert done.returncode == 1 and sentence in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_one_small_text_file_trains_with_all_defaults_of_data_and_says_that_it_does_not_validate(
    tmp_path: Path,
) -> None:
    (tmp_path / "text.txt").write_text("The sky is blue and the grass is green.\n" * 512)
    spec = tmp_path / "job.json"
    small = {"dim": 32, "num_layers": 1, "num_heads": 2}
    data = {"paths": [str(tmp_path / "text.txt")]}
    spec.write_text(json.dumps({"data": data, "model": small, "stop": {"steps": 1}}))
    done = check(str(spec), HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "trains: build, three steps, save, load work" in done.stdout
    assert done.stdout.count("the job does not validate, because its data has no validation split") == 1


def test_the_place_of_a_crash_is_that_of_the_training_thread() -> None:
    stacks = (
        "Fatal Python error: Segmentation fault\n\nThread 0x01 (most recent call first):\n"
        '  File "/usr/lib/python3.11/threading.py", line 320 in wait\n\n'
        "Current thread 0x02 (most recent call first):\n"
        '  File "/v/site-packages/torch/nn/functional.py", line 9 in linear\n'
        '  File "/home/me/digits.py", line 41 in loss\n'
        '  File "/v/site-packages/shoal_workers/engine/step/passes.py", line 80 in _forward_backward\n'
        '  File "/v/site-packages/shoal_workers/engine/engine.py", line 231 in _train\n'
    )
    assert place_of_crash(stacks) == " in a training step, at digits.py:41 in loss()"
    assert place_of_crash(stacks.replace("engine/engine.py", "other.py")) == ""
    assert place_of_crash("") == ""


def test_what_was_found_is_said_in_words() -> None:
    found = {
        "parameters": 1234,
        "micro_batch_s": 0.0123,
        "micro_size": 4,
        "memory_bytes": 350 << 20,
        "device": "cpu",
        "checkpoint_bytes": 20 << 10,
        "loss": 2.5,
        "last_loss": 2.25,
        "val_loss": None,
        "remarks": ["compile is not tried."],
    }
    text = describe_task("digits:Classifier", found)
    assert "1,234 parameters" in text and "0.0123 s per micro-batch of 4 samples" in text
    assert "loss 2.5000 in the first step, 2.2500 in the third\n  note: compile is not tried." in text
