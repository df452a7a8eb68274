"""Plans of the built-in model, of a user's task and of Hugging Face models, and how such a model may be split."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal_workers.contract.checks.legality import LayoutRule as Rule
from shoal_workers.contract.checks.legality import violations
from shoal_workers.contract.checks.spec_errors import SpecError, parse_spec
from shoal_workers.contract.hugging_face import HF_TASK, HuggingFaceConfig, dropout_of
from shoal_workers.contract.hugging_face_plan import as_language_model, plan_of_hugging_face, sizes_of
from shoal_workers.contract.layout import Layout
from shoal_workers.contract.model import ModelShape, ParallelPlan, TensorStyle, difference
from shoal_workers.contract.spec import JobSpec, plan_of

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


def _plan_hf(**changes: Any) -> Any:
    return plan_of(_spec({"config": {**CONFIG, **changes}}))


def test_a_config_determines_how_the_model_may_be_split() -> None:
    plan = _plan_hf()
    assert (plan.blocks, plan.num_blocks, plan.hidden_size) == ("network.model.layers", 3, 48)
    assert (plan.num_heads, plan.num_kv_heads, plan.widths) == (6, 2, {"intermediate_size": 96})
    assert plan.tensor["network.model.layers.*.self_attn.q_proj"] is TensorStyle.COLUMN
    assert plan.tensor["network.model.layers.*.mlp.down_proj"] is TensorStyle.ROW
    assert plan.tied == {}
    assert _plan_hf(tie_word_embeddings=True).tied == {"network.lm_head.weight": "network.model.embed_tokens.weight"}


def test_a_directory_gives_the_same_plan_and_is_not_needed_at_submit(tmp_path: Path) -> None:
    model = {"path": str(tmp_path)}
    assert plan_of(_spec(model)) is None
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert plan_of(_spec(model)) == _plan_hf()
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert plan_of(_spec(model)) is None


@pytest.mark.parametrize("changes", [{"model_type": "bloom"}, {"num_key_value_heads": None}, {"hidden_size": "wide"}])
def test_what_is_not_known_has_the_data_axes(changes: dict[str, Any]) -> None:
    assert _plan_hf(**changes) is None


MIXTURE = {**CONFIG, "model_type": "qwen2_moe", "num_experts": 8, "shared_expert_intermediate_size": 24}


def test_experts_are_in_the_plan_and_stay_whole_under_tp() -> None:
    plan = plan_of_hugging_face(HuggingFaceConfig(config={**MIXTURE, "mlp_only_layers": [0]}))
    assert plan is not None
    assert (plan.experts, plan.num_experts) == ("network.model.layers.*.mlp.experts", 8)
    assert plan.widths == {"intermediate_size": 96, "shared_expert_intermediate_size": 24}
    assert plan.tensor["network.model.layers.*.mlp.shared_expert.down_proj"] is TensorStyle.ROW
    assert not [name for name in plan.tensor if name.endswith("mlp.experts")]
    all_sparse = plan_of_hugging_face(HuggingFaceConfig(config=MIXTURE))
    assert all_sparse is not None
    assert "network.model.layers.*.mlp.down_proj" not in all_sparse.tensor, "no block has a dense layer"


@pytest.mark.parametrize(
    ("changes", "axis", "words"),
    [
        ({"model_type": "gpt2", "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}, "tp", "c_attn holds several"),
        ({"model_type": "phi3"}, "tp", r"qkv_proj holds .* Its axes are dp_replicate, dp_shard, pp\."),
        ({"model_type": "llama"}, "ep", r"it has no experts\). Its axes are dp_replicate, dp_shard, tp, pp\."),
        ({"model_type": "mixtral"}, "ep", "its config lacks a size"),
        ({**MIXTURE, "output_router_logits": True}, "pp", "a loss of the routers of all blocks"),
        ({"model_type": "bloom"}, "tp", r"these have: cohere, .*\). Its axes are dp_replicate, dp_shard\."),
        ({"model_type": "bloom"}, "cp", "none has"),
    ],
)
def test_the_refusal_of_an_axis_names_the_architecture_the_reason_and_its_axes(
    changes: dict[str, Any], axis: str, words: str
) -> None:
    more = {"dp_shard": 2} if axis == "ep" else {}
    config = {**CONFIG, **changes}
    with pytest.raises(SpecError, match=f"'{config['model_type']}' has no plan for {axis} .*{words}"):
        _spec({"config": config}, parallelism={axis: 2, **more}, elasticity={"max_workers": 2})


def test_a_dropout_that_the_config_does_not_name_counts_and_one_of_another_head_does_not() -> None:
    def dropout(**config: Any) -> tuple[str, float] | None:
        return dropout_of(HuggingFaceConfig(config=config))

    assert dropout(model_type="gpt2") == ("resid_pdrop", 0.1)
    assert dropout(model_type="gpt2", resid_pdrop=0, embd_pdrop=0.0, attn_pdrop=0) is None
    assert dropout(model_type="gpt_neox", classifier_dropout=0.1) is None


def test_norms_of_heads_see_a_part_of_them() -> None:
    assert _plan_hf(model_type="qwen3").tensor["network.model.layers.*.self_attn.k_norm"] is TensorStyle.PARTIAL


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


def test_quantized_weights_are_refused_with_the_way_out(tmp_path: Path) -> None:
    config = {**CONFIG, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for model in ({"config": config}, {"path": str(tmp_path)}):
        with pytest.raises(SpecError, match=r"model: .*'bitsandbytes'.* QLoRA .* not supported\. Write the weights"):
            _spec(model)


def _adapted(targets: Any = "all-linear", **config: Any) -> ParallelPlan:
    document = {"config": {**CONFIG, **config}, "lora": {"r": 4, "target_modules": targets}}
    plan = plan_of(_spec(document))
    assert plan is not None
    return plan


def test_of_an_adapter_the_layer_with_the_split_dim_is_split() -> None:
    block = "network.model.layers.*."
    styles = _adapted(["q_proj", "mlp.down_proj"]).tensor
    assert styles[f"{block}self_attn.q_proj.base_layer"] is TensorStyle.COLUMN
    assert styles[f"{block}self_attn.q_proj.lora_B.default"] is TensorStyle.COLUMN
    assert styles[f"{block}mlp.down_proj.base_layer"] is TensorStyle.ROW
    assert styles[f"{block}mlp.down_proj.lora_A.default"] is TensorStyle.ROW
    assert styles[f"{block}self_attn.k_proj"] is TensorStyle.COLUMN, "it has no adapter"
    assert not [name for name in styles if name.endswith(("q_proj", "q_proj.lora_A.default"))]
    assert f"{block}self_attn.k_proj.base_layer" in _adapted().tensor


def test_dense_layers_beside_experts_have_no_adapter() -> None:
    styles = _adapted(**MIXTURE).tensor
    assert "network.model.layers.*.mlp.shared_expert.down_proj" in styles
    assert "network.model.layers.*.self_attn.o_proj.base_layer" in styles


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"load_in_4bit": True}, r"model\.lora has load_in_4bit: QLoRA is not supported"),
        ({"target_modules": ["lm_head"]}, "names 'lm_head': adapters of the embedding and of the head"),
        ({"target_modules": []}, "target_modules"),
        ({"r": 0}, r"model\.lora\.r"),
        ({"rank": 4}, "unknown key 'rank'"),
    ],
)
def test_adapters_that_cannot_be_are_refused(lora: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        _spec({"config": CONFIG, "lora": lora})


def test_dropout_of_adapters_stays_on_the_data_axes_and_their_base_has_one_source() -> None:
    spec = _spec({"config": CONFIG, "lora": {"dropout": 0.1}})
    [violation] = violations(Layout(tp=2), spec, plan_of(spec))
    assert "model.lora.dropout 0.1" in violation.message
    with pytest.raises(SpecError, match="init_from replaces the weights"):
        _spec({"config": CONFIG, "lora": {}}, init_from="/weights")


def test_sizes_have_the_names_of_the_family() -> None:
    config = {"model_type": "gpt2", "n_embd": 48, "n_layer": 3, "n_head": 6, "n_inner": None, "vocab_size": 300}
    sizes = sizes_of(HuggingFaceConfig(config=config))
    assert sizes is not None
    assert (sizes.hidden_size, sizes.num_hidden_layers, sizes.num_key_value_heads) == (48, 3, 6)
    assert (sizes.intermediate_size, sizes.tie_word_embeddings) == (192, True)
    assert as_language_model(HuggingFaceConfig(config=MIXTURE)) is None, "its experts are whole under tp"


@pytest.mark.parametrize(
    ("changes", "num_windowed"),
    [
        ({}, 0),
        ({"model_type": "mistral", "sliding_window": 64}, 3),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False}, 0),
        ({"model_type": "gemma2", "sliding_window": 64}, 2),
        ({"model_type": "gemma3_text", "sliding_window": 64, "sliding_window_pattern": 3}, 2),
        ({"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}, 1),
        ({"model_type": "mistral", "sliding_window": None}, 0),
    ],
)
def test_blocks_with_a_sliding_window_are_counted(changes: dict[str, Any], num_windowed: int) -> None:
    sizes = sizes_of(HuggingFaceConfig(config={**CONFIG, **changes}))
    assert sizes is not None
    assert sizes.num_windowed_layers == num_windowed


def test_the_planner_uses_its_sizes() -> None:
    same = as_language_model(HuggingFaceConfig(config={**CONFIG, "head_dim": 16}, seq_len=64))
    assert same is not None
    assert (same.dim, same.num_layers, same.head_dim, same.hidden_dim, same.seq_len) == (48, 3, 16, 96, 64)


LEAST: dict[str, Any] = {"stop": {"steps": 5}, "data": {"corpus": "python-stdlib"}}


def _plan(**model: Any) -> Any:
    return plan_of(parse_spec({**LEAST, "model": model}))


def test_a_dense_model_has_heads_blocks_and_one_width() -> None:
    plan = _plan(dim=64, num_heads=4, num_kv_heads=2, num_layers=3, seq_len=32)
    assert (plan.num_blocks, plan.hidden_size, plan.num_heads, plan.num_kv_heads, plan.seq_len) == (3, 64, 4, 2, 32)
    assert plan.widths == {"model.hidden_dim": 192}
    assert plan.tensor["blocks.*.attention.out"] is TensorStyle.ROW
    assert plan.tensor["blocks.*.feed_forward.down"] is TensorStyle.ROW
    assert plan.tied == {"head.weight": "embedding.weight"}
    assert (plan.experts, plan.num_experts) == ("", 0)


def test_a_mixture_of_experts_names_its_experts_and_shared_expert() -> None:
    plan = _plan(num_experts=8, num_shared_experts=2, expert_hidden_dim=96, tied_head=False)
    assert (plan.experts, plan.num_experts) == ("blocks.*.feed_forward.experts", 8)
    assert plan.widths == {
        "model.expert_hidden_dim": 96,
        "model.num_shared_experts x model.expert_hidden_dim": 192,
    }
    assert plan.tensor["blocks.*.feed_forward.shared.up"] is TensorStyle.COLUMN
    assert "blocks.*.feed_forward.up" not in plan.tensor
    assert plan.tied == {}


def test_the_first_blocks_may_stay_dense() -> None:
    plan = _plan(num_experts=8, num_dense_layers=1, expert_hidden_dim=96)
    assert list(plan.widths) == ["model.hidden_dim", "model.expert_hidden_dim"]
    assert "blocks.*.feed_forward.up" in plan.tensor


def test_another_task_has_the_plan_that_it_declares() -> None:
    task = {"stop": {"steps": 1}, "task": "shapes:Shapes"}
    assert plan_of(parse_spec(task)) is None
    declared = plan_of(parse_spec({**task, "plan": {"blocks": "layers", "num_blocks": 4, "hidden_size": 8}}))
    assert declared is not None and declared.num_blocks == 4


TRAINED = ModelShape(tensors={"a.weight": "float32 [2, 3]", "a.bias": "float32 [2]", "b": "float32 [1]"})


def test_equal_models_have_no_difference() -> None:
    assert difference(TRAINED, TRAINED) == ""


def test_the_first_tensors_that_differ_are_named() -> None:
    other = ModelShape(tensors={"a.weight": "float32 [4, 3]", "a.bias": "float16 [2]", "c": "float32 [1]"})
    assert difference(TRAINED, other) == (
        "its model does not fit the state of the one that trains: a.weight is float32 [4, 3] and was float32 [2, 3]; "
        "a.bias is float16 [2] and was float32 [2]; b (float32 [1]) is gone; and 1 more"
    )
