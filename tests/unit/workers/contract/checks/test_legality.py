"""Each rule, by a layout that breaks only this rule. The message contains the arithmetic and the way out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_workers.contract.checks.legality import Rule, nearest_divisors, violations
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.layout import Layout
from shoal_workers.contract.model.plan_of import plan_of

DENSE: dict[str, Any] = {"dim": 64, "num_heads": 8, "num_kv_heads": 4, "num_layers": 4, "seq_len": 64}
EXPERTS: dict[str, Any] = {**DENSE, "num_experts": 6}


def _violations(layout: dict[str, Any], model: dict[str, Any], **spec: Any) -> tuple[Any, ...]:
    document = {"stop": {"steps": 5}, "data": {"corpus": "python-stdlib"}, "model": model, **spec}
    parsed = parse_spec(document)
    return violations(Layout.model_validate(layout), parsed, plan_of(parsed))


@pytest.mark.parametrize(
    ("layout", "model", "rule", "expected"),
    [
        ({"tp": 8}, DENSE, Rule.KV_HEADS_DIVISIBLE, "key and value heads, 4: 4 = 0 x 8 + 4. Use tp 4."),
        (
            {"tp": 8},
            {**DENSE, "num_heads": 12, "num_kv_heads": None, "dim": 96, "hidden_dim": 256},
            Rule.HEADS_DIVISIBLE,
            "tp 8 does not divide the number of attention heads, 12: 12 = 1 x 8 + 4. Use",
        ),
        ({"tp": 4}, {**DENSE, "hidden_dim": 90}, Rule.WIDTH_DIVISIBLE, "model.hidden_dim 90: 90 = 22 x 4 + 2. Use"),
        ({"cp": 3}, DENSE, Rule.SEQUENCE_DIVISIBLE, "2 x 3 = 6 pieces, a head and a tail for each rank, but 64 = 10 x"),
        ({"cp": 16, "tp": 4}, {**DENSE, "seq_len": 32}, Rule.SEQUENCE_DIVISIBLE, "2 tokens that each rank has"),
        (
            {"cp": 8, "tp": 2, "context": "ulysses"},
            DENSE,
            Rule.ULYSSES_DIVIDES_HEADS,
            "tp 2 leaves 4 of 8 heads, and 4 = 0 x 8 + 4",
        ),
        ({"pp": 5}, DENSE, Rule.STAGES_FIT_LAYERS, "5 pipeline stages (pp 5 x 1 on each rank) are more than the 4"),
        ({"pp": 2, "stages": [1, 2]}, DENSE, Rule.STAGES_FIT_LAYERS, "stages [1, 2] hold 3 blocks"),
        ({"pp": 2, "stages": [1, 1, 1, 1]}, DENSE, Rule.STAGES_FIT_SCHEDULE, "4 = 2 x 2 + 0"),
        ({"pp": 2, "schedule": "zbv"}, DENSE, Rule.V_SCHEDULE_NEEDS_TWO_STAGES_PER_RANK, "needs 4 of them, not 2"),
        (
            {"dp_replicate": 3, "dp_shard": 3},
            DENSE,
            Rule.MICRO_BATCHES_FILL_RANKS,
            "dp_replicate 3 x dp_shard 3 = 9 data ranks are more than the 8 micro-batches a step",
        ),
        ({"dp_shard": 2, "ep": 2}, DENSE, Rule.EP_NEEDS_EXPERTS, "no known experts"),
        ({"dp_shard": 4, "ep": 4}, EXPERTS, Rule.EXPERTS_DIVISIBLE, "6 = 1 x 4 + 2. Use ep 3 or 6."),
        ({"dp_shard": 4, "ep": 3}, EXPERTS, Rule.EP_DIVIDES_DP_SHARD, "4 = 1 x 3 + 1. Use ep 2 or 4, or a dp_shard"),
        ({"tp": 2}, {**DENSE, "dropout": 0.1}, Rule.DROPOUT_NEEDS_DATA_AXES, "model.dropout to 0"),
    ],
)
def test_the_message_of_a_broken_rule_has_its_arithmetic(layout: Any, model: Any, rule: Rule, expected: str) -> None:
    [violation] = _violations(layout, model)
    assert violation.rule is rule
    assert expected in violation.message


def test_a_batch_smaller_than_the_pipeline_needs_is_refused() -> None:
    batch = {"global_size": 8, "micro_size": 4}
    [violation] = _violations({"pp": 16, "dp_shard": 2}, {**DENSE, "num_layers": 16}, batch=batch)
    assert violation.rule is Rule.PIPELINE_NEEDS_MICRO_BATCHES
    assert "runs 16 micro-batches on each of 2 data ranks, of which at most 1 would be real" in violation.message
    assert not _violations({"pp": 16, "dp_shard": 2, "schedule": "gpipe"}, {**DENSE, "num_layers": 16}, batch=batch)


def test_deterministic_allows_dp_shard_only() -> None:
    found = _violations({"dp_replicate": 2, "tp": 2}, DENSE, deterministic=True)
    assert {v.rule for v in found} == {Rule.DETERMINISTIC_NEEDS_DATA_AXES}
    assert [v.axis for v in found] == ["dp_replicate", "tp"]
    assert not _violations({"dp_shard": 4}, DENSE, deterministic=True)


@pytest.mark.parametrize(("axis", "section"), [("tp", "plan.tensor"), ("pp", "plan.blocks"), ("cp", "plan.attention")])
def test_a_task_without_a_plan_runs_on_the_data_axes(axis: str, section: str) -> None:
    [violation] = _violations({axis: 2}, {}, task="mine:Task", data={})
    assert violation.rule is Rule.NEEDS_PLAN
    assert "task 'mine:Task' declares no plan" in violation.message
    assert section in violation.message


def test_a_layout_of_five_axes_is_legal() -> None:
    layout = {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2, "ep": 2}
    assert not _violations(layout, EXPERTS)


@given(st.integers(1, 10**18), st.integers(1, 10**18))
def test_the_nearest_divisors_divide(size: int, desired: int) -> None:
    assert all(size % divisor == 0 for divisor in nearest_divisors(size, desired))
