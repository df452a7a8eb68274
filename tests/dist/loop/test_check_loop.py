"""`shoal check` of loops as a user runs it: a right one, and one for each thing that is forgotten."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kit.processes.warm import warm_python

LOOPS = Path(__file__).parents[2] / "kit" / "loops"
EXAMPLE = Path(__file__).parents[3] / "examples" / "loop"
GALLERY = EXAMPLE.parent / "gallery"


def check(program: str, *arguments: str, directory: Path = LOOPS, **environment: str) -> tuple[int, dict[str, Any]]:
    command = [warm_python(), "-m", "shoal_api.cli.main", "check", program, "--json", "--timeout", "240", *arguments]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONPATH": path, **environment}
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    return done.returncode, json.loads(done.stdout)


@pytest.mark.slow
def test_the_example_goes_on_as_undisturbed_and_writes_only_into_a_temporary_directory(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    before = sorted(EXAMPLE.iterdir())
    code, found = check("train.py", directory=EXAMPLE, TMPDIR=str(tmp_path), SHOAL_CHECKPOINT_DIR=str(own))
    assert (code, found["door"]) == (0, "loop"), found
    trial = found["trial"]
    assert (trial["is_whole"], trial["differences"], trial["untracked"]) == (True, [], [])
    assert trial["steps"] in (4, 66), "four steps, or an epoch of 64 and two where this machine is fast enough"
    assert trial["tracked"] == ["model", "optimizer", "schedule"]
    assert list(tmp_path.iterdir()) == [own] and list(own.iterdir()) == []
    assert [path for path in sorted(EXAMPLE.iterdir()) if path.name != "__pycache__"] == [
        path for path in before if path.name != "__pycache__"
    ]


NEWCOMER, SURVIVOR = "a worker that joins after step 2", "a worker whose group breaks after step 2"


@pytest.mark.cells(1, 2)
@pytest.mark.parametrize(
    ("mistake", "untracked", "first"),
    [
        ("average", "average (untracked.py:42)", None),
        ("counter", "steps_made (untracked.py:15)", (NEWCOMER, 3, "lr")),
        ("forgetful", None, (NEWCOMER, 2, "average.values.bias")),
        ("iterator", None, (SURVIVOR, 3, "loss")),
        ("generator", "noise (untracked.py:47)", (SURVIVOR, 3, "loss")),
    ],
)
def test_what_a_loop_does_not_track_is_named_with_the_first_step_that_differs(
    mistake: str, untracked: str | None, first: tuple[str, int, str] | None
) -> None:
    code, found = check("untracked.py", "--", mistake)
    trial = found["trial"]
    assert (code, trial["is_whole"]) == (1, False), found
    names = [f"{one['name']} ({one['place']})" for one in trial["untracked"] if one["name"] != "printed"]
    assert names == ([untracked] if untracked else [])
    differences = [(one["trial"], one["step"], one["what"]) for one in trial["differences"]]
    assert first in differences if first else differences == []
    if mistake == "iterator":
        assert trial["suspects"] == ["positions, an iterator (untracked.py:48)"]


def test_a_right_loop_passes_although_it_counts_and_looks_at_the_time() -> None:
    code, found = check("untracked.py")
    assert (code, found["trial"]["is_whole"]) == (0, True), found
    assert found["trial"]["workers"] == "1:3", "it has three micro-batches in a step"
    [remark] = found["trial"]["remarks"]
    assert remark.endswith("without a change of the training: printed (untracked.py:50)")


def test_what_two_workers_train_otherwise_is_named() -> None:
    code, found = check("unkept.py", "--", "clip_by_hand")
    differences = [one["what"] for one in found["trial"]["differences"] if one["trial"] == "two workers"]
    assert (code, differences) == (1, ["grad_norm"]), found


@pytest.mark.parametrize(
    ("mistake", "code", "words"),
    [
        ("unseeded", 1, "the loop is not the same twice"),
        ("short", 0, "the loop has ended after 2 steps, and it takes 3 to interrupt it"),
    ],
)
def test_a_loop_that_cannot_be_compared_says_why(mistake: str, code: int, words: str) -> None:
    status, found = check("untracked.py", "--", mistake)
    assert status == code and found["trial"]["remarks"][0].startswith(words), found


@pytest.mark.slow
def test_an_error_of_the_loop_is_named_and_a_loop_that_takes_too_long_is_ended() -> None:
    code, found = check("untracked.py", "--", "failing")
    assert code == 1 and "the third step is not for me (untracked.py:" in found["error"]["message"], found
    code, found = check("untracked.py", "--timeout", "1", "--", "slow")
    ended = r"was stopped after at most 1 s, in the .*, before it had a result"
    assert code == 1 and re.search(ended, found["error"]["message"]), found


def test_a_loop_is_only_read_on_request() -> None:
    code, found = check("mistaken.py", "--no-run")
    assert (code, found["door"]) == (0, "loop") and "trial" not in found


@pytest.mark.slow
def test_a_sharded_loop_is_tried_as_its_spec_says(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text((GALLERY / "fsdp2" / "train.py").read_text("utf-8"), "utf-8")
    spec = {"loop": {"file": "train.py"}, "code": {"working_dir": "."}, "parallelism": {"dp_shard": "auto"}}
    (tmp_path / "spec.json").write_text(json.dumps(spec), "utf-8")
    code, found = check("spec.json", directory=tmp_path)
    assert (code, found["trial"]["is_whole"]) == (0, True), found


@pytest.mark.slow
def test_a_loop_without_work_for_all_workers_of_its_spec_is_refused(tmp_path: Path) -> None:
    arguments = ("--set", "elasticity.max_workers=8", "--", "stateful_streams", str(tmp_path))
    code, found = check("loaders.py", *arguments)
    assert code == 1 and found["error"]["message"].startswith("loaders.py has work for 4 workers only"), found
