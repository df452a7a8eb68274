"""Preferences give the losses of a plain loop over transformers in every layout, with and without adapters, also if a
worker is lost; the reference is in no checkpoint and no export."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kit.worlds.hugging_face_configs import save_small_llama
from shoal_workers.checkpoint.reader import read_catalogue
from shoal_workers.contract.batch_partition import sample_at, sample_positions
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.hugging_face import DPO_TASK
from shoal_workers.contract.layout import Layout, Schedule, fully_sharded
from shoal_workers.contract.messages import ExitKind
from shoal_workers.contract.worker_reports import SnapshotCost, StepReport
from shoal_workers.engine.model.draw import Box, draw
from shoal_workers.engine.model.fast_build import build_undrawn
from shoal_workers.export import export
from shoal_workers.tasks.dpo import DirectPreferenceOptimization

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

_STEPS = 4
_BETA = 0.3
_LORA: dict[str, Any] = {"r": 4, "alpha": 8, "target_modules": ["q_proj", "o_proj", "down_proj"]}
_LAYOUTS = {
    "dp2": Layout(dp_replicate=2),
    "fsdp2": Layout(dp_shard=2),
    "full2": fully_sharded(2),
    "tp2": Layout(tp=2),
    "pp2": Layout(pp=2, schedule=Schedule.GPIPE),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a small model whose head is its embedding."""
    directory = tmp_path_factory.mktemp("base")
    save_small_llama(directory, tie_word_embeddings=True)
    return directory


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    lines = [
        {"prompt": f"{a} x {b} = ", "chosen": str(a * b), "rejected": f"about {a + b}"}
        for a in range(2, 12)
        for b in range(3, 15)
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def _spec(base: Path, pairs: Path, *, lora: bool, data: Any = None, **changes: Any) -> dict[str, Any]:
    return {
        "task": DPO_TASK,
        "model": {"path": str(base), "seq_len": 24, "dpo": {"beta": _BETA}, **({"lora": _LORA} if lora else {})},
        "data": {"paths": [str(pairs)], "cache_dir": f"{pairs}-cache", "tokenizer": "bytes", **(data or {})},
        "batch": {"global_size": 4, "micro_size": 1},
        "optimizer": {"lr": 0.05 if lora else 0.003, "clip_norm": 1.0, "weight_decay": 0.1},
        "schedule": {"warmup_steps": 0, "name": "constant"},
        "stop": {"steps": _STEPS},
        "checkpoint": {"every_steps": None},
        "validation": {"samples": 0},
        "seed": 3,
        **changes,
    }


def _log_probs(network: Any, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = network(tokens).logits.float().log_softmax(-1)
    counts = labels != -100
    picked: torch.Tensor = logits.gather(-1, labels.where(counts, 0).unsqueeze(-1)).squeeze(-1)
    return (picked * counts).sum(-1)


class Plain:
    """Losses and margins by step, and the trained model, of a plain loop over transformers, with a second model as the
    reference."""

    def __init__(self, base: Path, pairs: Path, *, lora: bool) -> None:
        spec = parse_spec(_spec(base, pairs, lora=lora))
        torch.set_num_threads(1)
        task = DirectPreferenceOptimization(spec.model, spec.data, spec.seed)
        network: Any = transformers.AutoModelForCausalLM.from_pretrained(base)
        reference: Any = transformers.AutoModelForCausalLM.from_pretrained(base).requires_grad_(False)
        if lora:
            undrawn = build_undrawn(task.build_model)
            assert undrawn is not None
            config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=_LORA["target_modules"], task_type="CAUSAL_LM")
            network = peft.get_peft_model(network, config)
            for name, parameter in network.named_parameters():
                if parameter.requires_grad:
                    own = name.replace("base_model.model.", "network.", 1)
                    box = Box(tuple(parameter.shape), (0,) * parameter.ndim, tuple(parameter.shape))
                    with torch.no_grad():
                        draw(undrawn[1][own], spec.seed, own, box, parameter)
        trained = [one for one in network.parameters() if one.requires_grad]
        o = spec.optimizer
        decayed = [one for one in trained if one.ndim > 1]
        groups = [
            {"params": decayed, "weight_decay": o.weight_decay},
            {"params": [one for one in trained if one.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps)
        data = task.build_dataset("train")
        self.losses: dict[int, float] = {}
        self.margins: dict[int, float] = {}
        for step in range(_STEPS):
            optimizer.zero_grad()
            positions = sample_positions(step, 0, global_size=4, micro_size=4)
            samples = [data[sample_at(p, num_samples=len(data), seed=spec.seed)] for p in positions]
            tokens, labels = (torch.cat([one[key] for one in samples]) for key in ("tokens", "labels"))
            ratios = (_log_probs(network, tokens, labels) - _log_probs(reference, tokens, labels)).view(-1, 2)
            margins = _BETA * (ratios[:, 0] - ratios[:, 1])
            loss = -F.logsigmoid(margins).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, o.clip_norm or math.inf)
            optimizer.step()
            self.losses[step + 1], self.margins[step + 1] = loss.item(), margins.mean().item()
        assert self.losses[_STEPS] < self.losses[1] - 0.05, "a model that learns nothing proves nothing"
        self.network = network.eval()


@pytest.fixture(scope="module")
def plain(base: Path, pairs: Path) -> dict[bool, Plain]:
    return {lora: Plain(base, pairs, lora=lora) for lora in (False, True)}


def _check_saved(checkpoint: str, *, lora: bool) -> None:
    names = set(read_catalogue(checkpoint)[0])
    assert names and not any("reference." in name for name in names)
    assert all((".lora_" in name) == lora for name in names)


def _check_export(checkpoint: str, base: Path, out: Path, expected: Any, *, lora: bool) -> None:
    export(checkpoint, out)
    if lora:
        loaded = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), out)
    else:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokens = torch.arange(32).reshape(2, 16)
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(tokens).logits, expected(tokens).logits, atol=1e-4, rtol=1e-4)


