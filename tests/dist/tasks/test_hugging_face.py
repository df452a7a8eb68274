"""Hugging Face models under every layout that they have, and back: transformers loads what was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kit.worlds.whole_states import whole
from shoal_workers.checkpoint.reader import load
from shoal_workers.contract.hugging_face import HF_TASK
from shoal_workers.contract.language_model import LM_TASK
from shoal_workers.contract.layout import Layout, Schedule
from shoal_workers.contract.messages import ExitKind
from shoal_workers.export import export
from shoal_workers.tasks.hf import HuggingFaceLM
from shoal_workers.tasks.lm import LanguageModel

pytest.importorskip("transformers")

_STEPS = 3
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 257,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
SPEC: dict[str, Any] = {
    "task": HF_TASK,
    "model": {"config": {"model_type": "llama", **SIZES}, "seq_len": 16},
    "batch": {"global_size": 4, "micro_size": 1},
    "optimizer": {"lr": 0.01, "clip_norm": 1.0},
    "schedule": {"warmup_steps": 1},
    "stop": {"steps": _STEPS},
    "checkpoint": {"every_steps": None},
    "validation": {"samples": 0},
    "snapshot": {"enabled": False},
    "seed": 3,
}
LAYOUTS = {
    "fsdp2": Layout(dp_shard=2),
    "tp2": Layout(tp=2),
    "pp2": Layout(pp=2, schedule=Schedule.GPIPE),
    "zbv": Layout(pp=2, schedule=Schedule.ZERO_BUBBLE_V, stages=(1, 1, 1, 1)),
}


def _spec(text: str, **model: Any) -> dict[str, Any]:
    data = {"paths": [text], "cache_dir": f"{text}-cache", "validation_fraction": 0.3}
    config = {**SPEC["model"]["config"], **model}
    return {**SPEC, "data": data, "model": {**SPEC["model"], "config": config}}


def _train(make_job: Any, spec: dict[str, Any], layout: Layout) -> tuple[dict[int, float], str]:
    """Losses by step, and the directory of the last checkpoint."""
    job = make_job("job", **spec)
    workers = job.workers(layout.world_size)
    exits = job.run(workers, layout=layout)
    faults = [one.error.traceback for one in exits if one.error]
    assert [one.kind for one in exits] == [ExitKind.FINISHED] * len(workers), "\n".join(faults)
    return job.losses(workers), job.committed[-1]


@pytest.mark.matrix
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_trains_as_one_process_does(make_job: Any, reference: Any, text: str, layout: str, tied: bool) -> None:
    blocks = len(LAYOUTS[layout].stages) or 2
    # two model types for the price of one: the second has a norm on each head
    model_type = "llama" if tied else "qwen3"
    spec = _spec(text, model_type=model_type, head_dim=8, tie_word_embeddings=tied, num_hidden_layers=blocks)
    losses, _ = _train(make_job, spec, LAYOUTS[layout])
    assert losses == pytest.approx(reference(_STEPS, **spec), abs=1e-5)


@pytest.mark.parametrize("layout", [pytest.param("fsdp2", marks=pytest.mark.matrix), "tp2"])
def test_transformers_loads_what_a_sharded_checkpoint_exports(
    make_job: Any, text: str, tmp_path: Path, layout: str
) -> None:
    from transformers import AutoModelForCausalLM

    spec = _spec(text, tie_word_embeddings=layout == "tp2")
    _, checkpoint = _train(make_job, spec, LAYOUTS[layout])
    done = export(checkpoint, tmp_path / "out", file_bytes=20_000)
    assert len(done.files) > 1
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    trained = _trained(spec, checkpoint)
    tokens = torch.arange(32).reshape(2, 16)
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, trained.network(tokens).logits)


MIXTURE = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}


@pytest.mark.matrix
def test_experts_go_on_in_another_layout_after_a_death_and_what_is_exported_generates(
    make_job: Any, reference: Any, text: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    spec = {**_spec(text, **MIXTURE), "snapshot": {"enabled": True}}
    job = make_job(memory=True, **spec)
    group = [worker for node in range(2) for worker in job.workers(1, f"n{node}")]
    group[1].strike("forward", 2, "hold")
    job.start(group, layout=Layout(dp_shard=2, ep=2), restore_from=None, buddy_of=lambda rank: group[(rank + 1) % 2])
    group[1].reached()
    group[1].poll()
    group[1].kill()
    source = job.in_memory(job.interrupt(group[:1]), group[:1])
    assert source.step in (1, 2), "the copies of the last step may still be on their way"
    grown = [group[0], *job.workers(1, "n2")]
    exits = job.run(grown, layout=Layout(tp=2), restore_snapshot=source, restore_from=None)
    assert [one.kind for one in exits] == [ExitKind.FINISHED] * 2, [one.error for one in exits]
    assert job.losses([*group, grown[1]]) == pytest.approx(reference(_STEPS, **spec), abs=1e-5)
    export(job.committed[-1], tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.arange(32).reshape(2, 16)
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, _trained(spec, job.committed[-1]).network(tokens).logits)
    assert loaded.generate(tokens[:1], max_new_tokens=2, do_sample=False).shape == (1, 18)


@pytest.mark.matrix
def test_exported_models_can_be_trained_further(make_job: Any, text: str, tmp_path: Path) -> None:
    spec = _spec(text)
    _, checkpoint = _train(make_job, spec, LAYOUTS["fsdp2"])
    export(checkpoint, tmp_path / "out")
    again = {**spec, "model": {"path": str(tmp_path / "out"), "seq_len": 16}}
    job = make_job("again", **again)
    begun = _begun_with(job, LAYOUTS["tp2"])
    for name, parameter in _trained(spec, checkpoint).named_parameters():
        assert begun[f"model.{name}"].tobytes() == parameter.detach().numpy().tobytes(), name


@pytest.mark.parametrize(("layout", "dtype"), [("fsdp2", torch.float32), ("tp2", torch.bfloat16)])
def test_each_worker_reads_its_part_of_a_directory(
    make_job: Any, text: str, tmp_path: Path, layout: str, dtype: torch.dtype
) -> None:
    """Bit by bit; the names of a base model's directory are converted by transformers, which reads all of it."""
    import transformers

    config = transformers.AutoConfig.for_model("llama", **SIZES)
    torch.manual_seed(5)
    network = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    network.save_pretrained(tmp_path / "all", max_shard_size="20KB")
    network.model.save_pretrained(tmp_path / "base")
    expected = {f"model.network.{name}": value.float() for name, value in network.state_dict().items()}
    for directory in ("all", "base"):
        spec = {**_spec(text), "model": {"path": str(tmp_path / directory), "seq_len": 16}}
        found = _begun_with(make_job(directory, **spec), LAYOUTS[layout])
        stored = {name for name in expected if directory == "all" or "lm_head" not in name}
        assert len(stored) == (21 if directory == "all" else 20)
        for name in stored:
            assert found[name].tobytes() == expected[name].numpy().tobytes(), name
        task = _task(spec)
        task.build_model()
        assert task.initial_weights == (str(tmp_path / "all") if directory == "all" else None)


