"""`init_from`: a job begins with the weights of a file, in any layout, with a fresh optimizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from shoal_workers.checkpoint.errors import InitialWeightsUnusable
from shoal_workers.checkpoint.safetensors_reader import SafetensorsReader
from shoal_workers.contract.layout import fully_sharded
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import StepReport

SPEC: dict[str, Any] = {
    "stop": {"steps": 3},
    "batch": {"global_size": 4, "micro_size": 1},
    "checkpoint": {"every_steps": 2},
}


def _weights(directory: Path, shift: float = 0.25) -> Path:
    import tiny_tasks

    torch.manual_seed(7)
    model = tiny_tasks.Counting({}, {}, 0).build_model()
    state = {name: (value + shift).contiguous() for name, value in model.state_dict().items() if name != "head.weight"}
    save_file(state, directory / "model.safetensors")
    return directory / "model.safetensors"


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "kit" / "tasks"))
    return _weights(tmp_path)


def test_the_first_loss_is_that_of_the_weights_in_every_layout_and_the_seed_does_not_matter(
    make_job: Any, weights: Path
) -> None:
    def losses(name: str, world: int, **changes: Any) -> dict[int, float]:
        job = make_job(name, **SPEC | {"model": {"dropout": 0.0}} | changes)
        group = job.workers(world)
        job.finish(group)
        return {item.step: item.loss for item in job.reported([group[0]], StepReport)}

    drawn = losses("drawn", 1)
    given = losses("given", 1, init_from=str(weights))
    sharded = losses("sharded", 3, init_from=str(weights.parent))
    assert abs(given[1] - drawn[1]) > 1e-3
    assert sharded == pytest.approx(given, rel=1e-5)


def test_a_job_that_recovers_does_not_begin_with_the_file_again(make_job: Any, weights: Path) -> None:
    job = make_job(**SPEC, init_from=str(weights))
    (end,) = job.run(job.workers(1))
    assert end.kind is ExitKind.FINISHED
    weights.unlink()
    (again,) = job.run(job.workers(1), layout=fully_sharded(1))
    assert (again.kind, again.step) == (ExitKind.FINISHED, 3), again.error


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"init_from": "/nowhere/model.safetensors"}, "it cannot be read: FileNotFoundError"),
        ({"model": {"dim": 5}}, r"it does not fit the model: embed\.weight is \[29, 21\] in it, \[29, 5\] here"),
        ({"model": {"layers": 3}}, r"it has no blocks\.2\."),
    ],
)
def test_what_does_not_fit_is_refused_in_words(make_job: Any, weights: Path, change: Any, words: str) -> None:
    job = make_job(**SPEC | {"init_from": str(weights)} | change)
    (end,) = job.run(job.workers(1))
    assert end.kind is ExitKind.USER_ERROR and end.error is not None
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(end.error.message)


def test_a_damaged_file_is_refused(weights: Path) -> None:
    data = weights.read_bytes()
    weights.write_bytes(data[:-4])
    reader = SafetensorsReader(str(weights))
    last = max(reader.tensors, key=lambda name: reader.tensors[name].offset)
    with pytest.raises(InitialWeightsUnusable, match="ends within"):
        reader.read(last)
    weights.write_bytes(b"\xff" * 64)
    with pytest.raises(InitialWeightsUnusable, match="not a valid safetensors file"):
        SafetensorsReader(str(weights))
    (weights.parent / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "no.safetensors"}}))
    with pytest.raises(InitialWeightsUnusable, match="cannot be read"):
        SafetensorsReader(str(weights.parent))
