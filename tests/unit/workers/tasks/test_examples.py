"""The examples are valid specs, and the user's own task learns."""

import importlib.machinery
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.spec import JobSpec
from shoal_workers.tasks.lm import LanguageModel

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
    found = sorted(path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.yaml"))
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
