"""A data set of a few lines trains with all defaults; the examples are valid specs, and the user's own task learns."""

import importlib.machinery
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

from kit.worlds.encoder_worlds import MODELS, small_spec, write_data
from kit.worlds.hugging_face_configs import small_config
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.hugging_face import DPO_TASK, HF_TASK, SFT_TASK
from shoal_workers.contract.language_model import LM_TASK
from shoal_workers.contract.spec import JobSpec
from shoal_workers.data.errors import CorpusTooSmallError
from shoal_workers.engine.task.task import LoadedTask, load_task
from shoal_workers.tasks.lm import LanguageModel

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


@pytest.mark.parametrize("fraction", [None, 0.999_999])
@pytest.mark.parametrize("media", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_built_in_task_trains_on_data_without_a_validation_split(
    tmp_path: Path, media: bool, fraction: float | None
) -> None:
    """Also where the fraction would hold back all of the few examples."""
    failures, jobs = [], _small_jobs(tmp_path)
    assert {document["task"] for document in jobs.values()} >= {task for task, _, _ in MODELS.values()}
    for name, document in jobs.items():
        if (name in _MEDIA) is not media:
            continue
        if fraction is not None:
            document["data"]["validation_fraction"] = fraction
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
            "lines without an answer within model.seq_len 16: 1, lines without an answer: 1",
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
            "lines with equal answers within model.seq_len 16: 3, "
            "lines without both answers within model.seq_len 16: 1",
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
    reason = "lines without an answer" if task == SFT_TASK else "lines with equal answers within model.seq_len 16"
    with pytest.raises(CorpusTooSmallError, match=f"none of the training split can be learned from: {reason}: 1"):
        _opened(document)


EXAMPLES = Path(__file__).resolve().parents[4] / "examples"


TEMPLATES = EXAMPLES.parent / "api" / "shoal_api" / "cli" / "templates"


def _spec(name: str) -> JobSpec:
    return parse_spec(yaml.safe_load((EXAMPLES / name).read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def shapes() -> ModuleType:
    return _module("shapes", EXAMPLES / "user-task" / "shapes.py")


def _module(name: str, path: Path) -> ModuleType:
    loader = importlib.machinery.SourceFileLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_every_example_is_a_valid_spec() -> None:
    paths = (path for path in EXAMPLES.rglob("*.yaml") if path.name != "failure-rates.yaml")  # of `shoal simulate`
    found = sorted(path.relative_to(EXAMPLES).as_posix() for path in paths)
    assert {"byte-lm.yaml", "lm-10m.yaml", "user-task/shapes.yaml"} <= set(found)
    for name in found:
        assert _spec(name).name == Path(name).stem


@pytest.mark.parametrize(("name", "least", "most"), [("byte-lm.yaml", 0.4e6, 2e6), ("lm-10m.yaml", 9e6, 11e6)])
def test_the_language_models_have_their_stated_sizes(name: str, least: float, most: float) -> None:
    spec = _spec(name)
    task = LanguageModel(model=spec.model, data=spec.data, seed=spec.seed)
    assert least < sum(p.numel() for p in task.build_model().parameters()) < most


def test_the_demo_can_run_on_two_to_four_workers() -> None:
    spec = _spec("byte-lm.yaml")
    assert (spec.elasticity.min_workers, spec.elasticity.max_workers) == (2, 4)
    assert spec.batch.num_micro_batches >= 4


def test_the_user_task_is_under_60_lines_and_does_not_import_shoal() -> None:
    source = (EXAMPLES / "user-task" / "shapes.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) < 60
    assert "shoal" not in source.lower().replace("shoal's", "")


def test_an_image_is_a_function_of_its_index(shapes: ModuleType) -> None:
    task = shapes.Shapes(model={}, data={"num_images": 32}, seed=3)
    data, again = task.build_dataset("train"), task.build_dataset("train")
    torch.rand(5)  # another position of the global generator
    for index in range(32):
        assert torch.equal(data[index][0], again[index][0])
        assert data[index][1] == again[index][1]
    assert {data[index][1] for index in range(32)} == {0, 1, 2}
    assert not torch.equal(data[0][0], task.build_dataset("validation")[0][0])


def test_the_loss_of_the_user_task_falls_in_a_few_steps(shapes: ModuleType) -> None:
    spec = _spec("user-task/shapes.yaml")
    task = shapes.Shapes(model=spec.model, data=spec.data, seed=spec.seed)
    data = task.build_dataset("train")
    torch.manual_seed(0)
    model = task.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec.optimizer.lr)
    losses: list[float] = []
    for step in range(30):
        samples: list[Any] = [data[step * 32 + index] for index in range(32)]
        loss = task.loss(model, torch.utils.data.default_collate(samples))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 0.9
    assert sum(losses[-5:]) / 5 < 0.6 * losses[0]


def test_the_task_of_the_template_learns_and_has_a_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    points = _module("points", TEMPLATES / "own-task" / "points.py.template")
    task = points.Points(model={}, data={}, seed=0)
    data = task.build_dataset("train")
    torch.manual_seed(0)
    model = task.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batch = torch.utils.data.default_collate([data[index] for index in range(256)])
    first, _ = task.loss(model, batch)
    for _ in range(60):
        loss, metrics = task.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.6 * first.item() and metrics["accuracy"].item() > 0.7
