"""Adapters beside a frozen model of transformers: trained as peft trains them in one process, saved and exported alone,
and not disturbed by a lost worker or a change of size."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.worlds.hugging_face_configs import save_small_llama
from shoal_workers.checkpoint.reader import read_catalogue
from shoal_workers.contract.batch_partition import sample_at, sample_positions
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.hugging_face import HF_TASK
from shoal_workers.contract.layout import Layout, Schedule
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import SnapshotCost
from shoal_workers.engine.model.draw import Box, draw
from shoal_workers.engine.model.fast_build import build_undrawn
from shoal_workers.export import export
from shoal_workers.tasks.hf import HuggingFaceLM

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

_STEPS = 5
_LORA: dict[str, Any] = {"r": 4, "alpha": 8, "target_modules": ["q_proj", "o_proj", "down_proj"]}
_LAYOUTS = {
    "fsdp2": Layout(dp_shard=2),
    "tp2": Layout(tp=2),
    "pp2": Layout(pp=2, schedule=Schedule.GPIPE),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a small model."""
    directory = tmp_path_factory.mktemp("base")
    save_small_llama(directory)
    return directory


def _spec(base: Path, text: str, **changes: Any) -> dict[str, Any]:
    return {
        "task": HF_TASK,
        "model": {"path": str(base), "seq_len": 16, "lora": _LORA},
        "data": {"paths": [text], "cache_dir": f"{text}-cache", "validation_fraction": 0.3},
        "batch": {"global_size": 4, "micro_size": 1},
        "optimizer": {"lr": 0.05, "clip_norm": 1.0, "weight_decay": 0.1},
        "schedule": {"warmup_steps": 0, "name": "constant"},
        "stop": {"steps": _STEPS},
        "checkpoint": {"every_steps": None},
        "validation": {"samples": 0},
        "seed": 3,
        **changes,
    }


@pytest.fixture(scope="module")
def with_peft(base: Path, text: str) -> tuple[dict[int, float], Any]:
    """Losses by step, and the model, of a plain loop over peft's own model; its adapters begin with the same values."""
    spec = parse_spec(_spec(base, text))
    torch.set_num_threads(1)
    task = HuggingFaceLM(spec.model, spec.data, spec.seed)
    undrawn = build_undrawn(task.build_model)
    assert undrawn is not None
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=_LORA["target_modules"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base), config)
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    for name, parameter in trained.items():
        own = name.replace("base_model.model.", "network.", 1)
        box = Box(tuple(parameter.shape), (0,) * parameter.ndim, tuple(parameter.shape))
        with torch.no_grad():
            draw(undrawn[1][own], spec.seed, own, box, parameter)
    o = spec.optimizer
    optimizer = torch.optim.AdamW(
        trained.values(), lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay
    )
    data, losses = task.build_dataset("train"), {}
    for step in range(_STEPS):
        optimizer.zero_grad()
        positions = sample_positions(step, 0, global_size=4, micro_size=4)
        batch = task.collate([data[sample_at(p, num_samples=len(data), seed=spec.seed)] for p in positions])
        logits = model(batch["tokens"]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), o.clip_norm or math.inf)
        optimizer.step()
        losses[step + 1] = loss.item()
    assert losses[_STEPS] < losses[1] - 0.05, "adapters that learn nothing prove nothing"
    return losses, model.eval()


def _check_saved(checkpoint: str) -> None:
    """Adapters and their optimizer state alone."""
    names = set(read_catalogue(checkpoint)[0])
    assert names and all(".lora_A.default." in name or ".lora_B.default." in name for name in names)
    assert {name.partition(".")[0] for name in names} == {"model", "optim"}


def _check_export(checkpoint: str, base: Path, out: Path, expected: Any) -> None:
    """What is exported is peft's own, and computes the same as the adapters of the plain loop."""
    export(checkpoint, out)
    assert {file.name for file in out.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    network = transformers.AutoModelForCausalLM.from_pretrained(base)
    loaded = peft.PeftModel.from_pretrained(network, out)
    named = {name for name, _ in loaded.named_parameters() if "lora_" in name}
    assert named == {name for name, _ in expected.named_parameters() if "lora_" in name}
    tokens = torch.arange(32).reshape(2, 16)
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(tokens).logits, expected(tokens).logits, atol=1e-4, rtol=1e-4)
    assert loaded.generate(input_ids=tokens[:1], max_new_tokens=2, do_sample=False).shape == (1, 18)


@pytest.mark.parametrize("layout", ["tp2", *(pytest.param(one, marks=pytest.mark.matrix) for one in ("fsdp2", "pp2"))])
def test_adapters_are_trained_and_exported_as_by_peft(
    make_job: Callable[..., Any],
    base: Path,
    text: str,
    with_peft: tuple[dict[int, float], Any],
    tmp_path: Path,
    layout: str,
) -> None:
    job = make_job(**_spec(base, text, snapshot={"enabled": False}))
    workers = job.workers(2)
    exits = job.run(workers, layout=_LAYOUTS[layout])
    assert [one.kind for one in exits] == [ExitKind.FINISHED] * 2, [one.error for one in exits]
    assert job.losses(workers) == pytest.approx(with_peft[0], abs=1e-5)
    _check_saved(job.committed[-1])
    _check_export(job.committed[-1], base, tmp_path / "out", with_peft[1])


@pytest.mark.matrix
def test_a_lost_worker_and_a_new_one_give_the_losses_of_the_undisturbed_run(
    make_job: Callable[..., Any], base: Path, text: str, with_peft: tuple[dict[int, float], Any], tmp_path: Path
) -> None:
    job = make_job(memory=True, **_spec(base, text))
    group, source = job.lose_one_of_three(2)
    survivors = group[:2]
    survivors[0].strike("forward", 4, "hold")
    job.start(survivors, layout=Layout(dp_shard=2), restore_snapshot=source, restore_from=None)
    survivors[0].reached()
    survivors[0].call("go")
    source = job.in_memory(job.interrupt(survivors), survivors)
    grown = [*survivors, *job.workers(1, "n3")]
    exits = job.run(grown, layout=Layout(dp_shard=3), restore_snapshot=source, restore_from=None)
    assert [one.kind for one in exits] == [ExitKind.FINISHED] * 3, [one.error for one in exits]
    group += grown[2:]
    assert job.losses(group) == pytest.approx(with_peft[0], abs=1e-5)
    _check_saved(job.committed[-1])
    cost = job.reported(grown, SnapshotCost)[-1]
    assert cost.copies_reason == "", "the state is in shared memory, so the base is not part of it"
    assert cost.num_bytes < (base / "model.safetensors").stat().st_size / 4
    _check_export(job.committed[-1], base, tmp_path / "out", with_peft[1])


@pytest.mark.matrix
def test_a_checkpoint_is_resumed_by_other_workers_from_the_base_and_the_adapters(
    make_job: Callable[..., Any], base: Path, text: str, with_peft: tuple[dict[int, float], Any]
) -> None:
    spec = _spec(base, text, snapshot={"enabled": False}, checkpoint={"every_steps": 3})
    job = make_job(**spec)
    first = job.workers(2)
    assert {one.kind for one in job.run(first, layout=_LAYOUTS["fsdp2"])} == {ExitKind.FINISHED}
    half = next(url for url in job.committed if "step-000000000003" in url)
    others = job.workers(1)
    [end] = job.run(others, layout=Layout(dp_shard=1), restore_from=half)
    assert end.kind is ExitKind.FINISHED, end.error
    assert job.losses(others) == pytest.approx({step: with_peft[0][step] for step in (4, 5)}, abs=1e-5)
