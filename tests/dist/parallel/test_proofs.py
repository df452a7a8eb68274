"""Every layout is proven: a right plan on each axis, and each way in which a plan of one's own can be wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kit.processes.warm import warm_python
from kit.tasks.planned_tasks import RIGHT, Decoder, plan_of, spec_of
from shoal_workers.contract.layout import Layout
from shoal_workers.contract.model import ParallelPlan
from shoal_workers.contract.proofs import LayoutProof
from shoal_workers.engine.proof.copies import TooLarge, copy_of, shrunk

pytestmark = pytest.mark.dist

TASKS = Path(__file__).parents[2] / "kit" / "tasks"

WRONG = {
    "fused": ("tp2", r"the output of 'blocks\.0\.attention\.\w+'"),
    "head_norm": ("tp2", r"the gradient of 'blocks\.0\.attention\.head_norm\.\w+'"),
    "small_norm": ("tp2", r"the gradient of 'blocks\.0\.attention\.head_norm\.\w+'"),
    "skip": ("pp2", r"LayerNorm in pipeline stage 1 gets a value that forward\(\) computes in an earlier stage"),
    "pool": ("cp2", r"the output of 'norm' differs by \d+ %"),
    "arange": ("cp2", r"the output of 'place'"),
}
"""What is wrong with the task or its plan: the layout that must be refused, and what is named."""
LANGUAGE_MODEL = {
    "stop": {"steps": 3},
    "batch": {"global_size": 8, "micro_size": 2},
    "data": {"corpus": "python-stdlib", "max_bytes": 100_000},
    "model": {"dim": 32, "num_layers": 4, "num_heads": 4, "seq_len": 16, "num_experts": 4, "num_dense_layers": 1},
}
ALL_AXES = [
    {"dp_shard": 2},
    {"tp": 2},
    {"cp": 2, "context": "ulysses"},
    {"dp_shard": 2, "ep": 2},
    {"pp": 2, "tp": 2},
    {"pp": 2, "schedule": "zbv", "stages": [1, 1, 1, 1]},
]


@pytest.fixture(scope="module")
def prove(answer_of: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """`prove(spec, layouts)`: the proofs of these layouts, or of all that suit the spec, by layout in words."""

    def prove(spec: dict[str, Any], layouts: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        [proofs] = answer_of("layout_proofs.py", json.dumps([[spec, layouts]]))
        return dict(proofs)

    return prove


@pytest.mark.parametrize("kind", RIGHT)
def test_a_right_plan_is_proven_on_every_axis_that_it_names(prove: Callable[..., Any], kind: str) -> None:
    assert {name for name, proof in prove(spec_of(kind)).items() if proof["outcome"] == "proven"} == {
        "dp2",
        "tp2",
        "pp2",
        "cp2",
    }


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_plan_is_refused_and_the_place_is_named(prove: Callable[..., Any], kind: str) -> None:
    layout, named = WRONG[kind]
    proof = prove(spec_of(kind), [{layout[:2]: 2}])[layout]
    assert proof["outcome"] == "refused", proof
    begin = "(trains another model than one process|cannot be computed)"
    assert re.match(rf"the layout {layout} {begin}: .*{named}", proof["words"]), proof


def test_a_right_plan_is_proven_in_bf16_on_every_axis(prove: Callable[..., Any]) -> None:
    proofs = prove({**spec_of("partial"), "precision": "bf16", "module_precision": {"blocks.*.norm1": "fp32"}})
    assert [proof["outcome"] for proof in proofs.values()] == ["proven"] * 4, proofs


def test_what_is_wrong_in_bf16_only_is_refused(prove: Callable[..., Any]) -> None:
    assert prove(spec_of("half"), [{"tp": 2}])["tp2"]["outcome"] == "proven"
    proof = prove({**spec_of("half"), "precision": "bf16"}, [{"tp": 2}])["tp2"]
    assert proof["outcome"] == "refused", proof
    named = r"the gradient of 'blocks\.0\.attention\.head_norm\.\w+'"
    assert re.match(f"the layout tp2 in bf16 trains another model than one process: {named}", proof["words"]), proof


@pytest.mark.parametrize(
    ("mode", "settings"),
    [("bf16", {"precision": "bf16"}), ("bf16", {"precision": "fp16"}), ("deterministic", {"deterministic": True})],
)
def test_what_is_carried_in_one_mode_only_is_refused_in_it(
    prove: Callable[..., Any], mode: str, settings: dict[str, Any]
) -> None:
    spec = {
        "task": "carrying_tasks:OnlyIn",
        "batch": {"global_size": 8, "micro_size": 2},
        "stop": {"steps": 3},
        **settings,
    }
    layouts = [{"dp_shard": 2}]
    [other] = prove({**spec, "model": {"mode": "none"}}, layouts).values()
    assert other["outcome"] == "proven", other
    [proof] = prove({**spec, "model": {"mode": mode}}, layouts).values()
    assert proof["outcome"] == "refused" and "changes 'number' of the task" in proof["words"], proof


MUON: dict[str, Any] = {"model": {"dim": 96}, "batch": {"global_size": 4, "micro_size": 1}, "stop": {"steps": 3}}
WHOLE = [{"dp_replicate": 2, "shard": "none"}]


def test_an_update_that_enlarges_the_rounding_of_gradients_is_compared_with_what_it_does_to_that(
    prove: Callable[..., Any],
) -> None:
    """Muon orthogonalises in bf16: a last bit of a gradient changes a percent of its update."""
    proof = prove({**MUON, "task": "own_optimizers:Orthogonal"}, WHOLE)["dp2"]
    assert proof["outcome"] == "proven", proof
    proof = prove({**MUON, "task": "tiny_tasks:Counting", "optimizer": {"name": "muon"}}, [{"dp_shard": 2}])["fsdp2"]
    assert proof["outcome"] == "proven", proof


def test_a_step_that_is_another_one_on_shards_is_refused_with_the_way_out(prove: Callable[..., Any]) -> None:
    proof = prove({**MUON, "task": "own_optimizers:OrthogonalByShard"}, [{"dp_shard": 2}])["fsdp2"]
    assert proof["outcome"] == "refused", proof
    assert "differs after an update by" in proof["words"] and "Set parallelism: {shard: none}" in proof["words"]


def test_a_job_with_a_wrong_layout_ends_in_one_sentence_before_its_first_step_and_remembers_it(tmp_path: Path) -> None:
    spec = {**spec_of("pool"), "parallelism": {"cp": 2}, "elasticity": {"max_workers": 2}, "validation": {"samples": 0}}
    (tmp_path / "spec.yaml").write_text(json.dumps(spec))
    proofs = tmp_path / "proofs"
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(TASKS))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "SHOAL_PROOFS": str(proofs)}
    command = [warm_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "shoal_workers.run", "spec.yaml"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    words = "the layout cp2 trains another model than one process: the output of 'norm' differs by"
    assert done.returncode == 1 and words in done.stderr and "step 1 " not in done.stdout, done.stdout + done.stderr
    (remembered,) = proofs.glob("*.json")
    assert words in LayoutProof.model_validate_json(remembered.read_text()).words


def test_a_large_model_is_proven_without_most_of_its_blocks() -> None:
    plan, device = ParallelPlan.model_validate(plan_of("")), torch.device("cpu")

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Decoder("")

    assert shrunk(build, plan, Layout(tp=2)) is None
    smaller = shrunk(build, plan, Layout(tp=2), largest=10_000)
    assert smaller is not None and smaller.kept == (0, 3)
    one, other = (copy_of(build, 7, device, smaller).state_dict() for _ in range(2))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert {name.split(".")[1] for name in one if name.startswith("blocks.")} == {"0", "1"}
    with pytest.raises(TooLarge, match="its plan names no blocks"):
        shrunk(build, ParallelPlan(), Layout(tp=2), largest=10_000)


def test_the_built_in_model_is_proven_on_all_axes(prove: Callable[..., Any], tmp_path: Path) -> None:
    data = {**LANGUAGE_MODEL["data"], "cache_dir": str(tmp_path)}  # type: ignore[dict-item]
    found = prove({**LANGUAGE_MODEL, "data": data}, ALL_AXES)
    assert {proof["outcome"] for proof in found.values()} == {"proven"}, found
    assert max(proof["difference"] for proof in found.values()) < 1e-5
    assert len(found) == len(ALL_AXES)
