"""Parameters and arithmetic, bytes of one rank by hand and as measured, and the host memory of a worker."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kit.worlds.hugging_face_configs import small_config
from shoal_service.planner import memory_note, plan, rank, refusal
from shoal_service.planner.candidates import CONTEXTS, LEVELS, RECOMPUTES, SCHEDULES, Candidates, cut
from shoal_service.planner.gpus import PROFILES
from shoal_service.planner.memory import BytesPart, Work, host_need, in_flight, memory
from shoal_service.planner.parameter_state import ALL_ADAMW, Kind, count_adapter_params, estimate_state, list_tensors
from shoal_service.planner.shape import shape_of
from shoal_service.planner.step_time import SecondsPart
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.hugging_face import HuggingFaceConfig
from shoal_workers.contract.language_model import LanguageModelConfig
from shoal_workers.contract.layout import ContextMethod, Layout, Recompute, Schedule, ShardLevel
from shoal_workers.contract.spec import JobSpec
from shoal_workers.engine.parallel.assembly import Assembly
from shoal_workers.engine.step.named_optimizer import named_optimizer
from shoal_workers.engine.step.parameter_groups import freeze, groups_of_spec
from shoal_workers.tasks.transformer import Transformer

MODEL: dict[str, Any] = {
    "dim": 8,
    "num_heads": 2,
    "hidden_dim": 32,
    "num_layers": 3,
    "seq_len": 16,
    "vocab_size": 300,
}
BLOCK = 4 * 64 + 3 * 8 * 32 + 2 * 8
TABLE = 300 * 8
PARAMS = 3 * BLOCK + TABLE
FP32 = Work(micro_size=2, num_micro_batches=4, compute_bytes=4)


def _row(shape: Any, **choices: Any) -> Candidates:
    """One layout; everything that is not given is 1, or the first choice."""
    schedule = choices.pop("schedule", Schedule.ONE_F_ONE_B)
    pp, per_rank = choices.get("pp", 1), choices.get("per_rank", 1)
    numbers = dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "per_rank"), 1)
    numbers |= {"level": 0, "recompute": 0, "context": 0, "cut": 0, "fed": 4, **choices}
    numbers["schedule"] = SCHEDULES.index(schedule)
    columns: dict[str, Any] = {name: np.array([value]) for name, value in numbers.items()}
    return Candidates(**columns, cuts=(cut(shape, pp, per_rank, is_v_shaped=schedule.is_v_shaped),))


def _parts(shape: Any, profile: Any, work: Work = FP32, **choices: Any) -> dict[BytesPart, float]:
    total, parts = memory(shape, work, profile, _row(shape, **choices))
    assert sum(parts.values()) == pytest.approx(total)
    return {part: float(value[0]) for part, value in parts.items()}


@pytest.fixture
def shape(job: Any) -> Any:
    return shape_of(job(MODEL))


def test_on_one_rank_by_hand(shape: Any, round_numbers: Any) -> None:
    parts = _parts(shape, round_numbers)
    assert parts[BytesPart.PARAMETERS] == 4 * PARAMS
    assert parts[BytesPart.OPTIMIZER] == 8 * PARAMS
    # their own, and those of a unit and the root on the way there
    assert parts[BytesPart.GRADIENTS] == 4 * PARAMS + (BLOCK + TABLE) * 8
    assert parts[BytesPart.GATHERED] == 4 * PARAMS
    # 32 tokens; of a block: 2 norms with inputs, normalised inputs and outputs of 8, rotated queries and keys, values,
    # the result and its copy, 4 x 32
    block = 4 * (6 * 8 + 5 * 8 + 4 * 32)
    ends = 4 * (8 + 3 * 8)
    assert parts[BytesPart.ACTIVATIONS] == 32 * (3 * block + ends)
    assert parts[BytesPart.LOGITS] == 32 * 300 * 12
    assert parts[BytesPart.RESERVED] == 1000


def test_each_shard_level_reduces_the_named_parts(shape: Any, round_numbers: Any) -> None:
    split = [level for level in ShardLevel if level is not ShardLevel.NONE]
    whole, gradients, full = (_parts(shape, round_numbers, dp_shard=4, level=LEVELS.index(x)) for x in split)
    for parts in (whole, gradients, full):
        assert parts[BytesPart.PARAMETERS] == PARAMS
        assert parts[BytesPart.OPTIMIZER] == 2 * PARAMS
    moving = (BLOCK + TABLE) * 8
    assert whole[BytesPart.GRADIENTS] == max(4 * PARAMS, PARAMS + moving)
    assert gradients[BytesPart.GRADIENTS] == full[BytesPart.GRADIENTS] == PARAMS + moving
    assert whole[BytesPart.GATHERED] == gradients[BytesPart.GATHERED] == 4 * PARAMS
    assert full[BytesPart.GATHERED] == 4 * (2 * BLOCK + TABLE)


def test_a_plain_replica_gathers_nothing_and_has_its_gradients_twice(shape: Any, round_numbers: Any) -> None:
    parts = _parts(shape, round_numbers, dp_replicate=4, level=LEVELS.index(ShardLevel.NONE))
    assert (parts[BytesPart.PARAMETERS], parts[BytesPart.OPTIMIZER]) == (4 * PARAMS, 8 * PARAMS)
    assert (parts[BytesPart.GATHERED], parts[BytesPart.GRADIENTS]) == (0, 8 * PARAMS)


def test_rounding_takes_a_copy_random_numbers_and_what_is_sent(shape: Any, round_numbers: Any) -> None:
    rounded, plain = replace(FP32, reduction="int8"), LEVELS.index(ShardLevel.NONE)
    coded = 1 + 4 / 128
    replica = _parts(shape, round_numbers, rounded, dp_replicate=4, level=plain)
    assert replica[BytesPart.GRADIENTS] == (8 + 3 * coded) * PARAMS
    sharded = _parts(shape, round_numbers, rounded, dp_shard=4, level=LEVELS.index(ShardLevel.FULL))
    assert sharded[BytesPart.GRADIENTS] == PARAMS + (BLOCK + TABLE) * (8 + 8 + coded)


def test_one_micro_batchs_gradients_come_as_its_activations_go(shape: Any, round_numbers: Any) -> None:
    moving = (BLOCK + TABLE) * 8
    parts = _parts(shape, round_numbers, dp_shard=4, fed=1)
    assert parts[BytesPart.ACTIVATIONS] > PARAMS
    assert parts[BytesPart.GRADIENTS] == moving
    uncut = _parts(shape, round_numbers, Work(1, 1, 4), fed=1, recompute=RECOMPUTES.index(Recompute.FULL))
    assert 0 < uncut[BytesPart.ACTIVATIONS] < 4 * PARAMS
    assert uncut[BytesPart.GRADIENTS] == 4 * PARAMS - uncut[BytesPart.ACTIVATIONS] + moving


def test_half_precision_halves_gathered_and_saved_bytes(shape: Any, round_numbers: Any) -> None:
    half = _parts(shape, round_numbers, Work(2, 4, 2))
    assert half[BytesPart.GATHERED] == 2 * PARAMS
    assert half[BytesPart.PARAMETERS] == 4 * PARAMS
    assert half[BytesPart.ACTIVATIONS] < _parts(shape, round_numbers)[BytesPart.ACTIVATIONS]


def test_context_parallelism_splits_tokens_and_shards_parameters(shape: Any, round_numbers: Any) -> None:
    one, two = _parts(shape, round_numbers), _parts(shape, round_numbers, cp=2)
    keys = 3 * 4 * 16 * 2 * 8  # in each of 3 blocks, of the other rank's 16 tokens
    assert two[BytesPart.ACTIVATIONS] == one[BytesPart.ACTIVATIONS] / 2 + keys
    assert two[BytesPart.PARAMETERS] == one[BytesPart.PARAMETERS] / 2


@pytest.mark.parametrize(("context", "copies"), [(ContextMethod.ALL_GATHER, 4), (ContextMethod.ULYSSES, 2)])
def test_attention_of_a_context_rank_saves_the_keys_of_the_others(
    job: Any, round_numbers: Any, context: ContextMethod, copies: int
) -> None:
    """Two heads with keys for four ranks: ulysses copies them once."""
    shape = shape_of(job({**MODEL, "num_heads": 8, "num_kv_heads": 2, "dim": 16}))
    own = _parts(shape, round_numbers)[BytesPart.ACTIVATIONS] / 4
    parts = _parts(shape, round_numbers, cp=4, context=CONTEXTS.index(context))
    tokens, keys_and_values = 32 / 4, 2 * 2 * 2
    assert parts[BytesPart.ACTIVATIONS] == own + 3 * 4 * tokens * (copies - 1) * keys_and_values


def test_the_first_rank_of_1f1b_has_most_in_flight(shape: Any) -> None:
    row = _row(shape, pp=3, fed=8)
    assert [float(in_flight(row, np.array([rank]))[0]) for rank in range(3)] == [3, 2, 1]
    assert float(in_flight(_row(shape, pp=3, fed=8, schedule=Schedule.GPIPE), np.array([2]))[0]) == 8
    assert float(in_flight(_row(shape, pp=3, fed=2), np.array([0]))[0]) == 2


def test_a_tied_head_on_another_rank_is_a_copy(job: Any, round_numbers: Any) -> None:
    tied = shape_of(job({**MODEL, "num_layers": 2}))
    assert tied is not None
    first, _, last = cut(tied, 2, 1, is_v_shaped=False).extremes
    assert first.has_embedding and last.has_head
    parts = _parts(tied, round_numbers, pp=2)
    assert parts[BytesPart.PARAMETERS] == 4 * (BLOCK + TABLE)


def test_experts_are_cut_by_ep_and_then_by_what_is_left(job: Any, round_numbers: Any) -> None:
    shape: Any = shape_of(job({**MODEL, "num_experts": 4, "expert_hidden_dim": 16}))
    experts, rest = 3 * 4 * 3 * 8 * 16, shape.params - 8 - 3 * 4 * 3 * 8 * 16
    parts = _parts(shape, round_numbers, dp_shard=4, ep=2)
    assert parts[BytesPart.PARAMETERS] == pytest.approx(4 * (experts / 4 + rest / 4))
    assert parts[BytesPart.GATHERED] == pytest.approx(4 * (experts / 2 + rest))
    assert parts[BytesPart.EXCHANGE] == 2 * 32 * 2 * 8 * 4


def test_experts_over_tp_ranks_are_cut_by_all_ranks_and_get_the_tokens_of_one(job: Any, round_numbers: Any) -> None:
    shape: Any = shape_of(job({**MODEL, "num_experts": 4, "expert_hidden_dim": 16}))
    experts = 3 * 4 * 3 * 8 * 16
    apart, folded = (_parts(shape, round_numbers, dp_shard=dp_shard, tp=2, ep=4) for dp_shard in (4, 2))
    assert apart[BytesPart.EXCHANGE] == 2 * 32 * 2 * 8 * 4 == 2 * folded[BytesPart.EXCHANGE]
    dense = apart[BytesPart.PARAMETERS] - 4 * experts / 8
    assert folded[BytesPart.PARAMETERS] == pytest.approx(2 * dense + 4 * experts / 4)
    copies = 3 * 4 * 32 * 3 * 2 * 8  # of each token, for two experts, in 3 blocks
    saved = apart[BytesPart.ACTIVATIONS] - folded[BytesPart.ACTIVATIONS]
    assert saved == copies / 2


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.sampled_from([0, 4]), st.sampled_from([2, 4]))
def test_more_recomputation_never_needs_more_memory(tp: int, pp: int, experts: int, size: int) -> None:
    document = {"model": {"num_experts": experts}, "stop": {"steps": 1}, "data": {"corpus": "python-stdlib"}}
    shape = shape_of(parse_spec(document))
    kept = [
        sum(_parts(shape, PROFILES["h100"], Work(4, 8, size), tp=tp, pp=pp, recompute=RECOMPUTES.index(mode)).values())
        for mode in (Recompute.FULL, Recompute.SELECTIVE, Recompute.NONE)
    ]
    assert kept[0] <= kept[1] * 1.0001
    # one block is recomputed at a time: with one block in flight recomputation saves nothing
    assert kept[1] <= kept[2] * 1.0001 or pp == 4


MIB = 1 << 20
SMALL = {"dim": 1024, "num_layers": 8, "num_heads": 8, "seq_len": 64}
"""101 M parameters."""
BATCH = {"global_size": 8, "micro_size": 1}
SHARDED: dict[str, Any] = {"parallelism": {"dp_shard": "auto"}}


def test_on_a_cpu_the_state_is_there_twice_and_a_buddy_has_two_copies(job: Any) -> None:
    need = host_need(job(), MIB, 100 * MIB)
    assert (need.process, need.training, need.snapshots) == (300 * MIB, 100 * MIB, 12 * MIB)
    assert (need.sent, need.kept) == (36 * MIB, 24 * MIB)
    assert need.alone == 412 * MIB


def test_what_is_switched_off_needs_nothing(job: Any) -> None:
    nothing = host_need(job(snapshot={"enabled": False}), MIB, 0)
    assert (nothing.snapshots, nothing.sent, nothing.kept) == (0, 0, 0)


def test_a_gpu_and_a_fused_update_have_two_copies_in_the_host(job: Any) -> None:
    for sections in ({"worker": {"gpus": 1}}, {"optimizer": {"fused": True}}):
        assert host_need(job(**sections), MIB, 0).snapshots == 24 * MIB


def test_a_task_that_builds_its_model_in_each_worker_needs_all_of_it(job: Any) -> None:
    sections: dict[str, Any] = {"task": "mine:Task", "data": {}, "elasticity": {"max_workers": 4}}
    whole = plan(job(**sections, plan={"num_params": 256 * MIB}), 4).host
    assert (whole.build, whole.training, whole.snapshots) == (1024 * MIB, 1024 * MIB, 768 * MIB)
    many = plan(job(**sections | {"elasticity": {"max_workers": 8}}, plan={"num_params": 256 * MIB}), 8).host
    assert many.build == 1024 * MIB and many.alone == (300 + 1024) * MIB, "more than its eighth of the state"
    parts = plan(job(**sections, plan={"num_params": 256 * MIB, "deferred_init": True}), 4).host
    assert parts.build == 0
    assert plan(job(**sections), 4).host.alone == 0, "its size is not known"


def test_snapshots_are_a_part_of_the_memory_that_a_layout_needs(job: Any) -> None:
    sizes = {
        enabled: rank(job(SMALL, batch=BATCH, snapshot={"enabled": enabled}, **SHARDED), 4, top=1).predictions[0]
        for enabled in (True, False)
    }
    assert sizes[True].bytes["snapshots"] == pytest.approx(12 * 101e6 / 4, rel=0.02)
    assert sizes[True].memory_bytes - sizes[True].bytes["snapshots"] == sizes[False].memory_bytes


def test_a_job_that_only_its_snapshots_make_too_large_is_refused_with_that_way_out(job: Any) -> None:
    spec = job(SMALL, batch=BATCH, worker={"memory_gib": 1.2}, elasticity={"max_workers": 4})
    words = refusal(spec)
    assert "snapshots" in words and "snapshot.enabled: false (" in words
    assert refusal(job(SMALL, batch=BATCH, worker={"memory_gib": 2}, elasticity={"max_workers": 4})) == ""


def test_a_task_whose_whole_model_exceeds_the_workers_memory_is_refused() -> None:
    document: dict[str, Any] = {
        "task": "mine:Task",
        "stop": {"steps": 1},
        "plan": {"num_params": 10**9},
        "worker": {"memory_gib": 3},
        "batch": BATCH,
        "elasticity": {"max_workers": 8},
    }
    words = refusal(parse_spec(document))
    assert "worker.memory_gib is 3" in words and "3.7 GiB" in words and "deferred_init" in words
    assert refusal(parse_spec({**document, "worker": {"memory_gib": 5}})) == ""
    in_parts = {"num_params": 10**9, "deferred_init": True}
    assert refusal(parse_spec({**document, "plan": in_parts, "worker": {"memory_gib": 3.7}})) == ""


def test_at_submit_a_node_that_is_too_small_for_the_workers_on_it_is_noted(job: Any) -> None:
    spec = job(SMALL, batch=BATCH, elasticity={"max_workers": 4}, **SHARDED)
    need = plan(spec, 4).host
    two, three, four = (need.of(number) / (1 << 30) for number in (2, 3, 4))
    assert memory_note(spec, [(4.0, 0.0, four + 0.1)], None) == ""
    assert memory_note(spec, [(2.0, 0.0, two + 0.1), (2.0, 0.0, two + 0.1)], None) == ""
    words = memory_note(spec, [(2.0, 0.0, two + 0.1), (3.0, 0.0, two + 0.1)], None)
    assert words.startswith(f"For 3 workers on one node the planner predicts {three:,.1f} GiB (process 0.3 + 3 x ")
    assert memory_note(job(task="mine:Task", data={}, elasticity={"max_workers": 4}), [(4.0, 0.0, 0.1)], None) == ""


def test_at_submit_a_node_without_room_for_plain_replicas_is_noted_only_if_it_has_none_for_shards(job: Any) -> None:
    spec = job(SMALL, batch=BATCH, elasticity={"max_workers": 4})
    shards = plan(job(SMALL, batch=BATCH, elasticity={"max_workers": 4}, **SHARDED), 4).host.of(4) / (1 << 30)
    assert plan(spec, 4).host.of(4) / (1 << 30) > shards + 0.2
    assert memory_note(spec, [(4.0, 0.0, shards + 0.1)], None) == ""
    assert f"predicts {shards:,.1f} GiB" in memory_note(spec, [(4.0, 0.0, shards - 0.1)], None)


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


DENSE = {"dim": 16, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 32, "num_layers": 2, "seq_len": 8}
EXPERTS = {
    **DENSE,
    "num_layers": 3,
    "num_experts": 4,
    "num_dense_layers": 1,
    "num_shared_experts": 1,
    "expert_hidden_dim": 24,
    "tied_head": False,
}
_TEXT = {"corpus": "python-stdlib"}


def _spec(model: dict[str, Any], **sections: Any) -> JobSpec:
    return parse_spec({"stop": {"steps": 1}, "data": _TEXT, "model": model, **sections})


def _model(model: dict[str, Any]) -> torch.nn.Module:
    return Transformer(LanguageModelConfig(**model), 257)


@pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_the_tensors_are_those_of_the_model(model: dict[str, Any]) -> None:
    real = {name: tuple(one.shape) for name, one in _model(model).named_parameters()}
    config = LanguageModelConfig(**model)
    assert {one.name: one.shape for one in list_tensors(config, 257)} == real
    assert sum(one.numel for one in list_tensors(config, 257, by_name=False)) == sum(
        one.numel for one in list_tensors(config, 257)
    )
    experts = {name for name in real if ".experts." in name}
    assert {one.name for one in list_tensors(config, 257) if one.kind is Kind.EXPERTS} == experts


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adam with amsgrad": {"name": "adam", "args": {"amsgrad": True}},
    "sgd": {"name": "sgd"},
    "momentum": {"name": "sgd", "args": {"momentum": 0.9}},
    "lion": {"name": "lion"},
    "adagrad": {"name": "adagrad"},
    "rmsprop": {"name": "rmsprop", "args": {"centered": True}},
    "muon": {"name": "muon"},
    "adafactor": {"name": "adafactor"},
    "adamw with averages": {"ema_decay": 0.99},
    "by path": {"name": "torch.optim.NAdam"},
    "frozen": {"groups": [{"match": "embedding.*", "frozen": True}, {"match": "blocks.0.*", "frozen": True}]},
    "muon on few": {"name": "muon", "groups": [{"match": "*.attention.*", "muon": False}]},
}


@pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_and_gradients_are_those_of_the_optimizer(name: str, model: dict[str, Any]) -> None:
    _assert_holding(_spec(model, optimizer=OPTIMIZERS[name]), model)


@pytest.mark.parametrize("compress", ["none", "bf16", "int8", "sparse"])
@pytest.mark.parametrize("name", ["adamw", "momentum", "frozen"])
def test_an_island_keeps_the_outer_state_too(name: str, compress: str) -> None:
    islands = {"num": 2, "index": 0, "compress": compress}
    _assert_holding(_spec(DENSE, optimizer=OPTIMIZERS[name], islands=islands), DENSE)


def _assert_holding(spec: JobSpec, model: dict[str, Any]) -> None:
    """The planner's bytes are those of the optimizer that the engine makes."""
    module = _model(model)
    freeze(module, spec.optimizer)
    groups = groups_of_spec(module, spec.optimizer)
    optimizer = named_optimizer(Assembly(Layout(), (module,)), spec.optimizer, groups, spec.islands)
    trained = [one for one in module.parameters() if one.requires_grad]
    for one in trained:
        one.grad = torch.randn_like(one)
    optimizer.step()
    held = {
        id(parameter): sum(v.nbytes for v in state.values() if isinstance(v, torch.Tensor) and v.numel() > 1)
        for parameter, state in optimizer.state.items()
    }
    shape = shape_of(spec)
    assert shape is not None
    param_state = estimate_state(spec, shape)
    for kind, is_expert in ((param_state.dense, False), (param_state.experts, True)):
        own = [one for name, one in module.named_parameters() if (".experts." in name) is is_expert]
        total = sum(one.numel() for one in own)
        assert total * kind.state_bytes == pytest.approx(sum(held.get(id(one), 0) for one in own), rel=1e-6)
        if total:
            assert total * kind.trained_share == pytest.approx(sum(one.numel() for one in own if one.requires_grad))


