"""A data set of a few lines trains with all defaults, and what is not read of one is said by reason."""

import json
from pathlib import Path
from typing import Any

import pytest

from kit.worlds.encoder_worlds import MODELS, small_spec, write_data
from kit.worlds.hugging_face_configs import small_config
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.hugging_face import DPO_TASK, HF_TASK, SFT_TASK
from shoal_workers.contract.language_model import LM_TASK
from shoal_workers.data.errors import CorpusTooSmallError
from shoal_workers.engine.task.task import LoadedTask, load_task

transformers = pytest.importorskip("transformers")

_MEDIA = ("vit", "whisper")
LLAMA = {"config": small_config("llama"), "seq_len": 16}


def _opened(document: dict[str, Any]) -> LoadedTask:
    task = load_task(parse_spec({"stop": {"steps": 3}, **document}))
    task.prepare(lambda _: None)
    task.open_data()
    return task


def _small_jobs(folder: Path) -> dict[str, dict[str, Any]]:
    """A spec of each built-in task, with data that with all defaults has no validation split."""
    write_data(folder)
    (folder / "small.txt").write_text("The sky is blue. " * 40)
    (folder / "pairs.jsonl").write_text('{"source": "1 x 3", "target": "3", "label": 0}\n')
    (folder / "answers.jsonl").write_text('{"prompt": "is it? ", "completion": "yes"}\n')
    (folder / "preferences.jsonl").write_text('{"prompt": "is it? ", "chosen": "yes", "rejected": "no"}\n')
    names = ("small.txt", "answers.jsonl", "preferences.jsonl")
    data = {name: {"paths": [str(folder / name)], "cache_dir": str(folder / "cache")} for name in names}
    tiny = {"dim": 32, "num_layers": 1, "num_heads": 2, "seq_len": 16}
    jobs: dict[str, dict[str, Any]] = {
        "lm": {"task": LM_TASK, "model": tiny, "data": data["small.txt"]},
        "hf": {"task": HF_TASK, "model": LLAMA, "data": data["small.txt"]},
        "sft": {"task": SFT_TASK, "model": LLAMA, "data": data["answers.jsonl"]},
        "sft, packed": {"task": SFT_TASK, "model": LLAMA, "data": {**data["answers.jsonl"], "packing": True}},
        "dpo": {"task": DPO_TASK, "model": {**LLAMA, "lora": {"r": 2}}, "data": data["preferences.jsonl"]},
    }
    for name in ("bert", "t5", "bert, classes", "vit", "whisper"):
        spec = small_spec(name, folder)
        spec["data"].setdefault("validation_fraction", 1e-9)
        jobs[name] = {key: value for key, value in spec.items() if key != "validation"}
    return jobs


@pytest.mark.parametrize("media", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_built_in_task_trains_on_data_without_a_validation_split(tmp_path: Path, media: bool) -> None:
    failures, jobs = [], _small_jobs(tmp_path)
    assert {document["task"] for document in jobs.values()} >= {task for task, _, _ in MODELS.values()}
    for name, document in jobs.items():
        if (name in _MEDIA) is not media:
            continue
        task = _opened(document)
        said = [text for text in task.remarks if "does not validate" in text]
        if task.validation_data is not None or len(said) != 1 or not len(task.train_data):
            failures.append((name, task.validation_data, task.remarks))
    assert failures == []


def _lines(file: Path, *records: Any) -> dict[str, Any]:
    file.write_text("\n".join(map(json.dumps, records)))
    return {"paths": [str(file)], "cache_dir": str(file.parent / "cache"), "validation_fraction": 0}


@pytest.mark.parametrize(
    ("task", "records", "left_out"),
    [
        (
            SFT_TASK,
            [
                {"prompt": "a" * 40, "completion": "b"},
                {"prompt": "a", "completion": "b"},
                {"prompt": "", "completion": ""},
            ],
            "1 lines without an answer within model.seq_len 16, 1 lines without an answer",
        ),
        (
            DPO_TASK,
            [
                {"prompt": "a", "chosen": "b", "rejected": "c"},
                {"prompt": "a", "chosen": "b", "rejected": "b"},
                {"chosen": "same", "rejected": "same"},
                {"prompt": "a" * 40, "chosen": "b", "rejected": "c"},
                {"prompt": "a" * 14, "chosen": "bbbbc", "rejected": "bbbbd"},
            ],
            "3 lines with equal answers within model.seq_len 16, 1 lines without both answers within model.seq_len 16",
        ),
    ],
)
def test_what_is_left_out_is_counted_by_reason_and_is_the_reason_if_nothing_is_left(
    tmp_path: Path, task: str, records: list[Any], left_out: str
) -> None:
    model = {**LLAMA, "lora": {"r": 2}}
    document = {"task": task, "model": model, "data": _lines(tmp_path / "some.jsonl", *records)}
    document["validation"] = {"samples": 0}
    assert _opened(document).remarks == [f"left out of the train data: {left_out}."]
    document["data"] = _lines(tmp_path / "none.jsonl", records[-1])
    reason = left_out.rpartition(", 1 ")[2] if task == SFT_TASK else "lines with equal answers"
    with pytest.raises(CorpusTooSmallError, match=f"none of the training split can be learned from: 1 {reason}"):
        _opened(document)
