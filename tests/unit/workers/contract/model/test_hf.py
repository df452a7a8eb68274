from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal_workers.contract.checks.legality import Rule, violations
from shoal_workers.contract.checks.spec_errors import SpecError, parse_spec
from shoal_workers.contract.layout import Layout
from shoal_workers.contract.model.hf import HF_TASK, HuggingFaceConfig, as_language_model
from shoal_workers.contract.model.plan import TensorStyle
from shoal_workers.contract.model.plan_of import plan_of
from shoal_workers.contract.spec import JobSpec

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 257,
}


def _spec(model: dict[str, Any], **settings: Any) -> JobSpec:
    document = {"task": HF_TASK, "model": model, "data": {"corpus": "python-stdlib"}, "stop": {"steps": 1}}
    return parse_spec({**document, **settings})


def _plan(**changes: Any) -> Any:
    return plan_of(_spec({"config": {**CONFIG, **changes}}))


def test_a_config_determines_how_the_model_may_be_split() -> None:
    plan = _plan()
    assert (plan.blocks, plan.num_blocks, plan.hidden_size) == ("network.model.layers", 3, 48)
    assert (plan.num_heads, plan.num_kv_heads, plan.widths) == (6, 2, {"intermediate_size": 96})
    assert plan.tensor["network.model.layers.*.self_attn.q_proj"] is TensorStyle.COLUMN
    assert plan.tensor["network.model.layers.*.mlp.down_proj"] is TensorStyle.ROW
    assert plan.tied == {}
    assert _plan(tie_word_embeddings=True).tied == {"network.lm_head.weight": "network.model.embed_tokens.weight"}


def test_a_directory_gives_the_same_plan_and_is_not_needed_at_submit(tmp_path: Path) -> None:
    model = {"path": str(tmp_path)}
    assert plan_of(_spec(model)) is None
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert plan_of(_spec(model)) == _plan()
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert plan_of(_spec(model)) is None


@pytest.mark.parametrize("changes", [{"model_type": "gpt2"}, {"num_key_value_heads": None}, {"hidden_size": "wide"}])
def test_what_is_not_known_has_the_data_axes(changes: dict[str, Any]) -> None:
    assert _plan(**changes) is None


def test_with_a_padding_token_the_vocabulary_is_not_split() -> None:
    assert TensorStyle.HEAD not in _plan(pad_token_id=0).tensor.values()


def test_norms_of_heads_see_a_part_of_them() -> None:
    assert _plan(model_type="qwen3").tensor["network.model.layers.*.self_attn.k_norm"] is TensorStyle.PARTIAL


def test_degrees_are_checked_at_submit() -> None:
    with pytest.raises(SpecError, match="tp 4 does not divide the number of attention heads"):
        _spec({"config": CONFIG}, parallelism={"tp": 4}, elasticity={"max_workers": 4})
    with pytest.raises(SpecError, match="cp is 2, but the architecture 'llama' has no plan for cp"):
        _spec({"config": CONFIG}, parallelism={"cp": 2}, elasticity={"max_workers": 2})


def test_dropout_in_the_config_stays_on_the_data_axes() -> None:
    spec = _spec({"config": {**CONFIG, "attention_dropout": 0.1}})
    [violation] = violations(Layout(tp=2), spec, plan_of(spec))
    assert violation.rule is Rule.DROPOUT_NEEDS_DATA_AXES
    assert "model.attention_dropout 0.1" in violation.message


@pytest.mark.parametrize("model", [{}, {"path": "/models/a", "config": CONFIG}, {"config": {"hidden_size": 8}}])
def test_a_model_has_one_source_and_a_type(model: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="model"):
        _spec(model)


def test_the_planner_uses_its_sizes() -> None:
    same = as_language_model(HuggingFaceConfig(config={**CONFIG, "head_dim": 16}, seq_len=64))
    assert same is not None
    assert (same.dim, same.num_layers, same.head_dim, same.hidden_dim, same.seq_len) == (48, 3, 16, 96, 64)