def test_the_built_in_model_is_exported_as_a_llama(make_job: Any, text: str, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    sizes = {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "seq_len": 16}
    spec = {**_spec(text), "task": LM_TASK, "model": sizes}
    _, checkpoint = _train(make_job, spec, Layout(tp=2))
    export(checkpoint, tmp_path / "out")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    trained = _trained(spec, checkpoint)
    tokens = torch.arange(32).reshape(2, 16)
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, trained(tokens), atol=1e-5, rtol=1e-5)


def _begun_with(job: Any, layout: Layout) -> dict[str, Any]:
    """All tensors before the first step."""
    workers = job.workers(layout.world_size)
    for worker in workers:
        worker.strike("forward", 0, "dump")
    assert {one.kind for one in job.run(workers, layout=layout)} == {ExitKind.FINISHED}
    return whole([worker.dumped() for worker in workers])


def _task(spec: dict[str, Any]) -> Any:
    kind = HuggingFaceLM if spec["task"] == HF_TASK else LanguageModel
    return kind(spec["model"], spec["data"], spec["seed"])


def _trained(spec: dict[str, Any], checkpoint: str) -> Any:
    """The model as this process reads it from the checkpoint."""
    model = _task(spec).build_model()
    load({f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}, directory=checkpoint)
    return model.eval()
