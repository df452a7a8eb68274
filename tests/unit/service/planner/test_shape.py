"""Parameters and arithmetic, by hand."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal_service.planner.shape import shape_of
from shoal_workers.contract.checks.spec_errors import parse_spec

EXAMPLES = Path(__file__).resolve().parents[4] / "examples"


def test_a_dense_model_by_hand(job: Any) -> None:
    model = {"dim": 8, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 32, "num_layers": 3, "seq_len": 16}
    shape = shape_of(job({**model, "vocab_size": 300, "tied_head": True}))
    assert shape is not None
    # query and out 8 x 8, key and value 8 x 4, gate, up and down 8 x 32
    assert shape.dense.split_params == 2 * 64 + 2 * 32 + 3 * 256
    assert shape.dense.whole_params == 2 * 8
    assert shape.params == 3 * (960 + 16) + 300 * 8 + 8
    assert shape.active_params == shape.params
    # 2 per parameter, and causal attention: scores and values, 2 x 16 x 8 each, half of them
    assert shape.dense.attention_flops == 2 * 16 * 8
    assert shape.flops_per_token == 3 * (2 * 2400 + 3 * (2 * 960 + 256))


def test_experts_by_hand(job: Any) -> None:
    model = {"dim": 8, "num_heads": 2, "hidden_dim": 32, "expert_hidden_dim": 16, "num_layers": 3, "seq_len": 16}
    shape = shape_of(job({**model, "num_experts": 4, "top_k": 2, "num_shared_experts": 1, "num_dense_layers": 1}))
    assert shape is not None
    assert (shape.num_dense, shape.num_moe) == (1, 2)
    assert shape.moe.expert_params == 4 * 3 * 8 * 16
    assert shape.moe.split_params == 4 * 64 + 3 * 8 * 16
    assert shape.moe.whole_params == 2 * 8 + 8 * 4
    assert shape.params - shape.active_params == 2 * 2 * 3 * 8 * 16
    assert shape.moe.expert_flops == 2 * 2 * 3 * 8 * 16


@pytest.mark.parametrize(("name", "params", "active"), [("llama-70b", 70.6e9, 70.6e9), ("moe-671b", 671e9, 37e9)])
def test_the_large_examples_have_their_stated_sizes(name: str, params: float, active: float) -> None:
    shape = shape_of(parse_spec(yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8"))))
    assert shape is not None
    assert shape.params == pytest.approx(params, rel=0.005)
    assert shape.active_params == pytest.approx(active, rel=0.03)


def test_a_task_of_the_users_has_no_shape(job: Any) -> None:
    assert shape_of(job(task="mine:Task", data={})) is None
