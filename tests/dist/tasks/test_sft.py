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
def test_a_lost_worker_costs_no_step(
    make_job: Callable[..., Any], reference: Callable[..., dict[int, float]], tmp_path: Path
) -> None:
    spec = _spec(tmp_path, packing=True)
    job = make_job(memory=True, **spec)
    group, source = job.lose_one_of_three(2)
    survivors = group[:2]
    exits = job.run(survivors, layout=Layout(tp=2), restore_snapshot=source, restore_from=None)
    assert [one.kind for one in exits] == [ExitKind.FINISHED] * 2, [one.error for one in exits]
    assert job.losses(group) == pytest.approx(reference(_STEPS, **spec), abs=1e-5)


def test_two_workers_train_every_token_that_overlaps_an_answer(make_job: Callable[..., Any], tmp_path: Path) -> None:
    """The loss of the first step is that of transformers, with labels that are written down here."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from kit.worlds.tokenizer_layouts import write_layout

    directory = write_layout(tmp_path / "model", "trimmed")
    torch.manual_seed(0)
    network = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
        )
    )
    network.save_pretrained(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    answers = [f"{'no' if number % 2 else 'yes'}" for number in range(4)]
    prompts = [f"The sky is blue. Answer {number}: " for number in range(4)]
    total = num = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = [*tokenizer(prompt + answer)["input_ids"], tokenizer.eos_token_id]
        begin = next(at for at in range(len(tokens)) if len(tokenizer.decode(tokens[: at + 1])) > len(prompt))
        losses = torch.nn.functional.cross_entropy(
            network(torch.tensor([tokens])).logits[0, begin - 1 : -1], torch.tensor(tokens[begin:]), reduction="sum"
        )
        total, num = total + losses.item(), num + len(tokens) - begin
    file = tmp_path / "answers.jsonl"
    lines = [{"prompt": prompt, "completion": answer} for prompt, answer in zip(prompts, answers, strict=True)]
    file.write_text("\n".join(map(json.dumps, lines)))
    spec = _spec(tmp_path, packing=False, snapshot={"enabled": False}, model={"path": str(directory), "seq_len": 32})
    spec["data"] |= {"paths": [str(file)], "validation_fraction": 0}
    job = make_job(**spec)
    workers = job.workers(2)
    assert {one.kind for one in job.run(workers)} == {ExitKind.FINISHED}
    assert job.losses(workers)[1] == pytest.approx(total / num, abs=1e-5)
