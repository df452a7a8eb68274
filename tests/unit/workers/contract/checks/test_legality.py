"""Each rule of a layout refuses what it must, and a job needs a legal layout at the numbers of workers it allows."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_workers.contract.checks.legality import (
    LayoutRule as Rule,
)
from shoal_workers.contract.checks.legality import (
    find_infeasible,
    fixed_layout,
    legal_degrees,
    nearest_divisors,
    violations,
)
from shoal_workers.contract.checks.spec_errors import SpecError, parse_spec
from shoal_workers.contract.layout import Layout, ParallelismSpec, Schedule
from shoal_workers.contract.spec import JobSpec, plan_of

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
        ({"tp": 2, "shard": "none"}, DENSE, Rule.NONE_NEEDS_WHOLE_MODEL, "every worker, and tp is 2. Set shard to"),
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


def test_sums_in_8_bits_allow_no_tp_and_the_planner_chooses_none() -> None:
    """On any other axis the ranks with the same parameters are in one sum, or exchange what they got."""
    document = {**LEAST, "model": DENSE}
    exact, spec = parse_spec(document), parse_spec({**document, "reduce_precision": "int8"})
    plan = plan_of(spec)
    [violation] = violations(Layout(tp=2, dp_shard=2), spec, plan)
    assert violation.rule is Rule.INT8_NEEDS_ONE_TP_RANK
    assert violation.message.endswith("Set tp to 1, or reduce_precision to fp32 or bf16.")
    assert not violations(Layout(pp=2, dp_replicate=2, dp_shard=2, cp=2), spec, plan)
    assert legal_degrees(spec, plan).tp == (1,)
    assert legal_degrees(exact, plan).tp == (1, 2, 4)
    with pytest.raises(SpecError, match="tp is 2, but reduce_precision int8 rounds at random"):
        parse_spec({**document, "reduce_precision": "int8", "parallelism": {"tp": 2}, "elasticity": {"max_workers": 2}})


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


LEAST: dict[str, Any] = {"stop": {"steps": 5}, "data": {"corpus": "python-stdlib"}}


@pytest.mark.parametrize(
    ("change", "path", "said"),
    [
        (
            {"parallelism": {"tp": 3}, "elasticity": {"max_workers": 4}, "model": {"hidden_dim": 768, "seq_len": 252}},
            "parallelism.tp",
            "tp 3 does not divide the number of attention heads, 8: 8 = 2 x 3 + 2. Use tp 2 or 4.",
        ),
        (
            {"parallelism": {"tp": 2, "pp": 2}, "elasticity": {"max_workers": 3}},
            "parallelism",
            "needs a multiple of pp 2 x tp 2 = 4 workers, but elasticity allows 1 to 3 workers, "
            "which contains none. Set max_workers to 4",
        ),
        (
            {"parallelism": {"tp": 4}, "elasticity": {"min_workers": 5, "max_workers": 7}},
            "parallelism",
            "Set max_workers to 4 or 8",
        ),
        (
            {"parallelism": {"dp_shard": 2}, "elasticity": {"min_workers": 3, "max_workers": 4}},
            "parallelism",
            "dp_shard 2 = 2 workers, but elasticity allows 3 to 4 workers. Set min_workers to 2",
        ),
        (
            {"parallelism": {"tp": 2, "otherwise": "idle"}, "elasticity": {"max_workers": 4}},
            "parallelism.otherwise",
            "with 1 worker",
        ),
        (
            {"elasticity": {"max_workers": 11}},
            "elasticity.max_workers",
            "1 worker would have nothing to do. Lower max_workers to 10",
        ),
        ({"elasticity": {"max_workers": 9}, "deterministic": True}, "elasticity.max_workers", "Lower max_workers to 8"),
        (
            {"elasticity": {"max_workers": 9}, "task": "mine:Task", "data": {}},
            "elasticity.max_workers",
            "more than the 8 micro-batches a step",
        ),
        (
            {"parallelism": {"tp": 2}, "elasticity": {"max_workers": 2}, "task": "mine:Task", "data": {}},
            "parallelism.tp",
            "declares no plan",
        ),
    ],
)
def test_an_impossible_parallelism_is_refused(change: dict[str, Any], path: str, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec({**LEAST, **change})
    [problem] = caught.value.problems
    assert problem.path == path
    assert said in problem.message


@pytest.mark.parametrize(
    "change",
    [
        {"parallelism": {"tp": 2}, "elasticity": {"max_workers": 3}},
        {"parallelism": {"dp_shard": 2, "tp": 2}, "elasticity": {"max_workers": 8}},
        {"parallelism": {"tp": 2, "otherwise": "idle"}, "elasticity": {"min_workers": 2, "max_workers": 5}},
        {"parallelism": {"ep": 2}, "model": {"num_experts": 4}, "elasticity": {"max_workers": 2}},
        {"elasticity": {"max_workers": 10}},
    ],
)
def test_elastic_degrees_need_one_world_that_fits(change: dict[str, Any]) -> None:
    assert find_infeasible(parse_spec({**LEAST, **change})) == ()


def test_hostile_degrees_are_refused_quickly() -> None:
    for axis in ("tp", "pp", "cp", "ep", "dp_shard", "dp_replicate"):
        with pytest.raises(SpecError):
            parse_spec({**LEAST, "parallelism": {axis: 2**53}})


def test_auto_sets_dp_shard_from_the_other_degrees() -> None:
    fixed = ParallelismSpec(tp=2, pp=2)
    layout = fixed_layout(fixed, 12, None)
    assert layout is not None and (layout.dp_shard, layout.world_size) == (3, 12)
    assert fixed_layout(fixed, 6, None) is None


def _spec(**changes: Any) -> JobSpec:
    return parse_spec({**LEAST, **changes})


@given(st.sampled_from([(8, 4, 64), (6, 3, 48), (12, 12, 96)]), st.integers(1, 6), st.sampled_from([0, 6, 8]))
def test_legal_degrees_are_legal_together(heads: tuple[int, int, int], layers: int, experts: int) -> None:
    num_heads, kv, length = heads
    model = {"dim": 16 * num_heads, "num_heads": num_heads, "num_kv_heads": kv, "seq_len": length}
    spec = _spec(model={**model, "num_layers": layers, "num_experts": experts})
    plan = plan_of(spec)
    degrees = legal_degrees(spec, plan)
    for tp in degrees.tp:
        for cp in degrees.cp:
            if degrees.together(tp, cp):
                for ep in degrees.ep:
                    layout = Layout(tp=tp, cp=cp, pp=degrees.pp[-1], ep=ep, dp_shard=ep, schedule=Schedule.GPIPE)
                    assert not violations(layout, spec, plan)
