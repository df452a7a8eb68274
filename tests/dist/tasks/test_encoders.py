"""Models of transformers that are no causal language models train in a group as one process does, also if a worker is
lost and the group changes its size, and transformers loads what was trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.worlds.encoder_worlds import MODELS, small_spec, their_inputs, write_data
from shoal_workers.checkpoint.reader import load
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.layout import Layout
from shoal_workers.contract.messages import ExitKind
from shoal_workers.engine.task.task import load_task
from shoal_workers.export import export

transformers = pytest.importorskip("transformers")

_STEPS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("data")
    write_data(found)
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("layout", [Layout(dp_shard=2), Layout(dp_replicate=2)], ids=lambda layout: layout.describe())
@pytest.mark.parametrize("name", MODELS)
def test_two_workers_train_as_one_process_does(
    make_job: Callable[..., Any], reference: Callable[..., dict[int, float]], folder: Path, name: str, layout: Layout
) -> None:
    spec = {**small_spec(name, folder), "snapshot": {"enabled": False}}
    job = make_job(**spec)
    workers = job.workers(2)
    exits = job.run(workers, layout=layout)
    assert [one.kind for one in exits] == [ExitKind.FINISHED] * 2, [one.error for one in exits]
    assert job.losses(workers) == pytest.approx(reference(_STEPS, **spec), abs=1e-5)


@pytest.mark.parametrize(
    "name", ["bert", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("t5", "resnet", "whisper"))]
)
def test_a_lost_worker_and_another_size_leave_losses_and_exported_model_as_they_are(
    make_job: Callable[..., Any],
    reference: Callable[..., dict[int, float]],
    folder: Path,
    tmp_path: Path,
    name: str,
) -> None:
    spec = small_spec(name, folder)
    job = make_job(memory=True, **spec)
    group, source = job.lose_one_of_three(2)
    survivors = group[:2]
    exits = job.run(survivors, layout=Layout(dp_shard=2), restore_snapshot=source, restore_from=None)
    assert [one.kind for one in exits] == [ExitKind.FINISHED] * 2, [one.error for one in exits]
    assert job.losses(group) == pytest.approx(reference(_STEPS, **spec), abs=1e-5)
    export(job.committed[-1], tmp_path / "out")
    task = load_task(parse_spec(spec))
    auto = getattr(transformers, task._task.auto_class)
    loaded, report = auto.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    trained: Any = task.build_model().eval()
    tensors = {f"model.{given}": value.detach() for given, value in trained.named_parameters()}
    tensors |= {f"model.{given}": value for given, value in trained.named_buffers() if given in trained.state_dict()}
    load(tensors, directory=job.committed[-1])
    task.open_data()
    inputs = their_inputs(spec["task"], task.collate([task.train_data[index] for index in range(2)]))
    with torch.no_grad():
        assert torch.equal(loaded.eval()(**inputs).logits, trained.network(**inputs).logits)
    if name in ("t5", "whisper"):
        inputs.pop("labels")
        generated = loaded.generate(**inputs, max_new_tokens=3, do_sample=False)
        assert 2 <= generated.shape[1] <= 4 and len(generated) == 2
