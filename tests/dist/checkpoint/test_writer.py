"""The writer blocks only to copy, reports every outcome once, and survives failing storage and signals."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest
import torch

from kit.processes.warm import warm_python
from shoal_workers.checkpoint.commit import marker_of, newest_committed, write_marker
from shoal_workers.checkpoint.errors import DamagedCheckpoint
from shoal_workers.checkpoint.index import index_name, payload_name
from shoal_workers.checkpoint.reader import load
from shoal_workers.checkpoint.writer import CheckpointWriter
from shoal_workers.contract.marker import CheckpointName
from shoal_workers.contract.worker_reports import SavedPart, SaveFailed

pytestmark = pytest.mark.dist

_PROGRAM = Path(__file__).parents[2] / "kit" / "programs" / "checkpoint_writing.py"


class Outcomes:
    """Records the arguments of `on_done` and the calling thread."""

    def __init__(self) -> None:
        self.reported: list[SavedPart | SaveFailed] = []
        self.threads: list[str] = []

    def __call__(self, outcome: SavedPart | SaveFailed) -> None:
        self.reported.append(outcome)
        self.threads.append(threading.current_thread().name)


def _save(
    writer: CheckpointWriter, state: dict[str, torch.Tensor], directory: Path | str, outcomes: Outcomes, step: int = 1
) -> float:
    return writer.save(
        state,
        directory=str(directory),
        rank=0,
        world_size=1,
        generation=1,
        step=step,
        extra={"step": step},
        on_done=outcomes,
    )


def _at(root: Path, step: int) -> str:
    return str(root / str(CheckpointName(step, 1, 1)))


def _commit(part: SavedPart | SaveFailed) -> None:
    assert isinstance(part, SavedPart), part
    write_marker(part.directory, marker_of([part], job_id="job", attempt=1, now=0.0))


def test_state_may_change_as_soon_as_save_returns(tmp_path: Path) -> None:
    writer, outcomes = CheckpointWriter(), Outcomes()
    state = {"w": torch.full((1000, 1000), 3.0)}
    stall_s = _save(writer, state, _at(tmp_path, 1), outcomes)
    state["w"].fill_(4.0)
    writer.wait()
    (part,) = outcomes.reported
    _commit(part)
    load(state, directory=_at(tmp_path, 1))
    assert bool((state["w"] == 3.0).all())
    assert isinstance(part, SavedPart)
    assert part.stall_s == stall_s
    assert part.write_s > 0
    assert outcomes.threads == ["checkpoint-write-1"]


def test_a_second_save_waits_for_the_first_and_both_are_reported(tmp_path: Path) -> None:
    writer, outcomes = CheckpointWriter(), Outcomes()
    for step in (1, 2, 3):
        _save(writer, {"w": torch.full((500_000,), float(step))}, _at(tmp_path, step), outcomes, step)
        assert len(outcomes.reported) >= step - 1
    writer.close()
    for step, part in enumerate(outcomes.reported, start=1):
        _commit(part)
        loaded = torch.zeros(500_000)
        assert load({"w": loaded}, directory=_at(tmp_path, step)) == {"step": step}
        assert bool((loaded == step).all())


def test_state_may_change_its_shape_between_saves(tmp_path: Path) -> None:
    writer, outcomes = CheckpointWriter(), Outcomes()
    for step, size in enumerate([100, 3, 2000, 1, 2000], start=1):
        state = {"w": torch.arange(size), "b": torch.full((size % 7,), 0.5), "s": torch.tensor(float(step))}
        _save(writer, state, _at(tmp_path, step), outcomes, step)
        writer.wait()
        _commit(outcomes.reported[-1])
        blank = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        load(blank, directory=_at(tmp_path, step))
        assert all(torch.equal(blank[name], state[name]) for name in state)


def test_equal_states_give_equal_files_whatever_was_staged_before(tmp_path: Path) -> None:
    state = {"a": torch.arange(3), "b": torch.arange(5)}
    used, fresh = CheckpointWriter(), CheckpointWriter()
    outcomes = Outcomes()
    _save(used, {"noise": torch.full((1000,), -1)}, tmp_path / "0", outcomes)
    _save(used, state, tmp_path / "1", outcomes)
    used.wait()
    _save(fresh, state, tmp_path / "2", outcomes)
    fresh.wait()
    assert (tmp_path / "1" / payload_name(0)).read_bytes() == (tmp_path / "2" / payload_name(0)).read_bytes()


def test_plain_tensors_are_written_by_rank_0_only_by_default(tmp_path: Path) -> None:
    for rank, owns_replicated, expected in [(0, None, 24), (1, None, 0), (1, True, 24), (0, False, 0)]:
        writer, outcomes = CheckpointWriter(), Outcomes()
        writer.save(
            {"w": torch.arange(3)},
            directory=str(tmp_path / f"{rank}{owns_replicated}"),
            rank=rank,
            world_size=2,
            generation=1,
            step=1,
            extra={},
            on_done=outcomes,
            owns_replicated=owns_replicated,
        )
        writer.close()
        (part,) = outcomes.reported
        assert isinstance(part, SavedPart)
        assert part.files[0].bytes == expected


@pytest.mark.parametrize("trouble", ["no directory", "another directory", "unknown protocol"])
def test_a_storage_failure_is_reported_and_the_next_save_works(tmp_path: Path, trouble: str) -> None:
    bad = {"no directory": "/proc/self/x", "another directory": f"{tmp_path}/full", "unknown protocol": "nosuch://x"}[
        trouble
    ]
    if trouble == "another directory":
        (tmp_path / "full" / f"{payload_name(0)}.writing").mkdir(parents=True)
    writer, outcomes = CheckpointWriter(), Outcomes()
    state = {"w": torch.randn(100_000)}
    _save(writer, state, bad, outcomes)
    _save(writer, state, _at(tmp_path, 2), outcomes, 2)
    writer.close()
    failed, part = outcomes.reported
    assert isinstance(failed, SaveFailed)
    assert (failed.directory, failed.rank, failed.step) == (bad, 0, 1)
    assert failed.error.startswith(("OSError", "FileNotFoundError", "PermissionError", "IsADirectoryError"))
    _commit(part)
    load({"w": torch.empty(100_000)}, directory=_at(tmp_path, 2))


def test_failing_to_save_again_leaves_the_part_that_is_durable(tmp_path: Path) -> None:
    writer, outcomes = CheckpointWriter(), Outcomes()
    state = {"w": torch.randn(1000)}
    _save(writer, state, _at(tmp_path, 1), outcomes)
    writer.wait()
    _commit(outcomes.reported[0])
    Path(_at(tmp_path, 1), f"{index_name(0)}.writing").mkdir()
    _save(writer, state, _at(tmp_path, 1), outcomes)
    writer.close()
    assert isinstance(outcomes.reported[1], SaveFailed)
    load({"w": torch.empty(1000)}, directory=_at(tmp_path, 1))


def test_disk_that_fills_up_midway_leaves_no_file_behind(tmp_path: Path) -> None:
    """A process that may write files of 1 MiB at most saves 4 MiB, then 0.4 MiB."""
    ran = _run("limited", tmp_path)
    assert ran.stdout.split() == ["SaveFailed", "SavedPart"], ran.stderr
    assert list((tmp_path / "big").iterdir()) == []
    assert {path.name for path in (tmp_path / "small").iterdir()} == {payload_name(0), index_name(0)}


def test_save_killed_in_the_middle_is_never_loaded(tmp_path: Path) -> None:
    """The process reports that it writes its payload, is killed at that point, and leaves an incomplete directory."""
    process = subprocess.Popen(
        [warm_python(), str(_PROGRAM), "stuck", str(tmp_path)], stdout=subprocess.PIPE, text=True, env=_environment()
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "committed\n"
        with Path(_at(tmp_path, 2), f"{payload_name(0)}.writing").open("rb") as pipe:
            assert len(pipe.read(1000)) == 1000  # the writer thread is now in the middle of the file
            process.terminate()  # which it does not handle; a warm process is waited for then
            process.wait(timeout=30)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    torn, whole = _at(tmp_path, 2), _at(tmp_path, 1)
    assert newest_committed(str(tmp_path)) == whole
    with pytest.raises(DamagedCheckpoint, match="never committed"):
        load({"w": torch.empty(500_000)}, directory=torn)
    loaded = torch.empty(500_000)
    load({"w": loaded}, directory=whole)
    assert bool((loaded == 1).all())


def _run(mode: str, root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [warm_python(), str(_PROGRAM), mode, str(root)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=_environment(),
    )


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}