def test_snapshots_follow_the_optimizer_and_what_is_frozen() -> None:
    shape = shape_of(_spec(DENSE))
    lion = host_need(_spec(DENSE, optimizer={"name": "lion"}), 1000, 0, shape)
    assert lion.snapshots == 8000
    half = {"groups": [{"match": "blocks.*", "frozen": True}]}
    frozen = host_need(_spec(DENSE, optimizer=half), 1000, 0, shape)
    whole = host_need(_spec(DENSE), 1000, 0, shape)
    assert frozen.snapshots < whole.snapshots == 12000
    assert estimate_state(_spec(DENSE), shape) == ALL_ADAMW


def _hugging_face(name: str, **model: Any) -> JobSpec:
    config = small_config(name)
    return _spec({"config": config, "seq_len": 32, **model}, task="shoal_workers.tasks.hf:HuggingFaceLM")


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss"])
def test_families_with_experts_have_their_parameters(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    spec = _hugging_face(name)
    shape = shape_of(spec)
    assert shape is not None
    with torch.device("meta"):
        real = AutoModelForCausalLM.from_config(AutoConfig.for_model(**spec.model["config"]))
    experts = sum(one.numel() for key, one in real.named_parameters() if ".experts." in key and "bias" not in key)
    assert shape.num_moe * shape.moe.expert_params == experts
    assert shape.params == pytest.approx(sum(one.numel() for one in real.parameters()), rel=0.03)


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj", "o_proj", "query_key_value"]])
def test_adapters_are_all_that_lora_trains(name: str, targets: Any) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoConfig, AutoModelForCausalLM

    from shoal_workers.tasks.lora import add_adapters

    assert peft
    config = small_config(name)
    linear = {"llama": "q_proj", "mixtral": "q_proj", "gpt_neox": "query_key_value", "deepseek_v3": "o_proj"}[name]
    lora = {"r": 4, "target_modules": targets if targets == "all-linear" else [linear]}
    settings = HuggingFaceConfig(config=config, lora=lora)  # type: ignore[arg-type]
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert settings.lora is not None
    add_adapters(network, settings.lora)
    real = sum(one.numel() for one in network.parameters() if one.requires_grad)
    assert count_adapter_params(settings) == real
    spec = _hugging_face(name, lora=lora)
    shape = shape_of(spec)
    assert shape is not None
    param_state = estimate_state(spec, shape)
    assert param_state.dense.trained_share * shape.params == pytest.approx(real)
    assert param_state.experts.trained_share == param_state.experts.state_bytes == 0
    need = host_need(spec, shape.params, 0, shape)
    assert need.snapshots < 0.5 * host_need(_hugging_face(name), shape.params, 0, shape).snapshots


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_experts_over_ranks_need_less_and_a_frozen_base_takes_less_time(name: str) -> None:
    batch = {"global_size": 8, "micro_size": 1}
    whole = _hugging_face(name).model_copy(update={"batch": _spec(DENSE, batch=batch).batch})
    ranking = rank(whole, 4, PROFILES["h100"], top=100)
    found = {one.layout.ep: one for one in ranking.predictions if one.layout.num_shards == 4}
    assert found[2].layout.shard is found[1].layout.shard
    assert found[2].bytes[BytesPart.GATHERED] < found[1].bytes[BytesPart.GATHERED]
    adapted = _hugging_face(name, lora={"r": 2}).model_copy(update={"batch": whole.batch})
    [one] = rank(adapted, 1, PROFILES["h100"]).predictions
    [other] = rank(whole, 1, PROFILES["h100"]).predictions
    assert one.seconds[SecondsPart.COMPUTE] < other.seconds[SecondsPart.COMPUTE]
    assert one.seconds[SecondsPart.UPDATE] < 0.2 * other.seconds[SecondsPart.UPDATE]
    assert one.bytes[BytesPart.GRADIENTS] < other.bytes[BytesPart.GRADIENTS]
    assert one.bytes[BytesPart.PARAMETERS] == other.bytes[BytesPart.PARAMETERS]
