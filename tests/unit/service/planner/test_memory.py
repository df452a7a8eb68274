"""Bytes of one rank, by hand for a tiny model and as they move with the choices, and the host memory of a worker."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_service.planner import memory_note, plan, rank, refusal
from shoal_service.planner.candidates import LEVELS, RECOMPUTES, SCHEDULES, Candidates, cut
from shoal_service.planner.gpus import PROFILES
from shoal_service.planner.memory import LOG_ENTRIES, BytesPart, Work, host_need, in_flight, memory
from shoal_service.planner.shape import shape_of
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.layout import Recompute, Schedule, ShardLevel
from shoal_workers.snapshot_store.slots.buddy_slots import MAX_ENTRIES, STEPS_PER_COPY

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
    assert two[BytesPart.ACTIVATIONS] == one[BytesPart.ACTIVATIONS] / 2
    assert two[BytesPart.PARAMETERS] == one[BytesPart.PARAMETERS] / 2


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


def test_on_a_cpu_the_state_is_there_twice_and_a_buddy_has_two_copies_and_the_log(job: Any) -> None:
    need = host_need(job(), MIB, 100 * MIB)
    assert (need.process, need.training, need.snapshots) == (300 * MIB, 100 * MIB, 12 * MIB)
    assert (need.sent, need.kept, need.log) == (36 * MIB, 24 * MIB, 24 * 4 * MIB)
    assert need.alone == 412 * MIB


def test_what_is_switched_off_needs_nothing(job: Any) -> None:
    without_log = host_need(job(snapshot={"gradient_log": "off"}), MIB, 0)
    assert without_log.log == 0 and without_log.kept == 24 * MIB
    nothing = host_need(job(snapshot={"enabled": False}), MIB, 0)
    assert (nothing.snapshots, nothing.sent, nothing.kept, nothing.log) == (0, 0, 0, 0)


def test_a_gpu_and_a_fused_update_have_two_copies_in_the_host(job: Any) -> None:
    for sections in ({"worker": {"gpus": 1}}, {"optimizer": {"fused": True}}):
        assert host_need(job(**sections), MIB, 0).snapshots == 24 * MIB
    assert host_need(job(worker={"gpus": 1}), MIB, 0).log == 0
    assert host_need(job(reduce_precision="bf16"), MIB, 0).log == 24 * 2 * MIB


def test_the_log_has_the_entries_of_the_store() -> None:
    assert STEPS_PER_COPY < LOG_ENTRIES <= MAX_ENTRIES


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
        enabled: rank(job(SMALL, batch=BATCH, snapshot={"enabled": enabled}), 4, top=1).predictions[0]
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
    spec = job(SMALL, batch=BATCH, elasticity={"max_workers": 4})
    need = plan(spec, 4).host
    two, three, four = (need.of(number) / (1 << 30) for number in (2, 3, 4))
    assert memory_note(spec, [(4.0, 0.0, four + 0.1)], None) == ""
    assert memory_note(spec, [(2.0, 0.0, two + 0.1), (2.0, 0.0, two + 0.1)], None) == ""
    words = memory_note(spec, [(2.0, 0.0, two + 0.1), (3.0, 0.0, two + 0.1)], None)
    assert words.startswith(f"The prediction for 3 workers on one node is {three:,.1f} GiB (process 0.3 + 3 x ")
    assert memory_note(job(task="mine:Task", data={}, elasticity={"max_workers": 4}), [(4.0, 0.0, 0.1)], None) == ""
