"""Bytes of one rank: by hand for a tiny model, and how they move with the choices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_service.planner.candidates import LEVELS, RECOMPUTES, SCHEDULES, Candidates
from shoal_service.planner.cuts import cut
from shoal_service.planner.gpus import PROFILES
from shoal_service.planner.memory import BytesPart, Work, in_flight, memory
from shoal_service.planner.shape import shape_of
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.layout import Recompute, Schedule, ShardLevel

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
    whole, gradients, full = (_parts(shape, round_numbers, dp_shard=4, level=LEVELS.index(x)) for x in ShardLevel)
    for parts in (whole, gradients, full):
        assert parts[BytesPart.PARAMETERS] == PARAMS
        assert parts[BytesPart.OPTIMIZER] == 2 * PARAMS
    moving = (BLOCK + TABLE) * 8
    assert whole[BytesPart.GRADIENTS] == max(4 * PARAMS, PARAMS + moving)
    assert gradients[BytesPart.GRADIENTS] == full[BytesPart.GRADIENTS] == PARAMS + moving
    assert whole[BytesPart.GATHERED] == gradients[BytesPart.GATHERED] == 4 * PARAMS
    assert full[BytesPart.GATHERED] == 4 * (2 * BLOCK + TABLE)


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