_CASES = [
    pytest.param(layout, lora, id=f"{layout} {'adapters' if lora else 'whole'}", marks=marks)
    for layout in _LAYOUTS
    for lora in (False, True)
    if lora or layout != "pp2"
    for marks in [() if (layout, lora) in (("fsdp2", False), ("tp2", False), ("pp2", True)) else pytest.mark.matrix]
]


@pytest.mark.parametrize(("layout", "lora"), _CASES)
def test_a_layout_trains_as_a_plain_loop_does(
    make_job: Callable[..., Any],
    base: Path,
    pairs: Path,
    plain: dict[bool, Plain],
    tmp_path: Path,
    layout: str,
    lora: bool,
) -> None:
    job = make_job(**_spec(base, pairs, lora=lora, snapshot={"enabled": False}))
    workers = job.workers(2)
    exits = job.run(workers, layout=_LAYOUTS[layout])
    assert [one.kind for one in exits] == [ExitKind.FINISHED] * 2, [one.error for one in exits]
    assert job.losses(workers) == pytest.approx(plain[lora].losses, abs=1e-5)
    margins = {one.step: one.metrics["rewards/margins"] for one in job.reported(workers, StepReport)}
    assert margins == pytest.approx(plain[lora].margins, abs=1e-4)
    _check_saved(job.committed[-1], lora=lora)
    _check_export(job.committed[-1], base, tmp_path / "out", plain[lora].network, lora=lora)


@pytest.mark.matrix
@pytest.mark.parametrize("lora", [False, True])
def test_a_lost_worker_and_a_new_one_give_the_losses_of_the_undisturbed_run(
    make_job: Callable[..., Any], base: Path, pairs: Path, plain: dict[bool, Plain], tmp_path: Path, lora: bool
) -> None:
    job = make_job(memory=True, **_spec(base, pairs, lora=lora))
    group, source = job.lose_one_of_three(2)
    survivors = group[:2]
    survivors[0].strike("forward", 3, "hold")
    job.start(survivors, layout=Layout(tp=2), restore_snapshot=source, restore_from=None)
    survivors[0].reached()
    survivors[0].call("go")
    source = job.in_memory(job.interrupt(survivors), survivors)
    grown = [*survivors, *job.workers(1, "n3")]
    exits = job.run(grown, layout=fully_sharded(3), restore_snapshot=source, restore_from=None)
    assert [one.kind for one in exits] == [ExitKind.FINISHED] * 3, [one.error for one in exits]
    group += grown[2:]
    assert job.losses(group) == pytest.approx(plain[lora].losses, abs=1e-5)
    _check_saved(job.committed[-1], lora=lora)
    cost = job.reported(grown, SnapshotCost)[-1]
    assert cost.copies_reason == "", "the state is in shared memory, so the reference is not part of it"
    _check_export(job.committed[-1], base, tmp_path / "out", plain[lora].network, lora=lora)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["full2", "tp2"])
def test_pairs_of_similar_lengths_train_as_one_process_does(
    make_job: Callable[..., Any],
    reference: Callable[..., dict[int, float]],
    base: Path,
    pairs: Path,
    tmp_path: Path,
    layout: str,
) -> None:
    spec = _spec(base, pairs, lora=True, data={"max_tokens": 120}, snapshot={"enabled": False})
    config = json.loads((base / "config.json").read_text())
    spec["model"] = {key: one for key, one in spec["model"].items() if key != "path"} | {"config": config}
    spec["schedule"] = {"warmup_steps": 1}
    job = make_job(**spec)
    workers = job.workers(2)
    exits = job.run(workers, layout=_LAYOUTS[layout])
    assert [one.kind for one in exits] == [ExitKind.FINISHED] * 2, [one.error for one in exits]
    assert job.losses(workers) == pytest.approx(reference(_STEPS, **spec), abs=1e-5)


@pytest.mark.matrix
@pytest.mark.parametrize(("lora", "axes"), [(False, {"fsdp2", "tp2"}), (True, {"fsdp2", "tp2", "pp2"})])
def test_its_layouts_are_proven(
    answer_of: Callable[..., Any], base: Path, pairs: Path, lora: bool, axes: set[str]
) -> None:
    [proofs] = answer_of("layout_proofs.py", json.dumps([[_spec(base, pairs, lora=lora), None]]))
    assert {name: proof["outcome"] for name, proof in proofs.items()} == dict.fromkeys(axes, "proven")
