"""What `shoal data show` says of a spec's data is what the task reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kit.worlds.encoder_worlds import small_spec, write_data
from kit.worlds.hugging_face_configs import small_config
from shoal_api.cli.commands.specs import describe_data
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.hugging_face import DPO_TASK, HF_TASK, SFT_TASK
from shoal_workers.data_show import show

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
    preview = show(parse_spec({"task": task, "model": model, "data": given, "stop": {"steps": 1}}), 5)
    return preview.model_dump(mode="json"), describe_data(preview)


def test_answers_are_marked_and_what_is_left_out_and_cut_is_counted(tmp_path: Path) -> None:
    shown, text = _shown(tmp_path, SFT_TASK, LINES)
    train = shown["splits"]["train"]
    assert (train["samples"], train["num_cut"], train["tokens"], train["in_loss"]) == (2, 1, [11, 11, 13], [4, 4, 6])
    assert train["left_out"] == {"lines without an answer within model.seq_len 12": 1}
    assert {str(row["texts"][0]["spans"]) for row in train["rows"]} == {
        "[['is it? ', False], ['yes<end>', True]]",
        "[['is it? ', False], ['it is ', True]]",
    }
    assert "    is it? [[yes<end>]]" in text.splitlines()
    assert "  left out: lines without an answer within model.seq_len 12: 1" in text.splitlines()
    assert shown["splits"]["validation"] is None and "validation: no samples" in text


def test_budgets_of_tokens_and_packed_samples_are_shown(tmp_path: Path) -> None:
    spec = {"task": SFT_TASK, "model": LLAMA, "stop": {"steps": 1}, "batch": {"micro_size": 1, "global_size": 1}}
    file = tmp_path / "lines.jsonl"
    file.write_text("\n".join(map(json.dumps, LINES)))
    data = {"paths": [str(file)], "cache_dir": str(tmp_path / "cache"), "validation_fraction": 0}
    for more in ({"max_tokens": 24}, {"packing": True}):
        train = show(parse_spec({**spec, "data": {**data, **more}}), 5).splits["train"]
        assert train is not None and sorted(row.in_loss for row in train.rows) == [4, 6]


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
    train = shown.splits["train"]
    assert train is not None and train.samples and len(train.rows) == 2
    if name == "bert, classes":
        assert set(train.labels) == {"0", "1", "2"} and sum(train.labels.values()) == pytest.approx(1)
    if name == "t5":
        assert [text.title for text in train.rows[0].texts] == ["source", "target"]
    if name == "bert":
        assert "<mask>" in describe_data(shown)


def test_what_is_probably_not_meant_is_said(tmp_path: Path) -> None:
    write_data(tmp_path)
    spec = small_spec("bert, classes", tmp_path)
    file = Path(spec["data"]["paths"][0])
    file.write_text("".join(line + "\n" for line in file.read_text().splitlines() if '"label": 1' in line))
    assert "all 18 examples of the train split have the label 1." in show(parse_spec(spec), 0).remarks
    shown, _ = _shown(tmp_path, SFT_TASK, [{"prompt": "is it?", "completion": ""}])
    assert "1 train samples have one token in the loss." in shown["remarks"]
