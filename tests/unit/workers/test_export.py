"""What an export has, and what `shoal data show` says of a spec's data."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kit.worlds.encoder_worlds import small_spec, write_data
from kit.worlds.hugging_face_configs import small_config
from shoal_api.cli.commands.specs import describe_data
from shoal_workers.checkpoint.commit import marker_of, write_marker
from shoal_workers.checkpoint.errors import DamagedCheckpoint
from shoal_workers.checkpoint.writer import CheckpointWriter
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.hugging_face import DPO_TASK, HF_TASK, SFT_TASK
from shoal_workers.contract.worker_reports import SavedPart
from shoal_workers.data_show import show
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


pytest.importorskip("transformers")

LLAMA = {"config": small_config("llama"), "seq_len": 12}
LINES = [
    {"prompt": "is it? ", "completion": "yes"},
    {"prompt": "a" * 40, "completion": "b"},
    {"prompt": "is it? ", "completion": "it is so"},
]


def _shown(folder: Path, task: str, records: list[Any], model: Any = LLAMA, **data: Any) -> tuple[dict[str, Any], str]:
    file = folder / "lines.jsonl"
    file.write_text("\n".join(map(json.dumps, records)))
    given = {"paths": [str(file)], "cache_dir": str(folder / "cache"), "validation_fraction": 0, **data}
    shown = show(parse_spec({"task": task, "model": model, "data": given, "stop": {"steps": 1}}), 5)
    return shown, describe_data(json.loads(json.dumps(shown)))


def test_answers_are_marked_and_what_is_left_out_and_cut_is_counted(tmp_path: Path) -> None:
    shown, text = _shown(tmp_path, SFT_TASK, LINES)
    train = shown["splits"]["train"]
    assert (train["samples"], train["num_cut"], train["tokens"], train["in_loss"]) == (2, 1, [11, 11, 13], [4, 4, 6])
    assert train["left_out"] == {"lines without an answer within model.seq_len 12": 1}
    assert {str(row["texts"][0]["spans"]) for row in train["rows"]} == {
        "[('is it? ', False), ('yes<end>', True)]",
        "[('is it? ', False), ('it is ', True)]",
    }
    assert "    is it? [[yes<end>]]" in text.splitlines()
    assert "  left out: 1 lines without an answer within model.seq_len 12" in text.splitlines()
    assert shown["splits"]["validation"] is None and "validation: no samples" in text


def test_budgets_of_tokens_and_packed_samples_are_shown(tmp_path: Path) -> None:
    spec = {"task": SFT_TASK, "model": LLAMA, "stop": {"steps": 1}, "batch": {"micro_size": 1, "global_size": 1}}
    file = tmp_path / "lines.jsonl"
    file.write_text("\n".join(map(json.dumps, LINES)))
    data = {"paths": [str(file)], "cache_dir": str(tmp_path / "cache"), "validation_fraction": 0}
    for more in ({"max_tokens": 24}, {"packing": True}):
        rows = show(parse_spec({**spec, "data": {**data, **more}}), 5)["splits"]["train"]["rows"]
        assert sorted(row["in_loss"] for row in rows) == [4, 6]


def test_both_answers_of_a_preference_are_shown(tmp_path: Path) -> None:
    record = {"prompt": "is it? ", "chosen": "yes", "rejected": "no"}
    _, text = _shown(tmp_path, DPO_TASK, [record], {**LLAMA, "lora": {"r": 2}})
    lines = text.splitlines()
    assert "    chosen: is it? [[yes<end>]]" in lines and "    rejected: is it? [[no<end>]]" in lines


def test_text_counts_from_its_second_token_on(tmp_path: Path) -> None:
    shown, text = _shown(tmp_path, HF_TASK, [{"text": "to be or not to be"}])
    assert "    t[[o be or not ]]" in text.splitlines()
    assert shown["splits"]["train"]["samples"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "t5", "bert, classes", "vit"])
def test_other_built_in_tasks_are_shown(tmp_path: Path, name: str) -> None:
    write_data(tmp_path)
    (tmp_path / "text.txt").write_text("two and two make four. " * 40)
    shown = show(parse_spec(small_spec(name, tmp_path)), 2)
    train = shown["splits"]["train"]
    assert train["samples"] and (name == "vit" or len(train["rows"]) == 2)
    if name == "bert, classes":
        assert set(train["labels"]) == {"0", "1", "2"} and sum(train["labels"].values()) == pytest.approx(1)
    if name == "t5":
        assert [text["title"] for text in train["rows"][0]["texts"]] == ["source", "target"]
    if name == "bert":
        assert "<mask>" in describe_data(shown)


def test_what_is_probably_not_meant_is_said(tmp_path: Path) -> None:
    write_data(tmp_path)
    spec = small_spec("bert, classes", tmp_path)
    file = Path(spec["data"]["paths"][0])
    file.write_text("".join(line + "\n" for line in file.read_text().splitlines() if '"label": 1' in line))
    assert "all 18 examples of the train split have the label 1." in show(parse_spec(spec), 0)["remarks"]
    shown, _ = _shown(tmp_path, SFT_TASK, [{"prompt": "is it?", "completion": ""}])
    assert "1 train samples have one token in the loss." in shown["remarks"]
