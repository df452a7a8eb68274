"""Fine-tuning on answers gives the losses of one process in every layout, also if a worker is lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal_workers.contract.hugging_face import SFT_TASK
from shoal_workers.contract.layout import Layout, Schedule
from shoal_workers.contract.messages import ExitKind

pytest.importorskip("transformers")

_STEPS = 4
_CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 257,
    "max_position_embeddings": 64,
}
_LAYOUTS = {
    "fsdp2": Layout(dp_shard=2),
    "tp2": Layout(tp=2),
    "pp2": Layout(pp=2, schedule=Schedule.GPIPE),
}


def _spec(folder: Path, *, packing: bool, **changes: Any) -> dict[str, Any]:
    file = folder / "train.jsonl"
    lines = [{"prompt": f"{a} x {b} = ", "completion": str(a * b)} for a in range(2, 14) for b in range(3, 15)]
    file.write_text("\n".join(map(json.dumps, lines)))
    return {
        "task": SFT_TASK,
        "model": {"config": _CONFIG, "seq_len": 32},
        "data": {"paths": [str(file)], "cache_dir": str(folder / "cache"), "packing": packing},
        "batch": {"global_size": 4, "micro_size": 1},
        "optimizer": {"lr": 0.01, "clip_norm": 1.0},
        "schedule": {"warmup_steps": 1},
        "stop": {"steps": _STEPS},
        "checkpoint": {"every_steps": None},
        "validation": {"samples": 0},
        "seed": 3,
        **changes,
    }


@pytest.mark.matrix
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("layout", _LAYOUTS)
def test_a_layout_trains_as_one_process_does(
    make_job: Callable[..., Any], reference: Callable[..., dict[int, float]], tmp_path: Path, layout: str, packing: bool
) -> None:
    spec = _spec(tmp_path, packing=packing, snapshot={"enabled": False})
    job = make_job(**spec)
    workers = job.workers(2)
    exits = job.run(workers, layout=_LAYOUTS[layout])
    assert [one.kind for one in exits] == [ExitKind.FINISHED] * 2, [one.error for one in exits]
    assert job.losses(workers) == pytest.approx(reference(_STEPS, **spec), abs=1e-5)


@pytest.mark.matrix
def test_a_step_is_the_mean_over_its_tokens_whatever_the_micro_batches_are(
    make_job: Callable[..., Any], reference: Callable[..., dict[int, float]], tmp_path: Path
) -> None:
    spec = _spec(tmp_path, packing=False, snapshot={"enabled": False})
    job = make_job(**spec)
    workers = job.workers(2)
    assert {one.kind for one in job.run(workers)} == {ExitKind.FINISHED}
    whole = {**spec, "batch": {"global_size": 4, "micro_size": 4}}
    assert job.losses(workers) == pytest.approx(reference(_STEPS, **whole), abs=1e-5)


@pytest.mark.parametrize("layout", ["tp2", pytest.param("fsdp2", marks=pytest.mark.matrix)])
def test_micro_batches_of_similar_lengths_train_as_one_process_does(
    make_job: Callable[..., Any], reference: Callable[..., dict[int, float]], tmp_path: Path, layout: str
) -> None:
    spec = _spec(tmp_path, packing=False, snapshot={"enabled": False})
    spec["data"] |= {"max_tokens": 64}
    job = make_job(**spec)
    workers = job.workers(2)
    exits = job.run(workers, layout=_LAYOUTS[layout])
    assert [one.kind for one in exits] == [ExitKind.FINISHED] * 2, [one.error for one in exits]
    assert job.losses(workers) == pytest.approx(reference(_STEPS, **spec), abs=1e-5)


@pytest.mark.matrix
def test_a_lost_worker_leaves_the_losses_as_they_are(
    make_job: Callable[..., Any], reference: Callable[..., dict[int, float]], tmp_path: Path
) -> None:
    spec = _spec(tmp_path, packing=True)
    job = make_job(memory=True, **spec)
    group, source = job.lose_one_of_three(2)
    survivors = group[:2]
    exits = job.run(survivors, layout=Layout(tp=2), restore_snapshot=source, restore_from=None)
    assert [one.kind for one in exits] == [ExitKind.FINISHED] * 2, [one.error for one in exits]
    assert job.losses(group) == pytest.approx(reference(_STEPS, **spec), abs=1e-5)
