"""An export has the task's names, the requested dtype, and no optimizer state."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shoal_workers.checkpoint.commit import marker_of, write_marker
from shoal_workers.checkpoint.errors import DamagedCheckpoint
from shoal_workers.checkpoint.writer import CheckpointWriter
from shoal_workers.contract.worker_reports import SavedPart
from shoal_workers.export import export

STATE = {
    "model.body.up.weight": torch.arange(12.0).reshape(3, 4),
    "model.body.seen": torch.tensor(5),
    "model.head.weight": torch.ones(2, 3),
    "optim.head.weight.exp_avg": torch.zeros(2, 3),
}
EXPORT = {"config": {"model_type": "mine"}, "renames": [["^body", "trunk"], [r"\.up\.", ".wide."]]}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Any:
    """`checkpoint(extra)`: the URL of a committed one."""

    def make(extra: dict[str, Any]) -> str:
        directory = tmp_path / "job" / "step-000000000003-a1-g1"
        outcomes: list[Any] = []
        writer = CheckpointWriter()
        writer.save(
            STATE,
            directory=str(directory),
            rank=0,
            world_size=1,
            owns_replicated=True,
            generation=1,
            step=3,
            extra=extra,
            on_done=outcomes.append,
        )
        writer.close()
        assert isinstance(outcomes[0], SavedPart), outcomes
        write_marker(str(directory), marker_of(outcomes, job_id="job", attempt=1, now=0.0))
        return str(directory)

    return make


def test_the_files_that_the_task_names_are_copied(checkpoint: Any, tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text('{"a tokenizer": 1}')
    source = checkpoint({"export": {**EXPORT, "files": {"tokenizer.json": str(kept)}}})
    export(source, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"a tokenizer": 1}'
    kept.unlink()
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json, is not on this machine"):
        export(source, tmp_path / "again")


def test_names_and_values_are_those_of_the_task(checkpoint: Any, tmp_path: Path) -> None:
    done = export(checkpoint({"export": EXPORT}), tmp_path / "out")
    assert done.files == ("model.safetensors",)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert sorted(found) == ["head.weight", "trunk.seen", "trunk.wide.weight"]
    assert torch.equal(found["trunk.wide.weight"], STATE["model.body.up.weight"])
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "mine", "dtype": "float32"}


def test_a_jobs_directory_is_exported_from_its_newest_checkpoint(checkpoint: Any, tmp_path: Path) -> None:
    directory = checkpoint({"export": EXPORT})
    assert export(str(Path(directory).parent), tmp_path / "out").checkpoint == directory


def test_a_smaller_dtype_does_not_change_integers(checkpoint: Any, tmp_path: Path) -> None:
    export(checkpoint({"export": EXPORT}), tmp_path / "out", dtype=torch.bfloat16)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found["head.weight"].dtype is torch.bfloat16
    assert found["trunk.seen"].dtype is torch.int64


def test_large_models_are_split_into_files_with_an_index(checkpoint: Any, tmp_path: Path) -> None:
    done = export(checkpoint({"export": EXPORT}), tmp_path / "out", file_bytes=30)
    assert len(done.files) == 3
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(done.files)
    assert index["metadata"]["total_size"] == done.num_bytes == 12 * 4 + 8 + 6 * 4


def test_a_failed_export_tells_the_reason_and_writes_nothing(checkpoint: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not describe its model"):
        export(checkpoint({}), tmp_path / "out")
    with pytest.raises(DamagedCheckpoint, match="never committed"):
        export(str(tmp_path / "nothing"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_directory_that_is_not_empty_is_refused(checkpoint: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    with pytest.raises(FileExistsError, match="is not empty"):
        export(checkpoint({"export": EXPORT}), tmp_path / "out")


def test_an_export_that_was_broken_off_goes_on_with_the_files_that_it_lacks(checkpoint: Any, tmp_path: Path) -> None:
    source, out = checkpoint({"export": EXPORT}), tmp_path / "out"
    [payload] = Path(source).glob("*.bin")
    whole = payload.read_bytes()
    export(source, tmp_path / "expected", file_bytes=30)
    at = whole.index(STATE["model.head.weight"].numpy().tobytes())
    payload.write_bytes(whole[:at] + b"\x01" + whole[at + 1 :])
    with pytest.raises(DamagedCheckpoint, match=r"has crc32 .* for model\.head\.weight"):
        export(source, out, file_bytes=30, resume=True)
    assert not (out / "model.safetensors.index.json").exists(), "the export is not complete"
    written = {path.name: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
    assert len(written) == 2 and not list(out.glob("*.part"))
    payload.write_bytes(whole)
    done = export(source, out, file_bytes=30, resume=True)
    assert {name: (out / name).stat().st_mtime_ns for name in written} == written, "what was whole is not written again"
    for file in (tmp_path / "expected").iterdir():
        assert (out / file.name).read_bytes() == file.read_bytes(), file.name
    assert export(source, out, file_bytes=30, resume=True) == done


def test_a_repeated_export_verifies_what_is_there_and_repairs_what_differs(checkpoint: Any, tmp_path: Path) -> None:
    source, out = checkpoint({"export": EXPORT}), tmp_path / "out"
    done = export(source, out, resume=True)
    expected = (out / "model.safetensors").read_bytes()
    for damage in (expected[:-1], expected[:-1] + b"?"):
        (out / "model.safetensors").write_bytes(damage)
        assert export(source, out, resume=True) == done
        assert (out / "model.safetensors").read_bytes() == expected
    (out / "model.safetensors").unlink()
    shutil.rmtree(source)
    with pytest.raises(DamagedCheckpoint, match=r"step-000000000003-a1-g1 is damaged: .* is missing"):
        export(source, out, resume=True)
    (out / "model.safetensors").write_bytes(expected)
    assert export(source, out, resume=True) == done, "a complete directory needs its checkpoint no more"


def test_a_directory_of_another_model_is_never_written_to(checkpoint: Any, tmp_path: Path) -> None:
    source, out = checkpoint({"export": EXPORT}), tmp_path / "out"
    export(source, out, resume=True)
    with pytest.raises(FileExistsError, match=r"holds an export of .*dtype float32.*not of .*dtype bfloat16"):
        export(source, out, dtype=torch.bfloat16, resume=True)
    with pytest.raises(FileExistsError, match="is not empty"):
        export(source, out)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(FileExistsError, match="is not empty"):
        export(source, tmp_path / "mine", resume=True)
