"""The files of a profile, made of a raw trace by a program of its own; and which profiles are kept."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from shoal_workers.contract.profiles import KEPT_PROFILES, ProfileFile, name_of, to_delete
from shoal_workers.engine.profiling.digest import MARKS, RAW, Digest, Mark, Marks, digest
from shoal_workers.engine.profiling.profiling import keep

BASE_NS = 1_700_000_000_000_000_000
TRACE, MEMORY = "trace-rank0-g1.json.gz", "memory-rank0-g1.json.gz"


def _prepare(directory: Path, *, max_file_bytes: int = 1 << 20) -> None:
    memory = {"ph": "i", "name": "[memory]", "ts": 1500.0, "args": {"Bytes": 64, "Device Type": 0}}
    wait = {"ph": "X", "name": "_c10d_functional::wait_tensor", "ts": 1200.0, "dur": 300.0, "args": {}}
    raw = {"baseTimeNanoseconds": BASE_NS, "traceEvents": [memory, wait]}
    (directory / RAW).write_text(json.dumps(raw))
    marks = Marks(
        steps=(Mark(name="7", begin_ns=BASE_NS + 1_000_000, end_ns=BASE_NS + 3_000_000),),
        phases=(Mark(name="forward", begin_ns=BASE_NS + 1_000_000, end_ns=BASE_NS + 2_000_000),),
        trace_name=TRACE,
        memory_name=MEMORY,
        max_file_bytes=max_file_bytes,
    )
    (directory / MARKS).write_text(marks.model_dump_json())


def test_the_program_writes_a_trace_with_phases_and_a_timeline_of_memory(tmp_path: Path) -> None:
    _prepare(tmp_path)
    program = [sys.executable, "-m", "shoal_workers.engine.profiling.digest", str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, check=True, timeout=60)
    found = Digest.model_validate_json(done.stdout)
    assert [file.name for file in found.files] == [TRACE, MEMORY]
    assert all(file.bytes == (tmp_path / file.name).stat().st_size for file in found.files)
    assert found.unseen_s == pytest.approx((300e-6,)) and found.peak_bytes == 64 and found.note == ""
    with gzip.open(tmp_path / TRACE, "rt") as file:
        events = json.load(file)["traceEvents"]
    assert [(one["name"], one["ts"], one["dur"]) for one in events if one.get("cat") == "shoal"] == [
        ("forward", 1000.0, 1000.0)
    ]
    with gzip.open(tmp_path / MEMORY, "rt") as file:
        timeline = json.load(file)
    assert timeline["steps"] == [{"step": 7, "at_s": 0.0, "s": 0.002}]
    assert timeline["devices"][0]["points"] == [[0.0005, 64]]


def test_a_file_above_the_limit_is_not_kept_and_the_note_says_so(tmp_path: Path) -> None:
    _prepare(tmp_path, max_file_bytes=1)
    found = digest(tmp_path)
    assert found.files == () and found.peak_bytes == 64
    assert f"{TRACE}: 0.0 MiB are more than 0.0, not kept" in found.note
    assert not (tmp_path / TRACE).exists()


def test_the_newest_profiles_are_kept_and_other_directories_left_alone(tmp_path: Path) -> None:
    (tmp_path / "step-000000000010-a1-g1").mkdir()
    source = tmp_path / "source"
    source.mkdir()
    (source / TRACE).write_bytes(b"abc")
    root = tmp_path / "job"
    for number in range(1, KEPT_PROFILES + 4):
        keep(str(root), number, source, [ProfileFile(name=TRACE, bytes=3)])
    kept = sorted(path.name for path in (root / "profiles").iterdir())
    assert kept == [name_of(number) for number in range(4, KEPT_PROFILES + 4)]
    assert (root / "profiles" / kept[-1] / TRACE).read_bytes() == b"abc"


def test_only_directories_of_profiles_are_ever_deleted() -> None:
    names = ["profile-000001", "profile-", "profile-x1", "step-000000000010-a1-g1", "profile-000030"]
    assert to_delete(names, 20) == ["profile-000001"]
