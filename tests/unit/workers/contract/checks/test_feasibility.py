"""A job whose parallelism does not fit its workers is refused at submit, with the nearest legal choice."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_workers.contract.checks.feasibility import fixed_layout, infeasible, legal_degrees
from shoal_workers.contract.checks.legality import violations
from shoal_workers.contract.checks.spec_errors import SpecError, parse_spec
from shoal_workers.contract.layout import Layout, Schedule
from shoal_workers.contract.model.plan_of import plan_of
from shoal_workers.contract.spec import JobSpec, ParallelismSpec

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
    assert infeasible(parse_spec({**LEAST, **change})) == ()


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
