"""Plans of the built-in language model and of a user's task, and shapes of models."""

from typing import Any

from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.model import ModelShape, TensorStyle, difference
from shoal_workers.contract.spec import plan_of

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
