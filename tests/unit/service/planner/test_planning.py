"""The answers of `plan` for every world size, their notes, and the ranked table."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from shoal_service.core.hardware_profile import LinkClass
from shoal_service.planner import plan, plan_ahead, plans, rank, refusal
from shoal_service.planner.gpus import PROFILES
from shoal_service.planner.planning import _cached_plan
from shoal_workers.contract.checks.legality import violations
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.layout import Layout, ParallelismSpec, Recompute, Schedule, ShardLevel, plain
from shoal_workers.contract.spec import JobSpec, plan_of

LARGE: dict[str, Any] = {"dim": 1024, "num_layers": 8, "num_heads": 8, "seq_len": 64}
ONE_EACH = {"global_size": 8, "micro_size": 1}


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
def test_a_job_on_cpus_is_plain_at_every_world_size(job: Any, world: int) -> None:
    layout, reason = _planned(job(elasticity={"max_workers": 8}), world)
    assert layout == plain(world)
    assert reason.startswith(f"8 micro-batches over {world} ranks: {-(-8 // world)} each")
    assert "; plain: every worker has the whole state and trains the task's own module" in reason


@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_a_job_on_cpus_that_cannot_be_plain_stays_fully_on_the_sharded_axis(job: Any, world: int) -> None:
    layout, reason = _planned(job(elasticity={"max_workers": 8}, precision="bf16"), world)
    assert layout == Layout(dp_shard=world, shard=ShardLevel.OPTIMIZER)
    assert reason.startswith(f"8 micro-batches over {world} ranks: {-(-8 // world)} each")
    assert "; data_axes_on_cpu; " in reason and "; split since precision is bf16, to which FSDP2 casts" in reason


def test_a_whole_state_that_is_predicted_not_to_fit_is_sharded_from_the_start(job: Any) -> None:
    spec = job(LARGE, batch=ONE_EACH, elasticity={"max_workers": 8}, worker={"memory_gib": 2})
    whole = rank(spec.model_copy(update={"parallelism": ParallelismSpec(shard=ShardLevel.NONE)}), 4).predictions[0]
    assert not whole.fits
    layout, reason = _planned(spec, 4)
    assert layout.dp_shard == 4
    needed = f"{whole.memory_bytes / (1 << 30):.2f} GiB"
    assert f"split since the whole state does not fit on each worker, where it needs {needed}" in reason


def test_a_whole_state_of_known_size_that_a_worker_has_refused_is_sharded(job: Any) -> None:
    spec = job(elasticity={"max_workers": 8})
    for world in (2, 3, 8):
        planned = plan(spec, world, None, (), (plain(3),))
        assert planned.layout.dp_shard == world and planned.fits
        assert "split since the whole state does not fit on each worker" in planned.reason
    assert plan(spec, 1, None, (), (plain(3),)).layout == plain(1)


def test_workers_without_a_micro_batch_split_the_model_if_that_is_faster(job: Any) -> None:
    spec = job(LARGE, batch={"global_size": 2, "micro_size": 1}, elasticity={"max_workers": 8})
    assert plan(spec, 2).layout == plain(2)
    layout, reason = _planned(spec, 4)
    assert layout.world_size == 4 and layout.planned_axes
    assert reason.endswith("; split since the 4 workers are more than the 2 micro-batches of a step")
    layout, reason = _planned(job(batch=spec.batch.model_dump(), elasticity={"max_workers": 8}), 3)
    assert layout == plain(2) and "1 of 3 ranks idle" in reason


def test_padding_is_counted(job: Any) -> None:
    assert "3 each, 1 of them zero-weight padding" in plan(job(elasticity={"max_workers": 8}), 3).reason


def test_zero_1_gives_way_to_what_fits(job: Any) -> None:
    def level(memory_gib: float) -> Any:
        limit, shards, snapshot = {"memory_gib": memory_gib}, {"dp_shard": "auto"}, {"enabled": False}
        sections = {"batch": ONE_EACH, "elasticity": {"max_workers": 8}, "parallelism": shards, "snapshot": snapshot}
        return plan(job(LARGE, worker=limit, **sections), 4).layout

    assert level(8).shard is ShardLevel.OPTIMIZER
    assert level(1.5).shard is ShardLevel.GRADIENTS
    assert level(1.1).shard is ShardLevel.FULL
    assert {level(gib).dp_shard for gib in (8, 1.5, 1.1)} == {4}


def test_levels_that_the_prediction_cannot_tell_apart_are_rivals(job: Any) -> None:
    sharded = {"elasticity": {"max_workers": 8}, "precision": "bf16"}
    known = plan(job(**sharded), 4)
    others = {ShardLevel.GRADIENTS, ShardLevel.FULL}
    assert {rival.layout.shard for rival in known.rivals} <= others and known.rivals
    assert all(rival.layout.model_copy(update={"shard": known.layout.shard}) == known.layout for rival in known.rivals)
    assert all(rival.fits and rival.reason.startswith("measured: ") for rival in known.rivals)
    for without in (
        {"deterministic": True},
        {"parallelism": {"dp_shard": 4}},
        {"task": "mine:Task", "data": {}},
        {"precision": "fp32"},
    ):
        assert plan(job(**{**sharded, **without}), 4).rivals == ()
    assert plan(job(**sharded), 1).rivals == ()


def test_deterministic_jobs_and_unknown_models_with_a_precision_are_fully_sharded(job: Any) -> None:
    unknown = job(task="mine:Task", data={}, precision="bf16")
    for spec, rule in (
        (job(deterministic=True), "deterministic"),
        (job(task="mine:Task", data={}, deterministic=True), "deterministic"),
        (unknown, "unknown_model: the sizes of the model are unknown, and precision is bf16"),
    ):
        assert plan(spec, 4).layout == Layout(dp_shard=4, shard=ShardLevel.FULL)
        layout, reason = _planned(spec, 11)
        assert layout == Layout(dp_shard=8, shard=ShardLevel.FULL)
        assert rule in reason and "3 of 11 ranks idle" in reason


def test_a_task_of_the_users_own_is_plain_until_its_whole_state_was_refused(job: Any) -> None:
    own: dict[str, Any] = {"task": "mine:Task", "data": {}, "elasticity": {"max_workers": 8}}
    spec = job(**own)
    for world in (1, 3, 8):
        layout, reason = _planned(spec, world)
        assert layout == plain(world)
        assert "; plain: every worker has the whole state and trains the task's own module" in reason
    assert _planned(spec, 11) == (plain(8), plan(spec, 11).reason) and "3 of 11 ranks idle" in plan(spec, 11).reason
    refused = (plain(3),)
    for world in (2, 3, 8):
        planned = plan(spec, world, None, (), refused)
        assert planned.layout == Layout(dp_shard=world)
        assert "unknown_model: the whole state does not fit on each worker" in planned.reason
    assert plan(spec, 1, None, (), refused).layout == plain(1)
    for changes in (
        {"parallelism": {"dp_shard": "auto"}},
        {"worker": {"gpus": 1}},
        {"module_precision": {"a": "bf16"}},
    ):
        assert plan(job(**{**own, **changes}), 3).layout.shard is ShardLevel.FULL, changes


@pytest.mark.parametrize("changes", [{}, {"task": "mine:Task", "data": {}}], ids=["known sizes", "unknown sizes"])
def test_shard_none_keeps_the_model_whole_at_every_world_size(job: Any, changes: Any) -> None:
    spec = job(parallelism={"shard": "none"}, elasticity={"max_workers": 8}, **changes)
    for world in (1, 3, 8):
        layout, reason = _planned(spec, world)
        assert layout == plain(world)
        assert "plain: every worker has the whole state and trains the task's own module" in reason
        assert "as_requested" in reason
    layout, reason = _planned(spec, 11)
    assert layout == plain(8) and "3 of 11 ranks idle" in reason


def test_fixed_degrees_are_respected_where_they_fit(job: Any) -> None:
    fixed = {"tp": 2, "pp": 2, "schedule": "gpipe", "recompute": "full"}
    spec = job(parallelism=fixed, elasticity={"max_workers": 8})
    layout, reason = _planned(spec, 8)
    assert (layout.tp, layout.pp, layout.dp_shard, layout.dp_replicate) == (2, 2, 2, 1)
    assert (layout.schedule, layout.recompute) == (Schedule.GPIPE, Recompute.FULL)
    assert "as_requested" in reason
    layout, reason = _planned(spec, 3)
    assert layout.world_size == 3
    assert "a new plan, because the degrees of parallelism need a multiple of 4 workers" in reason


def test_ranks_idle_if_the_caller_allows_it(job: Any) -> None:
    spec = job(parallelism={"tp": 2, "otherwise": "idle"}, elasticity={"min_workers": 2, "max_workers": 8})
    layout, reason = _planned(spec, 7)
    assert (layout.tp, layout.dp_shard) == (2, 3)
    assert "1 of 7 ranks idle" in reason


def test_a_users_plan_is_used_with_fixed_degrees(job: Any) -> None:
    declared = {"blocks": "layers", "num_blocks": 4, "hidden_size": 8}
    spec = job(task="mine:Task", data={}, plan=declared, parallelism={"pp": 2}, elasticity={"max_workers": 4})
    layout = plan(spec, 4).layout
    assert (layout.pp, layout.dp_shard, layout.stages) == (2, 2, (2, 2))
    assert plan(spec, 3).layout == Layout(dp_shard=3)


def test_what_cannot_fit_gets_the_layout_that_needs_least(job: Any) -> None:
    layout, reason = _planned(job(worker={"memory_gib": 0.01}), 2)
    assert layout.world_size == 2
    assert "more than there is" in reason


def test_plans_of_all_sizes_can_be_had_ahead(job: Any) -> None:
    spec = job(elasticity={"max_workers": 4})
    ahead = plans(spec, range(1, 5))
    assert ahead == {world: plan(spec, world) for world in range(1, 5)}


def test_a_change_of_elasticity_keeps_the_plans(job: Any) -> None:
    plan_ahead(job(elasticity={"max_workers": 3}, batch={"global_size": 9, "micro_size": 1}))
    known = _cached_plan.cache_info().misses
    for world in (1, 2, 3):
        plan(job(elasticity={"max_workers": 8}, batch={"global_size": 9, "micro_size": 1}), world)
    assert _cached_plan.cache_info().misses == known


@given(
    st.integers(1, 64),
    st.sampled_from([0, 6, 8]),
    st.integers(1, 6),
    st.sampled_from([1, 3, 8, 64]),
    st.sampled_from(["auto", {"tp": 2}, {"pp": 2, "dp_replicate": 2}, {"dp_shard": 4, "ep": 2}]),
    st.sampled_from(["cpu", "h100", "l40s"]),
)
def test_every_world_has_a_legal_plan(
    world: int, experts: int, layers: int, micro_batches: int, parallelism: Any, profile: str
) -> None:
    document: dict[str, Any] = {
        "stop": {"steps": 1},
        "data": {"corpus": "python-stdlib"},
        "model": {"num_experts": experts, "num_layers": layers, "seq_len": 64},
        "batch": {"global_size": micro_batches, "micro_size": 1},
        "worker": {"gpus": int(profile != "cpu")},
    }
    spec = parse_spec(document)
    if parallelism != "auto":
        spec = spec.model_copy(update={"parallelism": ParallelismSpec(**parallelism)})
    planned = plan(spec, world, PROFILES[profile])
    layout, reason = planned.layout, planned.reason
    assert 1 <= layout.world_size <= world
    assert violations(layout, spec, plan_of(spec)) == ()
    assert reason
    assert plan(spec, world, PROFILES[profile]) == planned


def test_a_rank_of_a_larger_group_needs_less(job: Any) -> None:
    needs = [plan(job(elasticity={"max_workers": 8}), world).rank_bytes for world in (1, 2, 4)]
    assert sorted(needs, reverse=True) == needs
    assert needs[-1] > 0
    assert plan(job(task="mine:Task", data={}), 2).rank_bytes == 0


def _planned(spec: JobSpec, world_size: int) -> tuple[Layout, str]:
    found = plan(spec, world_size)
    return found.layout, found.reason


@pytest.mark.parametrize("world", [1, 5])
def test_every_worker_of_a_script_is_a_rank(world: int) -> None:
    planned = plan(parse_spec({"script": {"file": "train.py"}}), world)
    assert planned.layout == Layout(dp_replicate=world) and planned.fits and planned.host.own == 0
    assert planned.reason == "of_script: the script splits its own work"


@pytest.mark.parametrize(
    ("parallelism", "world", "layout", "reason"),
    [
        ("auto", 3, Layout(dp_replicate=3), "of_script: the loop splits its own work"),
        ({"dp_shard": "auto"}, 3, Layout(dp_shard=3), "as_requested"),
        ({"dp_shard": 2, "dp_replicate": 2}, 4, Layout(dp_shard=2, dp_replicate=2), "as_requested"),
        ({"dp_shard": 2}, 6, Layout(dp_shard=2, dp_replicate=3), "a new plan"),
        ({"dp_shard": 2}, 5, Layout(dp_shard=5), "a new plan"),
        ({"dp_replicate": 2}, 5, Layout(dp_shard=5), "a new plan"),
        ({"dp_replicate": 2, "otherwise": "idle"}, 5, Layout(dp_shard=2, dp_replicate=2), "1 of 5 ranks idle"),
        ({"dp_shard": 2, "otherwise": "idle"}, 5, Layout(dp_shard=2), "3 of 5 ranks idle"),
        ({"dp_shard": 4, "otherwise": "idle"}, 3, Layout(dp_shard=3), "a new plan"),
        ({"shard": "gradients"}, 2, Layout(dp_shard=2, shard=ShardLevel.GRADIENTS), "as_requested"),
    ],
)
def test_a_loop_is_sharded_as_its_spec_says(parallelism: Any, world: int, layout: Layout, reason: str) -> None:
    planned = plan(parse_spec({"loop": {"file": "train.py"}, "parallelism": parallelism}), world)
    assert planned.layout == layout and reason in planned.reason


EXAMPLES = Path(__file__).resolve().parents[4] / "examples"


def _example(name: str) -> Any:
    return parse_spec(yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8")))


def test_fitting_layouts_come_first_and_faster_ones_before(job: Any) -> None:
    found = rank(job(elasticity={"max_workers": 8}, worker={"memory_gib": 0.4}), 4, top=50)
    assert 0 < found.num_fitting < found.num_layouts
    fits = [prediction.fits for prediction in found.predictions]
    assert fits == sorted(fits, reverse=True)
    steps = [p.step_s for p in found.predictions if p.fits]
    assert all(later > 0.97 * earlier for earlier, later in itertools.pairwise(steps))


def test_the_parts_add_up(job: Any) -> None:
    for p in rank(job(elasticity={"max_workers": 8}), 8, top=30).predictions:
        assert sum(p.seconds.values()) == pytest.approx(p.step_s)
        assert sum(p.bytes.values()) == pytest.approx(p.memory_bytes, abs=8)
        assert p.tokens_per_s == pytest.approx(32 * 256 / p.step_s)


@pytest.mark.parametrize(("name", "least", "most"), [("llama-70b", 0.35, 0.55), ("moe-671b", 0.2, 0.5)])
def test_large_models_on_1024_h100_have_a_credible_utilisation(name: str, least: float, most: float) -> None:
    best = rank(_example(name), 1024, PROFILES["h100"], top=1).predictions[0]
    assert best.fits
    assert least < best.mfu < most
    assert best.layout.tp <= 8


def test_for_a_model_that_is_too_large_the_report_names_what_would_fit() -> None:
    found = rank(_example("llama-70b"), 16, PROFILES["l40s"])
    assert found.num_fitting == 0
    assert "70.6 B parameters does not fit on 16 GPUs of 48 GiB" in found.note
    assert "64 GPUs" in found.note
    assert "parallelism.offload: true" in found.note


def test_what_is_offloaded_must_fit_into_the_memory_of_the_host() -> None:
    spec = _example("llama-70b")
    little = spec.model_copy(update={"worker": spec.worker.model_copy(update={"memory_gib": 32.0})})
    enough = spec.model_copy(update={"worker": spec.worker.model_copy(update={"memory_gib": 67.0})})
    off = {"snapshot": spec.snapshot.model_copy(update={"enabled": False})}
    with_snapshots = rank(little, 16, PROFILES["l40s"]).note
    assert (
        "worker.memory_gib 165 (16 bytes for each parameter of a worker and 24 of its snapshots are" in with_snapshots
    )
    little, enough = little.model_copy(update=off), enough.model_copy(update=off)
    note = rank(little, 16, PROFILES["l40s"]).note
    assert "parallelism.offload: true with worker.memory_gib 67 (16 bytes for each parameter of a worker are" in note
    assert "worker.memory_gib is 32" in note
    assert "parallelism.offload: true (" in rank(enough, 16, PROFILES["l40s"]).note


def test_smaller_micro_batches_are_a_way_out(job: Any) -> None:
    model = {"seq_len": 4096, "vocab_size": 50_000, "num_layers": 1}
    spec = job(model, batch={"global_size": 64, "micro_size": 64}, worker={"memory_gib": 4})
    assert "batch.micro_size 1" in rank(spec, 1).note


def test_a_world_without_a_layout_names_the_nearest_that_has_one(job: Any) -> None:
    found = rank(job(), 11)
    assert found.num_layouts == 0
    assert "no legal layout of 11 ranks" in found.note
    assert "nearest number of ranks with one is 10" in found.note


def test_a_users_task_has_no_prediction(job: Any) -> None:
    found = rank(job(task="mine:Task", data={}), 4)
    assert found.predictions == ()
    assert "does not know the sizes" in found.note


def test_only_what_no_machine_could_hold_is_refused_at_submit(job: Any) -> None:
    assert refusal(job()) == ""
    assert refusal(job(worker={"memory_gib": 2})) == ""
    assert "does not fit on 1 worker of 0.1 GiB" in refusal(job(worker={"memory_gib": 0.1}))
    assert refusal(_example("llama-70b")) == ""
    huge = _example("llama-70b").model_copy(update={"elasticity": job().elasticity})
    assert "What would fit:" in refusal(huge)


def test_each_axis_that_the_best_layout_does_not_use_has_a_line() -> None:
    found = rank(_example("llama-70b"), 64, PROFILES["h100"])
    best = found.predictions[0]
    unused = [axis for axis in ("pp", "cp", "tp", "ep", "dp_replicate") if getattr(best.layout, axis) == 1]
    assert sorted(line.partition(":")[0] for line in found.why_not) == sorted(unused)
    assert any(" longer: " in line for line in found.why_not)
    assert next(line for line in found.why_not if line.startswith("ep:")).startswith("ep: no legal layout of 64 ranks")


def test_a_layout_is_compared_whatever_its_place() -> None:
    found = rank(_example("llama-70b"), 64, PROFILES["h100"], top=1, compare={"tp": 8, "pp": 2})
    assert found.compared is not None
    layout = found.compared.layout
    assert (layout.tp, layout.pp, layout.dp_shard, layout.world_size) == (8, 2, 4, 64)
    assert found.compared.step_s > found.predictions[0].step_s
    assert found.compared_refused == ()
    assert rank(_example("llama-70b"), 64, PROFILES["h100"], compare={"tp": 3}).compared is None


def test_a_layout_of_another_program_is_predicted_and_the_refusal_said() -> None:
    found = rank(_example("llama-70b"), 64, PROFILES["h100"], top=1, compare={"tp": 16})
    assert found.compared is not None and found.compared.layout.tp == 16
    (refusal_of_tp,) = found.compared_refused
    assert refusal_of_tp.startswith("tp 16 does not divide the number of key and value heads, 8: ")
    found = rank(_example("moe-671b"), 256, PROFILES["h100"], top=1, compare={"tp": 8, "pp": 8, "ep": 32})
    assert found.compared is not None and found.compared.layout.dp_shard == 4
    assert found.compared.links["ep"] is LinkClass.BETWEEN_NODES
    (refusal_of_ep,) = found.compared_refused
    assert refusal_of_ep.startswith("ep 32 takes its ranks from dp_shard 4, but ")


def test_recomputation_that_is_fixed_is_named_as_the_way_out() -> None:
    spec = _example("llama-70b")
    fixed = ParallelismSpec(recompute=Recompute.NONE)
    note = rank(spec.model_copy(update={"parallelism": fixed}), 64, PROFILES["h100"]).note
    assert "What would fit: " in note and "parallelism.recompute: " in note and "parallelism: auto (" in note
    assert "65,536" not in note


def test_a_larger_micro_batch_is_named_if_it_is_clearly_faster(job: Any) -> None:
    model = {"dim": 2048, "num_layers": 16, "num_heads": 16, "seq_len": 512, "vocab_size": 32_000}
    spec = job(model, batch={"global_size": 512, "micro_size": 1}, worker={"gpus": 1}, precision="bf16")
    (hint,) = rank(spec, 8, PROFILES["h100"]).hints
    assert hint.startswith("batch.micro_size 4 instead of 1: ") and "shorter steps" in hint
    assert rank(spec.model_copy(update={"worker": job().worker}), 8).hints == ()


def test_a_gpu_job_is_refused_only_beyond_the_error_of_the_prediction(job: Any) -> None:
    largest = max(profile.usable_bytes for profile in PROFILES.values())
    model = {"dim": 8192, "num_heads": 64, "hidden_dim": 28672, "seq_len": 512, "vocab_size": 32_000}
    found = []
    for num_layers in range(8, 40):
        spec = job({**model, "num_layers": num_layers}, worker={"gpus": 1}, batch={"global_size": 1, "micro_size": 1})
        table = rank(spec, 1, max(PROFILES.values(), key=lambda profile: profile.memory_bytes), top=1)
        found.append((table.predictions[0].memory_bytes / largest, bool(table.num_fitting), refusal(spec) != ""))
    assert any(not fits and not refused for _, fits, refused in found)
    assert all(refused is False for share, _, refused in found if share < 1.1)
